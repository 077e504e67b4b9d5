"""Search for the head of a network, and a projection before it."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.conv import _ConvNd

Weighted = nn.Linear | _ConvNd


def head_of(model: nn.Module) -> tuple[str, Weighted] | None:
    """Find the head: the last linear layer, else (segmentation, SqueezeNet) the last convolution.

    The order is that of ``named_modules``, in which layers are defined. In a network that defines its head
    first, another layer is found.

    Returns:
        Name and module, or None if the model has no such layer.
    """
    last: tuple[str, Weighted] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or (isinstance(module, _ConvNd) and not (last and isinstance(last[1], nn.Linear))):
            last = name, module
    return last


def with_projection(model: nn.Module, features: int) -> nn.Module:
    """Put a projection before the head of ``model``, in place, as in MOON (section 3.2 of its paper).

    Args:
        model: its head must be a linear layer.
        features: number of outputs of the projection's second layer.

    Returns:
        ``model``.

    Raises:
        ValueError: the head is no linear layer, or is the whole model.
    """
    head = head_of(model)
    if head is None or not isinstance(head[1], nn.Linear) or not head[0]:
        kind = "missing" if head is None else f"{head[0] or 'the model itself'} ({type(head[1]).__name__})"
        raise ValueError(f"a projection needs a linear layer within the network as head, but the head is {kind}: set moon-projection to 0")
    name, layer = head[0], head[1]
    d, owner, key = layer.in_features, *name.rpartition(".")[::2]
    layers = nn.Linear(d, d), nn.ReLU(), nn.Linear(d, features), nn.Linear(features, layer.out_features, layer.bias is not None)
    setattr(model.get_submodule(owner), key, nn.Sequential(*layers).to(layer.weight))
    return model
