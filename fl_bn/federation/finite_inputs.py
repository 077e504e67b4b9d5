"""Count a client's batches with inputs that are not finite (NaN or Inf).

If the server refuses a client's reply because values are not finite, the count shows whether the inputs are the cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fl_bn.bn.observation import learns_from_pass, whole


class Hook:
    """Call a function as a forward hook of one network. In copies and pickles of the network, the hook does nothing.

    Args:
        call: The function. It gets the arguments of the hook.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Call the function."""
        self._call(*args)

    @property
    def __name__(self) -> str:
        """Raise an error: the hook has no name. torch.jit.script asks for the name, so the message is for users of torch.jit.script.

        Raises:
            AttributeError: Always. Code that only asks whether there is a name (``hasattr``) gets False.
        """
        raise AttributeError(
            "torch.jit.script cannot compile the network during a round, because fl-bn has Python hooks on it: train without "
            "torch.jit.script, and script a copy after the round"
        )

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _no_hook

    def __reduce__(self) -> Any:
        return _no_hook_at_all, ()


def _no_hook(*args: Any) -> None:
    pass


def _no_hook_at_all() -> Callable[..., None]:
    return _no_hook


class InputWatch:
    """Count the batches of one round whose inputs are not finite.

    The count stays on the device of the inputs until ``count`` is called. So training does not wait for a copy from the GPU.
    """

    def __init__(self) -> None:
        self._wrong: int | Tensor = 0
        self.later: Any = None
        """The inputs of a client that the vectorised engine trains. No hook sees them in that engine, so ``count`` checks them."""

    def note(self, inputs: Any) -> None:
        """Count one batch of ``inputs`` if it has a value that is not finite. Tensors may be in lists, tuples and dicts."""
        if torch.compiler.is_exporting():  # a trace has no values
            return
        parts = [_not_finite(part) for part in _floats(inputs) if part.numel()]
        if any(part is True for part in parts):
            self._wrong = self._wrong + 1
        elif on_device := [part for part in parts if isinstance(part, Tensor)]:
            wrong = torch.stack([part.to(on_device[0].device) for part in on_device]).any().long()
            self._wrong = wrong + (self._wrong.to(wrong.device) if isinstance(self._wrong, Tensor) else self._wrong)

    def noted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield each of the ``batches`` of inputs, and count those with a value that is not finite."""
        for batch in batches:
            self.note(batch)
            yield batch

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Count the training forward passes of ``model`` with inputs that are not finite, inside the ``with`` block."""

        def forward(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            if learns_from_pass(model):
                self.note((args, named))

        handle = model.register_forward_pre_hook(Hook(forward), with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    @property
    def suspects(self) -> bool:
        """Tell whether ``count`` may be above 0, without a pass over inputs: a batch was counted, or inputs are still to be checked."""
        return self.later is not None or bool(self._wrong)

    def count(self) -> int:
        """Return the number of batches with an input that is not finite.

        In the vectorised engine, this method checks all inputs of a client (``later``) at once. So such a client counts
        at most one batch.
        """
        if self.later is not None:
            self.note(self.later)
            self.later = None
        return int(self._wrong)


def _not_finite(part: Tensor) -> bool | Tensor:
    """Tell whether a value of ``part`` is not finite, in one pass that allocates no memory.

    Returns:
        A bool for a tensor on the CPU, otherwise a tensor of one bool on the device of ``part``. False if torch cannot find
        the extremes of ``part`` (compressed sparse, nested, masked).
    """
    try:
        least, most = torch.aminmax(part)  # both are NaN if a value is NaN
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    if part.is_cpu and not torch.compiler.is_compiling():
        return not (math.isfinite(least.item()) and math.isfinite(most.item()))
    return ~(least.isfinite() & most.isfinite())


def _floats(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in ``value`` (nested lists, tuples, dicts), without wrappers of ``torch.func``.

    Sparse tensors in coordinate format (COO) are left out.
    """
    if isinstance(value, Tensor):
        if value.is_floating_point() and not value.is_sparse:
            yield whole(value)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _floats(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _floats(part)
