"""Notice what a program does besides computing: it draws random numbers outside of torch, or changes attributes of the network.

A vectorised program does these things once for all clients. One client after the other, each client does them for itself.
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from fl_bn.federation.network import own_state

_CONSTANTS = (int, float, complex, str, bytes, type(None))
_BY_IDENTITY = (nn.Module, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


class SideEffects:
    """Remember the random states of Python and NumPy, and the attributes of a network, and tell what has changed since then.

    torch's random numbers need no look here, since ``torch.func.vmap`` refuses them.
    """

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), _numpy_state()
        self._network: nn.Module | None = None
        self._alive: list[Any] = []  # tensors whose ids are compared, so that no other tensor gets one of their ids
        self._attributes: Mapping[tuple[str, str], Any] = {}

    def watch(self, network: nn.Module) -> None:
        """Remember the attributes of all modules of ``network``: those that are no tensors, submodules or hooks of torch."""
        self._network = network
        self._attributes = self._present()

    def found(self) -> str:
        """Return, as a sentence, the first side effect since this object was made or ``watch`` was called; empty without one."""
        for drawn, whose in ((self._python_drew(), "Python's random"), (self._numpy_drew(), "numpy.random")):
            if drawn:
                return f"{whose} would draw other random numbers than if clients were computed one by one"
        now = self._present()
        if now == self._attributes:
            return ""
        module, name = next(key for key in (*self._attributes, *now) if key not in now or now[key] != self._attributes.get(key, self))
        where = f"layer {module!r}" if module else "the network"
        return (
            f"the forward pass changes attribute {name!r} of {where}, and would do so once for all clients together: with a buffer in its "
            "place (register_buffer), each client has its own"
        )

    def undo(self) -> None:
        """Set the random states back, so that clients that are now computed one by one draw the numbers that they would have drawn."""
        if self._python_drew():
            random.setstate(self._python)
        if self._numpy_drew():
            np.random.set_state(pickle.loads(self._numpy))

    def _python_drew(self) -> bool:
        return random.getstate() != self._python

    def _numpy_drew(self) -> bool:
        return _numpy_state() != self._numpy

    def _present(self) -> dict[tuple[str, str], Any]:
        """Return (module's name, attribute's name) -> a value that is equal as long as the attribute's state is.

        An attribute with the value of its class is left out: it may as well be absent.
        """
        modules = () if self._network is None else self._network.named_modules()
        own = ((path, type(module), name, value) for path, module in modules for name, value in own_state(module).items())
        return {(path, name): self._state(value) for path, kind, name, value in own if getattr(kind, name, self) is not value}

    def _state(self, value: Any) -> Any:
        if isinstance(value, _CONSTANTS):
            return value
        if type(value) is tuple:
            return tuple(map(self._state, value))
        file = io.BytesIO()
        try:
            _Pickler(file, self._alive).dump(value)
        except Exception:  # a lock, a generator, a file: it can only be replaced
            self._alive.append(value)
            return id(value)
        return file.getvalue()


def _numpy_state() -> bytes:
    return pickle.dumps(np.random.get_state(legacy=False))


class _Pickler(pickle.Pickler):
    """Write the complete state of a value, with tensors by identity and version, and modules, classes and functions by identity."""

    def __init__(self, file: io.BytesIO, alive: list[Any]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._alive = alive

    def persistent_id(self, value: Any) -> Any:
        """Return the identity of a value that is not written itself; None for all others."""
        if isinstance(value, Tensor):
            self._alive.append(value)
            return id(value), 0 if value.is_inference() else value._version
        if isinstance(value, _BY_IDENTITY):
            self._alive.append(value)
            return id(value)
        return None
