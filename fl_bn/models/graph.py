"""Trace a network by torch.fx, with BatchNorm layers as single nodes."""

from __future__ import annotations

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _BatchNorm) or super().is_leaf_module(m, module_qualified_name)


def traced(model: nn.Module) -> fx.Graph:
    """Return the graph of ``model``'s forward pass.

    Raises:
        ValueError: torch.fx cannot trace the network (control flow that depends on data, say).
    """
    try:
        return _Tracer().trace(model)
    except Exception as error:  # torch.fx runs the user's forward with stand-ins, which may raise anything
        raise ValueError(f"torch.fx cannot trace {type(model).__name__}: {type(error).__name__}: {error}") from error
