"""Copy networks deeply, together with the functions that belong to them.

``copy.deepcopy`` copies no functions. A function that remembers the network (a lambda in an attribute, a hook that stores
features in ``self``, ``torch.compile(net.forward)``) would call the original from within the copy. Here the copy gets
functions of its own, which remember the copy.
"""

from __future__ import annotations

import copy
import dis
import weakref
from collections.abc import Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fl_bn.bn.composed import Unconvertible

Holder = TypeVar("Holder")
CALLS = (FunctionType, MethodType, partial, weakref.ref)
"""Types of objects that ``copy.deepcopy`` does not copy in full, although they may hold the network."""
PLAIN = (str, bytes, int, float, complex, type(None), type, ModuleType, Tensor, torch.dtype, torch.device, torch.Generator)


def copied(holder: Holder) -> Holder:
    """Copy a network deeply, or an object whose attributes hold networks.

    ``copy.deepcopy`` alone raises an error for tensors that a computation made, such as the weights that
    ``torch.nn.utils.weight_norm`` leaves in a layer, or features that ``forward`` stored. Here the copy gets such a tensor
    as a constant. A tensor whose entries share memory (``expand``) becomes one that can be written.

    Functions that remember the network or a part of it are made anew, and remember the copy.

    Raises:
        Unconvertible: A network has an attribute that cannot be copied. The message names it.
    """
    memo: dict[int, Any] = {}
    for model in _networks(holder):
        for module in model.modules():
            for tensor in _tensors(list(vars(module).values())):
                if not tensor.is_leaf or (_shares_entries(tensor) and not isinstance(tensor, nn.Parameter)):
                    memo[id(tensor)] = tensor.detach().clone()
    try:
        made = copy.deepcopy(holder, memo)
    except Exception as error:  # whatever the user's class raises
        if culprit := _culprit(holder):
            raise Unconvertible(
                f"{culprit} cannot be copied, and fl-bn trains a copy of the network ({type(error).__name__}: {error}): make it in "
                "forward, or give its class a method __deepcopy__"
            ) from error
        raise
    rebinding = _Rebinding(memo)
    for key, new in list(memo.items()):
        if key != id(memo):  # there, deepcopy keeps the originals alive
            rebinding.replace_in(new)
    return made


def _shares_entries(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def reader_of_globals(model: nn.Module) -> str:
    """Find a function in the network that reads the network, or a part of it, from a global variable.

    In a copy it would use the original.

    Returns:
        The function and the variable, in words. Empty if there is none.
    """
    parts = {id(module) for module in model.modules()}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            for one in _within(value):
                if isinstance(one, FunctionType):
                    for variable in global_names(one.__code__):
                        if id(one.__globals__.get(variable)) in parts:
                            where = f"{attribute!r} of {name or 'the model'} ({type(module).__name__})"
                            return f"the function {one.__name__} in {where} reads the global variable {variable!r}"
    return ""


def _within(value: Any, depth: int = 4) -> Iterator[Any]:
    """Yield ``value`` and what it holds: the entries of a list or dict, and what a function remembers."""
    yield value
    if depth:
        for part in _parts(value):
            yield from _within(part, depth - 1)


def global_names(code: CodeType) -> Iterator[str]:
    """Yield the names of the global variables that ``code``, or a function in it, reads."""
    yield from (str(one.argval) for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from global_names(inner)


def _networks(holder: object, depth: int = 2) -> Iterator[nn.Module]:
    if isinstance(holder, nn.Module):
        yield holder
    elif depth and hasattr(holder, "__dict__"):
        for value in vars(holder).values():
            yield from _networks(value, depth - 1)


def _tensors(value: object, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in ``value``: itself, or those in its lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one, depth - 1)


def _culprit(holder: object) -> str:
    """Return the attribute of a network that cannot be copied, in words; empty if there is none."""
    for model in _networks(holder):
        for name, module in model.named_modules():
            for attribute, value in vars(module).items():
                if attribute in ("_modules", "_parameters", "_buffers") or isinstance(value, nn.Module):
                    continue
                try:
                    copy.deepcopy(value, {id(one): one for one in model.modules()})
                except Exception:  # whatever the user's class raises
                    return f"attribute {attribute!r} of {name or 'the model'} ({type(module).__name__})"
    return ""


class _Rebinding:
    """Replace, in a copy, the functions that remember the original.

    Args:
        memo: The memo of ``copy.deepcopy``: the id of an original -> its copy.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self._functions: dict[int, FunctionType] = {}
        self._cells: dict[int, CellType] = {}

    def replace_in(self, new: Any) -> None:
        """Replace, in place, the functions in ``new``, an object that was made by ``copy.deepcopy``."""
        if isinstance(new, PLAIN):
            return
        owner: Any = new if isinstance(new, list | dict) else getattr(new, "__dict__", {})
        for key, one in list(enumerate(owner) if isinstance(owner, list) else owner.items()):
            if isinstance(one, (*CALLS, tuple)) and (other := self.of(one)) is not one:
                owner[key] = other

    def of(self, value: Any) -> Any:
        """Return ``value`` for the copy: ``value`` itself, unless it holds an original."""
        return self._of(value) if self._holds(value, set()) else value

    def _holds(self, value: Any, seen: set[int]) -> bool:
        if id(value) in self.memo and self.memo[id(value)] is not value:
            return True
        if isinstance(value, PLAIN) or id(value) in seen:
            return False
        seen.add(id(value))
        return any(self._holds(part, seen) for part in _parts(value))

    def _of(self, value: Any) -> Any:
        if id(value) in self.memo:
            return self.memo[id(value)]
        if not self._holds(value, set()):
            return value
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return MethodType(self._of(value.__func__), self._of(value.__self__))
        if isinstance(value, partial):
            return type(value)(self._of(value.func), *map(self._of, value.args), **{k: self._of(v) for k, v in value.keywords.items()})
        if isinstance(value, weakref.ref):
            return weakref.ref(self._of(value()))
        if isinstance(value, dict):
            return type(value)((key, self._of(one)) for key, one in value.items())
        return type(value)(map(self._of, value))  # a list, tuple or set

    def _function(self, function: FunctionType) -> FunctionType:
        if id(function) in self._functions:
            return self._functions[id(function)]
        cells = [self._cells.setdefault(id(cell), CellType()) for cell in function.__closure__ or ()]
        new = FunctionType(function.__code__, function.__globals__, function.__name__, None, tuple(cells))
        self._functions[id(function)] = new  # before its cells are filled: it may remember itself
        new.__kwdefaults__ = function.__kwdefaults__ and {key: self._of(one) for key, one in function.__kwdefaults__.items()}
        new.__defaults__ = function.__defaults__ and tuple(map(self._of, function.__defaults__))
        new.__qualname__, new.__module__, new.__doc__ = function.__qualname__, function.__module__, function.__doc__
        new.__annotations__ = function.__annotations__
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            if _filled(old) and not _filled(cell):
                cell.cell_contents = self._of(old.cell_contents)
        vars(new).update({key: self._of(one) for key, one in vars(function).items()})
        return new


def _parts(value: Any) -> list[Any]:
    """Return what a function, or a list of functions, holds."""
    if isinstance(value, FunctionType):
        own = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
        return [*own, *(cell.cell_contents for cell in value.__closure__ or () if _filled(cell))]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, weakref.ref):
        return [value()]
    if type(value) in (list, tuple, set):
        return list(value)
    return list(value.values()) if isinstance(value, dict) else []


def _filled(cell: CellType) -> bool:
    try:
        return bool([cell.cell_contents])
    except ValueError:
        return False
