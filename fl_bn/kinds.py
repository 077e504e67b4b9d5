"""Kinds of BatchNorm layers that do more than torch's: what each calls on its output, so that a method's layer does the same.

A subclass of torch's BatchNorm with a forward of its own may do anything, so it is refused until somebody says what it does. For timm's
layers, which call a dropout and an activation, this file does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(frozen=True)
class Kind:
    """``then``: submodules that a layer calls on its output. ``convert``: makes torch's BatchNorm, with these submodules, of a layer."""

    then: tuple[str, ...] = ()
    convert: Callable[[nn.Module], _BatchNorm] | None = None


_BY_NAME = dict.fromkeys(("timm.layers.norm_act.BatchNormAct2d", "timm.layers.norm_act.SyncBatchNormAct"), Kind(("drop", "act")))
_BY_TYPE: dict[type[nn.Module], Kind] = {}


def register_batch_norm(kind: type[nn.Module], then: Sequence[str] = (), convert: Callable[[nn.Module], _BatchNorm] | None = None) -> None:
    """Say what layers of class ``kind`` compute: torch's BatchNorm, and then the submodules named in ``then``.

    ``convert(layer)``: needed where ``kind`` is no subclass of torch's BatchNorm; returns one, with the submodules of ``then``.

    >>> from fl_bn import register_batch_norm
    >>> class Activated(nn.BatchNorm2d):
    ...     act = nn.ReLU()
    ...     def forward(self, x): return self.act(super().forward(x))
    >>> register_batch_norm(Activated, then=["act"])
    """
    if not issubclass(kind, _BatchNorm) and convert is None:
        raise ValueError(f"{kind.__name__} is no subclass of torch's BatchNorm: give convert, which makes one of a layer")
    _BY_TYPE[kind] = Kind(tuple(then), convert)


def kind_of(layer: nn.Module) -> Kind | None:
    """Find what was said of the class of ``layer``; None where nobody said anything."""
    kind = type(layer)
    return _BY_TYPE.get(kind) or _BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")


def is_plain(layer: _BatchNorm) -> bool:
    """Whether ``layer`` computes what torch's BatchNorm does, and nothing else."""
    return type(layer).forward is _BatchNorm.forward or type(layer) is nn.SyncBatchNorm
