"""Rescale weights before round 1: BatchNorm's inputs get the deviation ``Method.scale``.

A new network's activations have a small standard deviation, by which normalisation
divides, so gradients are large. With BatchNorm they do little harm: they are
orthogonal to the weights. If training normalises with constants, the first rounds
diverge. So weights, means and deviations are divided by the same number: the
network computes the same function (up to ``eps``) with smaller gradients. This is
LSUV, with statistics of all clients (All You Need Is a Good Init, Mishkin and
Matas, ICLR 2016, where the deviation is 1).

Symbols: s -> deviation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fl_bn.bn.derived import derivation, full_names, unwrapped
from fl_bn.bn.kinds import takes
from fl_bn.bn.modules import copied
from fl_bn.bn.moments import Running
from fl_bn.bn.roles import batch_norms

PRODUCERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose first axis of ``weight`` is the output channel."""
ELEMENTWISE: tuple[Any, ...] = (
    nn.ReLU, nn.LeakyReLU, nn.Identity, nn.Dropout, F.relu, F.leaky_relu, F.dropout, torch.relu, "relu",
)  # fmt: skip
"""Operations on each value by itself. After a linear layer, pooling would mix features."""
POOLING = (
    nn.Dropout2d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    F.max_pool2d,
    F.avg_pool2d,
    F.adaptive_avg_pool2d,
)
HOMOGENEOUS = (*ELEMENTWISE, *POOLING)
"""Operations f with f(a x) = a f(x) for a positive factor a per channel."""
MUCH = 0.01
"""The relative change of a channel's output by eps, from which it is made up for."""


def producers(model: nn.Module) -> dict[str, str]:
    """Return the pairs to rescale: name of a BatchNorm layer -> name of the layer before it.

    Only this BatchNorm layer may use the output of the layer before, directly or
    through ``HOMOGENEOUS`` operations. That layer must be one of ``PRODUCERS`` and
    be trained. Its weight must not be shared, computed from other tensors (spectral
    norm), or read by the network's own ``forward``. Both must run once per forward
    pass, without hooks, and all this in both modes.

    Raises:
        ValueError: torch.fx cannot trace the network (control flow that depends on
            data, say).
    """
    # copies, as forward may store torch.fx's stand-ins, and torch.fx cannot trace a wrapper (torch.compile, DataParallel)
    found = [_pairs(unwrapped(copied(model).train(mode))) for mode in (True, False)]
    full = full_names(model)
    return {full[norm]: full[source] for norm, source in found[0].items() if found[1].get(norm) == source}


def _pairs(model: nn.Module) -> dict[str, str]:
    """Return the pairs of ``producers`` in the network's present mode."""
    try:
        graph = _Tracer().trace(model)
    except Exception as error:  # torch.fx runs the user's forward with stand-ins, which may raise anything
        raise ValueError(f"torch.fx cannot trace {type(model).__name__}: {type(error).__name__}: {error}") from error
    used = {str(node.target) for node in graph.nodes if node.op == "get_attr"}  # parameters that forward itself reads
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
        layer, norm = modules[source], modules[str(node.target)]
        own = list(layer.parameters())
        read = used.intersection(f"{path}.{name}" for path, one in ((source, layer), (node.target, norm)) for name in one.state_dict())
        # hooks or an own forward may change what a layer computes
        changed = any(one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one) for one in (layer, norm))
        if type(layer) not in PRODUCERS or read or changed or derivation(layer):
            continue
        if layer.weight.shape[0] != norm.num_features:
            continue  # the layer's outputs are on another axis than BatchNorm's channels, such as tokens
        if isinstance(layer, nn.Linear) and not (takes(norm, 0) and _source(node, modules, ELEMENTWISE) == source):
            continue
        if norm.weight is not None and uses[id(norm.weight)] > 1:
            continue  # of several layers, each would have it changed for another one's epsilon
        if all(uses[id(p)] == 1 and p.requires_grad for p in own):
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
    """Return the tensors that change to give each BatchNorm layer's input deviation ``scale``.

    Let s be ``sqrt(var + eps) / scale`` of a channel. Weight and bias of the layer
    before BatchNorm (``sources``, see ``producers``) and the running mean are
    divided by s. The running variance becomes ``scale**2 * var / (var + eps)``.
    Where eps changes a channel's output by more than ``MUCH``, BatchNorm's own
    weight makes up for it. Without one, the layer is left as it is.
    """
    new: dict[str, Tensor] = {}
    for norm, source in sources.items():
        var = statistics[norm].var.double()
        deviation = (var + eps[norm]).sqrt() / scale
        gain = (var / deviation.square() + eps[norm]).sqrt() / scale  # 1, if eps did not count
        counts = (var > 0) & ((gain - 1).abs() > MUCH)
        affine = state.get(f"{norm}.weight")
        if counts.any():
            if affine is None:
                continue
            new[f"{norm}.weight"] = torch.where(counts, affine.double() * gain, affine.double()).to(affine.dtype)
        weight = state[f"{source}.weight"]
        new[f"{source}.weight"] = (weight.double() / deviation.view(-1, *[1] * (weight.dim() - 1))).to(weight.dtype)
        if (bias := state.get(f"{source}.bias")) is not None:
            new[f"{source}.bias"] = (bias.double() / deviation).to(bias.dtype)
        divided = {"running_mean": statistics[norm].mean / deviation, "running_var": statistics[norm].var / deviation.square()}
        new |= {f"{norm}.{name}": value.to(state[f"{norm}.{name}"].dtype) for name, value in divided.items()}
    return new


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # else a buffer that forward reads would be a constant without a name

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.modules.batchnorm._BatchNorm) or super().is_leaf_module(m, module_qualified_name)


def _source(norm: fx.Node, modules: Mapping[str, nn.Module], between: tuple[Any, ...] = HOMOGENEOUS) -> str | None:
    """Return the module whose output only ``norm`` uses, perhaps through ``between``."""
    node = norm.all_input_nodes[0] if norm.all_input_nodes else None
    while node is not None and len(node.users) == 1:
        if node.op == "call_module" and type(modules[str(node.target)]) not in between:
            return str(node.target)
        if node.op not in ("call_module", "call_function", "call_method") or (node.op != "call_module" and node.target not in between):
            return None
        node = node.all_input_nodes[0] if node.all_input_nodes else None
    return None
