"""Find the residual branches of a network by tracing its forward pass."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

WEIGHTED = (nn.Linear, _ConvNd)


@dataclass(frozen=True)
class Branch:
    """Describe a residual branch. The names are in the order of the forward pass.

    Attributes:
        weighted: names of its layers with weights (convolutions, linear layers).
        norms: names of its norm layers.
    """

    weighted: tuple[str, ...]
    norms: tuple[str, ...]


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (*WEIGHTED, _NormBase)) or super().is_leaf_module(m, module_qualified_name)


def residual_branches(model: nn.Module, prefix: str = "") -> Iterator[Branch]:
    """Yield every branch whose result is added to a shortcut, in the order of the forward pass.

    If two paths from one tensor meet in an addition, the path with more layers is the branch, and the other
    is the shortcut. If both paths have equally many layers, the first operand is the branch. A path that itself contains such
    an addition is no branch.

    A module whose forward pass depends on values or shapes cannot be traced. Then its submodules are searched one by
    one, and additions in its own forward pass are not found.

    Args:
        model: the network, or a part of it.
        prefix: the part's name and a dot, which is put before the names in the result. Empty for the whole network.
    """
    if not any(model.children()):
        return
    try:
        graph = _Tracer().trace(model)
    except Exception:  # tracing runs the user's forward on stand-ins for tensors, which may raise any exception
        for name, child in model.named_children():
            yield from residual_branches(child, f"{prefix}{name}.")
        return
    before: dict[fx.Node, frozenset[fx.Node]] = {}
    joins: set[fx.Node] = set()
    for node in graph.nodes:
        before[node] = frozenset({node}).union(*(before[earlier] for earlier in node.all_input_nodes))
        if not _adds(node) or len(node.all_input_nodes) != 2:
            continue
        first, second = (before[operand] for operand in node.all_input_nodes)
        candidates = [_branch(model, graph, side, prefix) for side in (first - second, second - first)]
        branch = max(candidates, key=lambda side: len(side.weighted))
        side = first - second if branch is candidates[0] else second - first
        if first & second and branch.weighted and not side & joins:
            yield branch
        joins.add(node)


def _adds(node: fx.Node) -> bool:
    if node.op == "call_function":
        return node.target in (operator.add, operator.iadd, torch.add)
    return node.op == "call_method" and node.target in ("add", "add_")


def _branch(model: nn.Module, graph: fx.Graph, side: frozenset[fx.Node], prefix: str) -> Branch:
    called = [str(node.target) for node in graph.nodes if node in side and node.op == "call_module"]
    weighted = [prefix + name for name in called if isinstance(model.get_submodule(name), WEIGHTED)]
    norms = [prefix + name for name in called if isinstance(model.get_submodule(name), _NormBase)]
    return Branch(tuple(dict.fromkeys(weighted)), tuple(dict.fromkeys(norms)))
