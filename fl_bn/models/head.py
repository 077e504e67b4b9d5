"""Find a network's head, or replace it by a projection and a new head."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.conv import _ConvNd

Weighted = nn.Linear | _ConvNd


def head_of(model: nn.Module) -> tuple[str, Weighted] | None:
    """Find ``model``'s head: its last linear layer, or else (segmentation) its last convolution.

    "Last" is the order of ``named_modules``, in which the constructor sets its
    layers. If it sets the head before other such layers, the result is wrong.

    Returns:
        Name and module, or None.
    """
    last: tuple[str, Weighted] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or (isinstance(module, _ConvNd) and not (last and isinstance(last[1], nn.Linear))):
            last = name, module
    return last
