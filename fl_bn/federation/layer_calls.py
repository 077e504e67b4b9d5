"""Warn of layers of the method that the network does not call: in training, or in the statistics passes of all clients."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fl_bn.bn.layers import OwnBatchNorm
from fl_bn.bn.modes import held_layers
from fl_bn.bn.roles import batch_norms
from fl_bn.methods import Phase, StatisticsReport

if TYPE_CHECKING:
    from fl_bn.federation.client import LocalRound
    from fl_bn.federation.shared_model import SharedModel

LOGGER = logging.getLogger("flwr")
_CHECKED: dict[tuple[str, str, bool], Sequence[str]] = {}
"""The networks whose calls were checked in this process: signature, method, whether the layers are frozen -> uncalled layers."""

NEVER = (
    "So {method} normalises their training batches with the statistics that the network had before round 1 (mean 0, variance 1 in a new "
    "one). Train without this part of the network (aux_logits=False, say), or take a method whose statistics come from training batches "
    "(fedavg; fbn by default)"
)
FROM_BATCHES = (
    "So training began with the statistics that the network had there (mean 0, variance 1 in a new one), and they follow the training "
    "batches from now on. If the loss is high, train without this part of the network (aux_logits=False, say)"
)


def _compiled_anything() -> bool:
    """Return whether ``torch.compile`` has compiled anything in this process."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["frames"]["total"] > 0


class _Call:
    """Add the name of a module to ``ran`` when the module is called, and to ``fed`` if it then got values.

    A function in the module's place could not be pickled.
    """

    def __init__(self, name: str, ran: set[str], fed: set[str]) -> None:
        self.name, self.ran, self.fed = name, ran, fed

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.ran.add(self.name)
        if args and isinstance(args[0], Tensor) and args[0].numel():
            self.fed.add(self.name)


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
        _CHECKED[key] = ()
        layers = {name: layer for name, layer in batch_norms(round.model).items() if isinstance(layer, OwnBatchNorm)}
    if not layers:
        yield
        return
    ran, fed = set[str](), set[str]()
    with ExitStack() as stack:
        for name, module in {**layers, "": round.model}.items():
            stack.callback(module.register_forward_pre_hook(_Call(name, ran, fed)).remove)
        yield
    uncalled = [name for name in layers if name not in ran]
    observed = round.passes.observed
    if round.observes and any(observed.values()) and (blind := [name for name in fed if name in observed and not observed[name]]):
        LOGGER.warning(
            "round %s: %s of the %s BatchNorm layers (%s) ran without gradients or in evaluation mode only, and such passes are no "
            "training batches. So under %s their statistics stay as they are. To let them follow, call these layers in training mode and "
            "with gradients, and detach their output. To keep them, freeze them before convert",
            round.instruction.round,
            len(blind),
            len(layers),
            _first(sorted(blind)),
            round.method.name,
        )
    if not ran or (len(uncalled) == len(layers) and _compiled_anything()):
        del _CHECKED[key]
    elif uncalled:
        _CHECKED[key] = uncalled
        LOGGER.warning(
            "round %s: the network did not call %s of its %s BatchNorm layers (%s), so %s does nothing there. If the network asks "
            "type(layer) is nn.BatchNorm2d, let it ask isinstance(layer, nn.BatchNorm2d). If it calls F.batch_norm with a layer's tensors, "
            "let it call the layer. Ignore this warning for a layer that the round did not need, such as that of an expert without samples",
            round.instruction.round,
            len(uncalled),
            len(layers),
            _first(uncalled),
            round.method.name,
        )


def say_unmeasured(shared: SharedModel, round: int, rounds: int, phase: Phase) -> None:
    """Warn, once per run, of BatchNorm layers that no statistics pass has reached, if training normalises with measured statistics.

    A statistics pass runs the network in evaluation mode, so it misses an auxiliary head that runs in training mode alone.
    Call this after the training of a round: the layers that ``watching_calls`` has named in this process are left out, since
    the network never calls these.

    Args:
        shared: The server's model.
        round: The round.
        rounds: The number of rounds of the run.
        phase: The phase of the round.
    """
    method = shared.method
    uses = method.uses_shared(rounds) or method.freezes_statistics(method.phase(rounds, rounds))
    if shared.reached is None or shared.said_unmeasured or not uses:
        return
    layers, key = list(shared.statistics()), (shared.signature, method.name)
    known = {name for (*network, _), uncalled in _CHECKED.items() if tuple(network) == key for name in uncalled}
    if not (missed := [name for name in layers if name not in shared.reached | known | held_layers(shared.model)]):
        return
    shared.said_unmeasured = True
    follows = method.reports(phase) not in (StatisticsReport.NOTHING, StatisticsReport.PASS)
    LOGGER.warning(
        "round %s: statistics passes have not reached %s of the %s BatchNorm layers (%s): such a pass runs the network in evaluation mode, "
        "which leaves these layers out, as those of an auxiliary head. %s",
        round,
        len(missed),
        len(layers),
        _first(missed),
        FROM_BATCHES if follows else NEVER.format(method=method.name),
    )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
