"""Stop a user's subclass of a strategy from overwriting names that fl-bn's own classes use."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from flwr.serverapp.strategy import Strategy

HOOKS = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate", "summary", "start")
"""The methods that a subclass of any strategy may override."""


class OwnNames(Strategy):
    """Refuse a user's subclass that defines or sets a name of fl-bn's own classes. Abstract.

    Without this check, ``self.cohort = ...`` in a user's hook would silently replace the clients of the round.
    A subclass that defines such a name raises a TypeError in its ``class`` statement. An attribute that fl-bn and
    the subclass both set raises an AttributeError.

    Attributes:
        open_names: names of fl-bn's classes that a user's subclass may define or set all the same.
    """

    open_names: ClassVar[tuple[str, ...]] = HOOKS

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if _ours(cls.__module__):
            return
        taken = {name for kind in cls.__mro__ if _ours(kind.__module__) for name in vars(kind) if not name.startswith("__")}
        if twice := sorted((taken & set(vars(cls))) - set(cls.open_names)):
            raise TypeError(f"{cls.__name__} defines {twice[0]!r}, {_which(cls)}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Raises:
            AttributeError: a method of a user's subclass and a method of fl-bn's own classes both set this attribute.
        """
        frame = sys._getframe(1)
        ours = _ours(frame.f_globals.get("__name__", ""))
        if name not in self.open_names and (ours or frame.f_locals.get("self") is self):
            first = vars(self).setdefault("_set_by_us", {}).setdefault(name, ours)
            if first is not ours:
                raise AttributeError(f"{type(self).__name__} sets the attribute {name!r}, {_which(type(self))}")
        super().__setattr__(name, value)


def _ours(module: str) -> bool:
    return module.startswith("fl_bn.")


def _which(kind: type[Any]) -> str:
    base = next(one.__name__ for one in kind.__mro__ if _ours(one.__module__))
    return f"which {base} of fl-bn uses for itself: choose another name"
