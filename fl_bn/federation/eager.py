"""torch's optimizers without the parts that serve ``torch.compile``, whose import takes two seconds of every process.

torch 2 guards the construction, ``zero_grad`` and ``step`` of its optimizers against being compiled. The first guard imports the compiler.
These classes run the same functions without the guards, so they give the same bits. They cannot be traced by ``torch.compile``.
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
    zero_grad = inspect.unwrap(optim.Optimizer.zero_grad)


class SGD(Eager, optim.SGD):
    """``torch.optim.SGD``."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return _sgd_step(self, closure)


class Adam(Eager, optim.Adam):
    """``torch.optim.Adam``."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return _adam_step(self, closure)


_sgd_step = inspect.unwrap(optim.SGD.step)
_adam_step = inspect.unwrap(optim.Adam.step)
