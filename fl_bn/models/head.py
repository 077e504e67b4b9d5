"""Search for the head of a network, or its heads, and put a projection before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from fl_bn.derived import copied
from fl_bn.models.graph import traced

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


def heads_of(model: nn.Module) -> tuple[str, ...]:
    """Find the heads: the linear layers and convolutions whose output reaches no other of them.

    A network with several outputs may have several. The forward pass is traced, once per kind of network. If torch.fx cannot
    trace it, the head is that of ``head_of``.

    Returns:
        Their names.
    """
    key = tuple((name, type(module), *_plain(module)) for name, module in model.named_modules())
    if key not in _HEADS:
        _HEADS[key] = _traced_heads(model) or tuple(name for name, _ in filter(None, [head_of(model)]))
    return _HEADS[key]


_HEADS: dict[tuple[Any, ...], tuple[str, ...]] = {}


def _plain(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and texts among the attributes of ``module``, which its forward pass may depend on."""
    return ((name, value) for name, value in vars(module).items() if name != "training" and isinstance(value, int | float | str))


def _traced_heads(model: nn.Module) -> tuple[str, ...]:
    """Return the heads in the graph of ``model``. Empty if it cannot be traced."""
    try:
        graph = traced(copied(model))  # the forward pass may store the stand-ins of torch.fx in the network
    except ValueError:
        return ()
    modules = dict(model.named_modules())
    weighted = [node for node in graph.nodes if node.op == "call_module" and isinstance(modules[node.target], Weighted)]
    before, reached = [node for layer in weighted for node in layer.all_input_nodes], set[fx.Node]()
    while before:
        if (node := before.pop()) not in reached:
            reached.add(node)
            before += node.all_input_nodes
    inner = {modules[node.target] for node in weighted if node in reached}
    return tuple(dict.fromkeys(str(node.target) for node in weighted if modules[node.target] not in inner))


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
