"""FedTAN's first local step by automatic differentiation: the activations of all clients are in one graph, and share moments.

Let F_i be client i's mean loss, p_i its share of the samples, and F = sum p_i F_i. FedTAN's gradient for client i is the gradient of F
with respect to client i's own copy of the weights, divided by p_i. It works for any chain of layers and images of any sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm


def backward_together(models: Sequence[nn.Sequential], batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write every client's gradient into the ``grad`` of its model, and update the running statistics of all by those of the union."""
    samples = [len(y) for _, y in batches]
    shares = [n / sum(samples) for n in samples]
    xs = [x for x, _ in batches]
    for layers in zip(*models, strict=True):
        if isinstance(layers[0], _BatchNorm):
            xs = normalise_together(layers, xs)
        else:
            xs = [layer(x) for layer, x in zip(layers, xs, strict=True)]
    losses = [F.cross_entropy(x, y) for x, (_, y) in zip(xs, batches, strict=True)]
    sum(share * loss for share, loss in zip(shares, losses, strict=True)).backward()
    for model, share in zip(models, shares, strict=True):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= share


def normalise_together(layers: Sequence[_BatchNorm], xs: Sequence[Tensor]) -> list[Tensor]:
    """Normalise each ``x`` (B, C, *) by the moments of all of them together, with its client's own scale and shift."""
    values = torch.cat([x.movedim(1, -1).reshape(-1, x.shape[1]) for x in xs])
    mean, var = values.mean(0), values.var(0, unbiased=False)
    outs = []
    for layer, x in zip(layers, xs, strict=True):
        with torch.no_grad():
            layer.running_mean += layer.momentum * (mean - layer.running_mean)
            layer.running_var += layer.momentum * (values.var(0, unbiased=True) - layer.running_var)
        out = (x.movedim(1, -1) - mean) / (var + layer.eps).sqrt()
        scale, shift = (1 if layer.weight is None else layer.weight), (0 if layer.bias is None else layer.bias)
        outs.append((out * scale + shift).movedim(-1, 1))
    return outs
