"""Normalise a training batch as HBN does, in plain operations or fused kernels.

In one channel, a batch has ``n`` values with mean ``mu`` and variance ``var``.
``M`` and ``V`` are the shared ones. With ``a = sigmoid(logit)``, HBN computes

    m = a mu + (1 - a) M        v = a var + (1 - a) V        r = 1 / sqrt(v + eps)        y = (x - m) r weight + bias

With the upstream gradient ``g``, ``S = sum g`` and ``D = sum g (x - m)``, it
follows that

    dbias = S        dweight = r D        dm = -r weight S        dv = -r^3 weight D / 2
    dlogit = a (1 - a) (dm (mu - M) + dv (var - V)) = (1 - a) (dm (m - M) + dv (v - V))
    dx = r weight g + (a / n) (dm + 2 dv (x - mu))

Called with mean ``m``, inverse standard deviation ``q`` and weight ``u``,
BatchNorm's own backward kernel returns ``S``, ``q D`` and

    q u (g - S / n - (x - m) q^2 D / n)

With ``q = sqrt(a) r`` and ``u = weight / sqrt(a)`` this is ``dx`` up to a constant
per channel, as ``a (mu - m) = (1 - a) (m - M)``:

    dx = kernel - (1 - a) (dm + 2 dv (m - M)) / n
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fl_bn.bn.moments import channel_moments, ordinary

Affine = tuple[Tensor | None, Tensor | None]
"""Weight and bias (C,); either may be missing."""


def mixture(mix_C: Tensor, shared: Sequence[Tensor], batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Mix a batch's moments with the shared statistics, all (C,) (HBN, equation 9).

    ``mix_C`` is the batch's weight, from 0 to 1.
    """
    return torch.lerp(shared[0], batch[0], mix_C), torch.lerp(shared[1], batch[1], mix_C)


def normalise(x: Tensor, affine: Affine, logit_C: Tensor, shared: Sequence[Tensor], batch: Sequence[Tensor], eps: float) -> Tensor:
    """Normalise ``x`` by fused kernels with the mixture of its moments and the shared statistics.

    Tensors but ``x`` are all float32 or all float64. The gradient for ``x``
    respects that ``batch`` depends on it. Inside ``torch.func`` and
    ``torch.compile`` use ``plain``.

    Args:
        x: a batch (B, C, *).
        affine: weight and bias, (C,) each or None.
        logit_C: mixing logits, before the sigmoid.
        shared: mean and variance, (C,) each.
        batch: mean and biased variance of ``x``, (C,) each, detached.
        eps: added to the variance.
    """
    return _Normalise.apply(ordinary(x), *affine, logit_C, *shared, *batch, eps)  # type: ignore[no-any-return]


def plain(x: Tensor, affine: Affine, logit_C: Tensor, shared: Sequence[Tensor], batch: Sequence[Tensor], eps: float) -> Tensor:
    """Compute ``normalise`` in plain operations, also for second derivatives.

    Unlike there, ``batch`` is still in autograd's graph.
    """
    weight_C, bias_C = affine
    mean_C, var_C = mixture(torch.sigmoid(logit_C), shared, batch)
    scale_C = torch.rsqrt(var_C + eps)
    if weight_C is not None:
        scale_C = scale_C * weight_C
    shift_C = -mean_C * scale_C
    if bias_C is not None:
        shift_C = shift_C + bias_C
    return torch.addcmul(_tall(shift_C, x), x.to(scale_C.dtype), _tall(scale_C, x)).to(x.dtype)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x, weight_C, bias_C, logit_C, shared_mean_C, shared_var_C, batch_mean_C, batch_var_C, eps: float
    ) -> Tensor:
        mix_C = torch.sigmoid(logit_C).clamp_min_(torch.finfo(logit_C.dtype).tiny)  # its root divides in the backward
        mean_C, var_C = mixture(mix_C, (shared_mean_C, shared_var_C), (batch_mean_C, batch_var_C))
        ctx.save_for_backward(x, weight_C, bias_C, logit_C, shared_mean_C, shared_var_C)
        ctx.mix_C, ctx.mean_C, ctx.var_C, ctx.eps = mix_C, mean_C, var_C, eps
        return torch.batch_norm(x, weight_C, bias_C, mean_C, var_C, False, 0.0, eps, torch.backends.cudnn.enabled)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        if torch.is_grad_enabled():  # create_graph=True
            return _second_order(ctx, grad)
        x, weight_C, bias_C, _, shared_mean_C, shared_var_C = ctx.saved_tensors
        mix_C, mean_C = ctx.mix_C, ctx.mean_C
        inverse_C, per_root_C = torch.rsqrt(ctx.var_C + ctx.eps), torch.rsqrt(mix_C)
        grad_x, scaled_C, grad_bias_C = torch.ops.aten.native_batch_norm_backward(
            grad,
            x,
            per_root_C if weight_C is None else weight_C * per_root_C,
            None,
            None,
            mean_C,
            inverse_C * (mix_C * per_root_C),
            True,
            ctx.eps,
            (ctx.needs_input_grad[0], True, True),
        )
        grad_weight_C = scaled_C * per_root_C
        scale_C = inverse_C if weight_C is None else inverse_C * weight_C
        rest_C = torch.addcmul(scale_C, scale_C, mix_C, value=-1)  # scale (1 - mix)
        mean_part_C, var_part_C, from_shared_C = grad_bias_C * rest_C, inverse_C * grad_weight_C * rest_C, shared_mean_C - mean_C
        grad_logit_C = torch.addcmul(mean_part_C * from_shared_C, var_part_C, shared_var_C - ctx.var_C, value=0.5)
        if grad_x is not None:
            constant_C = torch.addcmul(mean_part_C, var_part_C, from_shared_C, value=-1)
            grad_x.add_(_tall(constant_C, x), alpha=x.shape[1] / x.numel())
        return grad_x, weight_C if weight_C is None else grad_weight_C, bias_C if bias_C is None else grad_bias_C, grad_logit_C, *[None] * 5


def _second_order(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
    """Compute the gradient by ``plain``, which can be differentiated again."""
    own: list[Any] = [tensor if tensor is None else tensor.view_as(tensor) for tensor in ctx.saved_tensors]
    x, weight_C, bias_C, logit_C, shared_mean_C, shared_var_C = own
    y = plain(x, (weight_C, bias_C), logit_C, (shared_mean_C, shared_var_C), channel_moments(x), ctx.eps)
    wanted = [index for index, needed in enumerate(ctx.needs_input_grad[:4]) if needed]
    gradients = dict(zip(wanted, torch.autograd.grad(y, [own[index] for index in wanted], grad, create_graph=True), strict=True))
    return *(gradients.get(index) for index in range(4)), *[None] * 5


def _tall(values_C: Tensor, x: Tensor) -> Tensor:
    return values_C.view(1, -1, *[1] * (x.dim() - 2))
