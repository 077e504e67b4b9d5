"""HBN's layer in training (equations 9 and 10) in plain torch operations: autograd computes the gradient, also through the batch's moments.

The layer itself was computed in this way, until its gradient was derived by hand for the fused kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, logit: Tensor, shared_mean: Tensor, shared_var: Tensor, eps: float
) -> Tensor:
    """Normalise ``x`` (B, C, *) by ``a * batch + (1 - a) * shared`` with ``a = sigmoid(logit)``; the other tensors are (C,)."""
    dims, shape = [0, *range(2, x.dim())], (1, -1, *([1] * (x.dim() - 2)))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = wide.mean(dims, keepdim=True)
    var = (wide - mean).square().mean(dims)
    a = torch.sigmoid(logit).to(var.dtype)
    mixed_mean, mixed_var = torch.lerp(shared_mean.to(var.dtype), mean.flatten(), a), torch.lerp(shared_var.to(var.dtype), var, a)
    scale = torch.rsqrt(mixed_var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mixed_mean * scale
    if bias is not None:
        shift = shift + bias
    return torch.addcmul(shift.view(shape), wide.to(scale.dtype), scale.view(shape)).to(x.dtype)
