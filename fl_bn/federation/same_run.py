"""Describe as text what decides the results of a run, so that a checkpoint can tell whether a federation continues it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fl_bn.methods import Method

CALENDAR = "calendar"
IN_WORDS = {CALENDAR: "calendar (a hash of all phases and learning rates)"}


def described(value: Any) -> str:
    """Return ``value`` as text that is the same in every process.

    A function has its name, and the arguments that ``partial`` gives it. A value without a text of its own has its type's name.

    >>> from functools import partial
    >>> described([1, partial(round, ndigits=2)])
    '[1, round(ndigits=2)]'
    """
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool | str):
        return repr(value)
    if isinstance(value, Real):  # equal numbers have the same text: 1 and 1.0, 0.1 and numpy.float64(0.1)
        number = float(value)
        return repr(int(number) if number.is_integer() else number)
    if isinstance(value, Tensor):
        return described(value.tolist())
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {described(one)}' for key, one in value.items())}}}"
    if isinstance(value, Collection):
        parts = [described(one) for one in value]
        return f"[{', '.join(parts if isinstance(value, Sequence) else sorted(parts))}]"
    if is_dataclass(value) and not isinstance(value, type):
        return _call(type(value).__name__, [], {one.name: getattr(value, one.name) for one in fields(value)})
    if isinstance(value, partial):
        return _call(described(value.func), value.args, value.keywords)
    return str(getattr(value, "__qualname__", type(value).__name__))


def of_method(method: Method) -> dict[str, str]:
    """Return name -> text of every part of a method, for the options with which it was made."""
    return {f"the method's {one.name}": described(getattr(method, one.name)) for one in fields(method) if one.name != "name"}


def of_optimizer(optimizer: Optimizer) -> str:
    """Return the kind of an optimiser and the settings of its groups of parameters.

    Settings that are off (None or False) are left out, because other versions of torch have other such settings.
    """
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names") and value is not None and value is not False}
        for group in optimizer.param_groups
    ]
    return " + ".join(dict.fromkeys(_call(type(optimizer).__name__, [], group) for group in groups))


def check_same(path: object, saved: Mapping[str, str], mine: Mapping[str, str]) -> None:
    """Check that a federation has the settings of the run in a checkpoint.

    Args:
        path: The checkpoint.
        saved: Name -> text of the settings in the checkpoint. What an older fl-bn did not save is not checked.
        mine: Name -> text of the federation's own settings.

    Raises:
        ValueError: A setting differs. The message has both values.
    """
    for name, ours in mine.items():
        if (theirs := saved.get(name, ours)) != ours:
            raise ValueError(
                f"{path} is of another federation: {IN_WORDS.get(name, name)} was {theirs} there, but is {ours} here: make the federation "
                "with the same arguments"
            )


def _call(name: str, given: Sequence[Any], named: Mapping[str, Any]) -> str:
    parts = [*map(described, given), *(f"{key}={described(value)}" for key, value in sorted(named.items()))]
    return f"{name}({', '.join(parts)})"
