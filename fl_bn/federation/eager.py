"""torch's optimizers without the parts that serve ``torch.compile``, whose import takes two seconds of every process.

torch 2 guards the construction, ``zero_grad`` and ``step`` of its optimizers against being compiled. The first guard imports the compiler.
These classes run the same functions without the guards, so they give the same bits. They cannot be traced by ``torch.compile``.
They tell torch's profiler nothing and call no step hooks, which costs as much as a step of a small network.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import optim


class Eager(optim.Optimizer):
    """An optimizer's bookkeeping, unguarded: to be named before a class of torch's, or alone."""

    add_param_group = inspect.unwrap(optim.Optimizer.add_param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None if set_to_none or parameter.grad is None else torch.zeros_like(parameter)


class SGD(Eager, optim.SGD):
    """``torch.optim.SGD``."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return _sgd_step(self, closure)

    step.hooked = True  # type: ignore[attr-defined]  # else torch wraps it at the first construction


class Adam(Eager, optim.Adam):
    """``torch.optim.Adam``."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return _adam_step(self, closure)

    step.hooked = True  # type: ignore[attr-defined]


_sgd_step = inspect.unwrap(optim.SGD.step)
_adam_step = inspect.unwrap(optim.Adam.step)
