"""Make layer classes at run time, and describe BatchNorm layers that do more.

``composed`` combines a way of computing with the replaced layer's class. So
``isinstance(layer, nn.BatchNorm2d)`` stays true, and a user's attributes and
methods stay.

A subclass of torch's BatchNorm with its own forward is refused until
``register_batch_norm`` describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class Unconvertible(ValueError):
    """Signal that a network cannot be converted: why, and what to do."""


class Composed(nn.Module):
    """Base of the layer classes that ``composed`` makes.

    Attributes:
        way: the first base class, which decides how the layer computes.
        kind: the second base class, that of the replaced layer.
    """

    way: ClassVar[type[Composed]]
    kind: ClassVar[type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the layer by its base classes, as the class itself cannot be imported."""
        if "kind" not in vars(type(self)):
            return super().__reduce_ex__(protocol)
        return _rebuilt, (_parts(type(self)),), self.__dict__


_COMPOSED: dict[tuple[type[Any], type[Any]], type[Any]] = {}


def composed(way: type[Any], kind: type[Any]) -> type[Any]:
    """Return the layer class with bases ``way`` and ``kind``, always the same one."""
    if (way, kind) not in _COMPOSED:
        body = {"__module__": way.__module__, "way": way, "kind": kind}
        _COMPOSED[way, kind] = type(way.__name__, (way, kind), body)
    return _COMPOSED[way, kind]


def _parts(kind: type[Any]) -> tuple[type[Any], ...]:
    """Return the classes in ``kind``, the last applied ``way`` first."""
    return (kind.way, *_parts(kind.kind)) if "kind" in vars(kind) else (kind,)


def _rebuilt(parts: tuple[type[Any], ...]) -> Any:
    *ways, made = parts
    for way in reversed(ways):
        made = composed(way, made)
    return object.__new__(made)


@dataclass(frozen=True)
class Kind:
    """Describe a kind of BatchNorm layer.

    Attributes:
        then: names of the submodules that the layer calls in turn on its output.
        convert: turns such a layer into torch's BatchNorm with these submodules.
            None if it is a subclass of torch's BatchNorm.
    """

    then: tuple[str, ...] = ()
    convert: Callable[[nn.Module], _BatchNorm] | None = None


_BY_NAME = dict.fromkeys(("timm.layers.norm_act.BatchNormAct2d", "timm.layers.norm_act.SyncBatchNormAct"), Kind(("drop", "act")))
_BY_TYPE: dict[type[nn.Module], Kind] = {}


def register_batch_norm(kind: type[nn.Module], then: Sequence[str] = (), convert: Callable[[nn.Module], _BatchNorm] | None = None) -> None:
    """Describe what layers of class ``kind`` compute: BatchNorm, then submodules.

    >>> from fl_bn import register_batch_norm
    >>> class Activated(nn.BatchNorm2d):
    ...     act = nn.ReLU()
    ...     def forward(self, x): return self.act(super().forward(x))
    >>> register_batch_norm(Activated, then=["act"])

    Args:
        kind: the layers' class, without its subclasses.
        then: names of the submodules that such a layer calls in turn on its output.
        convert: returns torch's BatchNorm with the submodules of ``then``. Needed
            if ``kind`` is no subclass of torch's BatchNorm.
    """
    if not issubclass(kind, _BatchNorm) and convert is None:
        raise ValueError(
            f"{kind.__name__} is no subclass of torch's BatchNorm: pass convert=, a function that turns such a layer into a BatchNorm"
        )
    _BY_TYPE[kind] = Kind(tuple(then), convert)


def kind_of(layer: nn.Module) -> Kind | None:
    """Return the ``Kind`` of ``layer``; None if neither timm's nor registered."""
    kind = type(layer)
    return _BY_TYPE.get(kind) or _BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")


def is_plain(layer: _BatchNorm) -> bool:
    """Return whether ``layer`` computes exactly what torch's BatchNorm does."""
    if "forward" in vars(layer):  # set on this object
        return False
    return type(layer).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def takes(layer: _BatchNorm, spatial: int) -> bool:
    """Return whether the layer allows inputs of ``spatial`` dimensions after B and C."""
    try:
        layer._check_input_dim(torch.empty(2, layer.num_features, *[1] * spatial))
    except (ValueError, RuntimeError, AssertionError):  # a check of a user's own class may be an assertion
        return False
    return True
