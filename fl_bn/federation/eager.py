"""Provide torch's optimizers without the parts that serve ``torch.compile``.

torch keeps ``torch.compile`` from compiling the construction, ``zero_grad`` and ``step`` of its optimizers. The first of these calls
imports the compiler. This takes 1.5 s of processor time in every process (torch 2.15): in each client, worker and run of a sweep. The
classes in this module run the same functions without that guard, so they give the same bits.

With ``SGD`` of this module, a step of the default network takes 69 us, because no profiler record is made and no hook is called.
``torch.optim.SGD(foreach=True)`` takes 87 us. No public option of torch avoids the compiler and gives the same bits. ``fused=True`` is
faster (42 us), but it imports the compiler, too, and its bits differ. ``torch.compile`` cannot trace these classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import optim


class Eager(optim.Optimizer):
    """Replace ``add_param_group`` and ``zero_grad`` of torch's optimizers by versions that do not import torch's compiler.

    Derive from this class alone, or from this class first and an optimizer class of torch second.
    """

    add_param_group = inspect.unwrap(optim.Optimizer.add_param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as ``torch.optim.Optimizer.zero_grad`` does."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None if set_to_none or parameter.grad is None else torch.zeros_like(parameter)


class SGD(Eager, optim.SGD):
    """Optimise as ``torch.optim.SGD`` does, with the same bits, but without importing torch's compiler (``torch.compile``)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step. Return the loss of ``closure`` if one is given."""
        return _sgd_step(self, closure)

    step.hooked = True  # type: ignore[attr-defined]  # else torch wraps it at the first construction


class Adam(Eager, optim.Adam):
    """Optimise as ``torch.optim.Adam`` does, with the same bits, but without importing torch's compiler (``torch.compile``)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step. Return the loss of ``closure`` if one is given."""
        return _adam_step(self, closure)

    step.hooked = True  # type: ignore[attr-defined]


_sgd_step = inspect.unwrap(optim.SGD.step)
_adam_step = inspect.unwrap(optim.Adam.step)
