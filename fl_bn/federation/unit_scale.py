"""Rescale weights before round 1, so that every BatchNorm layer's input has the standard deviation ``Method.scale``.

If training normalises with constants, these constants scale every step of the weights. A new network's activations are
small, and so is their standard deviation. Normalisation divides by this small deviation, so the gradient of the weights
grows by the same factor. BatchNorm survives this, because its gradient is orthogonal to the weights. With constants the
first rounds diverge. If the weights, means and standard deviations are divided by the same number, the network computes
the same function (up to ``eps``), and its gradients get an ordinary size. This is the initialisation LSUV (All You Need Is
a Good Init, Mishkin and Matas, ICLR 2016; there the deviation is 1), with statistics measured over all clients.

Symbols: s -> deviation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fl_bn.derived import derivation
from fl_bn.models.graph import traced
from fl_bn.moments import Running
from fl_bn.roles import batch_norms

PRODUCERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose first axis of ``weight`` is the output channel."""
HOMOGENEOUS: tuple[Any, ...] = (
    nn.ReLU, nn.LeakyReLU, nn.Identity, nn.Dropout, nn.Dropout2d, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
    F.relu, F.leaky_relu, F.dropout, F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, torch.relu, "relu",
)  # fmt: skip
"""Operations whose output scales with a positive factor per channel of the input: module types, functions, method names."""


def producers(model: nn.Module) -> dict[str, str]:
    """Return BatchNorm layer -> the layer before it, whose output only this BatchNorm layer uses, if there is one.

    Between the two there may be ``HOMOGENEOUS`` operations (ReLU, pooling). A layer before BatchNorm is left out if it is
    used more than once, shares its weight with another layer, derives it (spectral norm, for example), is not trained, or
    is not one of ``PRODUCERS``.

    Raises:
        ValueError: torch.fx cannot trace the network (control flow that depends on data, say).
    """
    graph = traced(model)
    modules = dict(model.named_modules())
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    uses = Counter(id(p) for module in modules.values() for p in module.parameters(recurse=False))
    sources = {}
    for node in graph.nodes:
        if node.op != "call_module" or node.target not in batch_norms(model) or calls[node.target] > 1:
            continue
        source = _source(node, modules)
        if source is None or calls[source] > 1:
            continue
        layer = modules[source]
        own = list(layer.parameters())
        if type(layer) in PRODUCERS and not derivation(layer) and all(uses[id(p)] == 1 and p.requires_grad for p in own):
            sources[str(node.target)] = source
    return sources


@torch.no_grad()
def rescaled(
    state: Mapping[str, Tensor],
    statistics: Mapping[str, Running],
    eps: Mapping[str, float],
    sources: Mapping[str, str],
    scale: float = 1.0,
) -> dict[str, Tensor]:
    """Return rescaled tensors, by name, with which the input of each BatchNorm layer has the standard deviation ``scale``.

    Let s be ``sqrt(var + eps) / scale`` of a channel. The weight and bias of the layer before a BatchNorm layer, and its
    running mean, are divided by s, and the running variance by s^2. So the network computes the same function, up to
    ``eps``. The running variances become ``scale**2 * var / (var + eps)``.

    Args:
        state: The network's state_dict.
        statistics: Layer -> statistics of its BatchNorm layers.
        eps: Layer -> epsilon of its BatchNorm layers.
        sources: BatchNorm layer -> the layer before it, see ``producers``.
        scale: The standard deviation to reach.

    Returns:
        Only the tensors that change, by their name in ``state``.
    """
    new: dict[str, Tensor] = {}
    for norm, source in sources.items():
        deviation = (statistics[norm].var.double() + eps[norm]).sqrt() / scale
        weight = state[f"{source}.weight"]
        new[f"{source}.weight"] = (weight.double() / deviation.view(-1, *[1] * (weight.dim() - 1))).to(weight.dtype)
        if (bias := state.get(f"{source}.bias")) is not None:
            new[f"{source}.bias"] = (bias.double() / deviation).to(bias.dtype)
        divided = {"running_mean": statistics[norm].mean / deviation, "running_var": statistics[norm].var / deviation.square()}
        new |= {f"{norm}.{name}": value.to(state[f"{norm}.{name}"].dtype) for name, value in divided.items()}
    return new


def _source(norm: fx.Node, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the module whose output reaches only ``norm``, and only through ``HOMOGENEOUS`` operations."""
    node = norm.all_input_nodes[0] if norm.all_input_nodes else None
    while node is not None and len(node.users) == 1:
        if node.op == "call_module" and type(modules[str(node.target)]) not in HOMOGENEOUS:
            return str(node.target)
        if node.op not in ("call_module", "call_function", "call_method") or (node.op != "call_module" and node.target not in HOMOGENEOUS):
            return None
        node = node.all_input_nodes[0] if node.all_input_nodes else None
    return None
