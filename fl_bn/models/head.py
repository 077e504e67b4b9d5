"""Find the head of a network, or replace it by a projection and a new head."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.conv import _ConvNd

Weighted = nn.Linear | _ConvNd


def head_of(model: nn.Module) -> tuple[str, Weighted] | None:
    """Find the head of ``model``: its last linear layer, or else (segmentation, SqueezeNet) its last convolution.

    The last layer is the last one of ``named_modules``, whose order is that in which the network's constructor sets its
    layers. If the constructor sets the head before other such layers, the result is wrong.

    Returns:
        Name and module, or None if the model has no such layer.
    """
    last: tuple[str, Weighted] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or (isinstance(module, _ConvNd) and not (last and isinstance(last[1], nn.Linear))):
            last = name, module
    return last


def with_projection(model: nn.Module, features: int) -> nn.Module:
    """Replace the head of ``model``, in place, by a projection and a new head, as in MOON (section 3.2 of its paper).

    The projection has two linear layers with a ReLU between them. The new head is a linear layer with the outputs of the
    old one. All three layers are newly initialised.

    Args:
        model: the network, whose head must be a linear layer.
        features: number of outputs of the projection, which are the inputs of the new head.

    Returns:
        ``model``.

    Raises:
        ValueError: the head is no linear layer, or is the whole model.
    """
    head = head_of(model)
    if head is None or not isinstance(head[1], nn.Linear) or not head[0]:
        kind = "missing" if head is None else f"{head[0] or 'the model itself'} ({type(head[1]).__name__})"
        raise ValueError(
            f"moon-projection needs a network of several layers whose head is linear, but the head is {kind}: set moon-projection to 0"
        )
    name, layer = head[0], head[1]
    d, owner, key = layer.in_features, *name.rpartition(".")[::2]
    layers = nn.Linear(d, d), nn.ReLU(), nn.Linear(d, features), nn.Linear(features, layer.out_features, layer.bias is not None)
    setattr(model.get_submodule(owner), key, nn.Sequential(*layers).to(layer.weight))
    return model
