"""Warn of layers of the method that the network does not call."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from fl_bn.layers import OwnBatchNorm
from fl_bn.roles import batch_norms

if TYPE_CHECKING:
    from fl_bn.federation.client import LocalRound

LOGGER = logging.getLogger("flwr")
_CHECKED: set[tuple[str, str, bool]] = set()
"""The networks whose calls were checked in this process: signature, method, whether the layers are frozen."""


def _compiled_anything() -> bool:
    """Return whether ``torch.compile`` has compiled anything in this process."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["frames"]["total"] > 0


class _Call:
    """Add the name of a module to a set when the module is called. A function in the module's place could not be pickled."""

    def __init__(self, name: str, ran: set[str]) -> None:
        self.name, self.ran = name, ran

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.ran.add(self.name)


@contextmanager
def watching_calls(round: LocalRound) -> Iterator[None]:
    """Warn if the network ran in the ``with`` block, but did not call all of its layers of fl-bn's classes (``OwnBatchNorm``).

    Such a network asks for torch's class (``type(layer) is nn.BatchNorm2d``), or computes with a layer's tensors
    (``F.batch_norm``). The method does nothing in a layer that is not called. The check is made once in a process for each
    network, method and state of the layers. A network that was compiled before the block gets no warning, because Python does
    not see its calls.
    """
    key = (round.network.signature, round.method.name, round.freezes)
    layers: dict[str, nn.Module] = {}
    if key not in _CHECKED:
        _CHECKED.add(key)
        layers = {name: layer for name, layer in batch_norms(round.model).items() if isinstance(layer, OwnBatchNorm)}
    if not layers:
        yield
        return
    ran: set[str] = set()
    with ExitStack() as stack:
        for name, module in {**layers, "": round.model}.items():
            stack.callback(module.register_forward_pre_hook(_Call(name, ran)).remove)
        yield
    uncalled = [name for name in layers if name not in ran]
    if not ran or (len(uncalled) == len(layers) and _compiled_anything()):
        _CHECKED.discard(key)
    elif uncalled:
        LOGGER.warning(
            "round %s: the network did not call %s of its %s BatchNorm layers (%s), so %s does nothing there. If the network asks "
            "type(layer) is nn.BatchNorm2d, let it ask isinstance(layer, nn.BatchNorm2d). If it calls F.batch_norm with a layer's tensors, "
            "let it call the layer. Ignore this warning for a layer that the round did not need, such as that of an expert without samples",
            round.instruction.round,
            len(uncalled),
            len(layers),
            ", ".join(uncalled[:3]) + (", ..." if len(uncalled) > 3 else ""),
            round.method.name,
        )
