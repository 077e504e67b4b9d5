"""Make layer classes at run time that combine a way of computing with the class of the layer that is replaced.

So a user's ``isinstance(layer, nn.BatchNorm2d)`` stays true, and the attributes and methods of the user's own class stay, too.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn


class Unconvertible(ValueError):
    """Signal that a network cannot be converted. The message says why and what to do.

    There are two reasons: replacing a layer would change what the network computes, or a tensor cannot be averaged or sent.
    """


class Composed(nn.Module):
    """Serve as the abstract base of the layer classes that ``composed`` makes at run time.

    Each of these classes has two base classes. For example, HBN replaces an ``nn.BatchNorm2d`` by a layer whose class is
    derived from ``HybridBatchNorm`` and ``nn.BatchNorm2d``.

    Attributes:
        way: the first base class, which decides how the layer computes (``HybridBatchNorm``).
        kind: the second base class, which is the class of the replaced layer (``nn.BatchNorm2d``).
    """

    way: ClassVar[type[Composed]]
    kind: ClassVar[type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the layer with the base classes of its class, because pickle cannot import a class that was made at run time."""
        if "kind" not in vars(type(self)):
            return super().__reduce_ex__(protocol)
        return _rebuilt, (_parts(type(self)),), self.__dict__


_COMPOSED: dict[tuple[type[Any], type[Any]], type[Any]] = {}


def composed(way: type[Any], kind: type[Any]) -> type[Any]:
    """Return a layer class with the two base classes ``way`` and ``kind``. Equal arguments give the same class.

    Args:
        way: the first base class, which decides how the layer computes.
        kind: the second base class: the class of the layer that is replaced.
    """
    if (way, kind) not in _COMPOSED:
        body = {"__module__": way.__module__, "way": way, "kind": kind}
        _COMPOSED[way, kind] = type(way.__name__, (way, kind), body)
    return _COMPOSED[way, kind]


def _parts(kind: type[Any]) -> tuple[type[Any], ...]:
    """Return the classes from which ``composed`` made ``kind``: the last applied ``way`` first, the original layer's class last."""
    return (kind.way, *_parts(kind.kind)) if "kind" in vars(kind) else (kind,)


def _rebuilt(parts: tuple[type[Any], ...]) -> Any:
    *ways, made = parts
    for way in reversed(ways):
        made = composed(way, made)
    return object.__new__(made)
