"""Find the head of a network, or replace it by a projection and a new head."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.conv import _ConvNd

Weighted = nn.Linear | _ConvNd


def head_of(model: nn.Module) -> tuple[str, Weighted] | None:
    """Find the head of ``model``: its last linear layer, or else its last convolution.

    The last layer is the last one of ``named_modules``, whose order is that in which the network's
    constructor sets its layers. A head that is set before other such layers is not found.

    Returns:
        Name and module, or None if the model has no such layer.
    """
    last: tuple[str, Weighted] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or (isinstance(module, _ConvNd) and not (last and isinstance(last[1], nn.Linear))):
            last = name, module
    return last
