"""Statistics-only exchanges: all clients measure under the present weights, the server pools; pass p makes layers 1..p exact.

Before round 1 (``calibrate``), before evaluations (HBN, static BN: ``Method.refresh``), and as a run of its own (``rounds=0``:
re-calibration). Where all clients can be there at once, one pass that goes layer by layer makes all layers exact
(``federation.layer_by_layer``).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count

from fl_bn.federation.aggregation import Drift
from fl_bn.federation.defence import TooFew
from fl_bn.federation.narrow import EXACT
from fl_bn.federation.payload import Named, count_tensors
from fl_bn.federation.recalibration import TOLERANCE, Pass, epsilons, through, unreached
from fl_bn.federation.record import RoundRecord, with_clients
from fl_bn.federation.rounds import AS_METHOD, UNTIL_STILL
from fl_bn.federation.server import Server
from fl_bn.federation.transport import Transport
from fl_bn.federation.values import Instruction, RoundReplies
from fl_bn.methods import INPUTS, NORMALISERS, Phase, Refresh

LOGGER = logging.getLogger("flwr")
MISSING = "{client}'s statistics are missing from the exchange: {reason}"
Ask = Callable[[Instruction], RoundReplies | None]
"""Has clients measure, and returns their replies; None where that did not come about."""


class TooFewMeasured(Exception):
    """A run that measures statistics alone has too few clients to do so."""


@dataclass(frozen=True)
class Measured:
    """After one exchange. ``tensors``: everything shared, with the new statistics; ``record.round`` is the pass's number."""

    tensors: Named
    outcome: Pass
    record: RoundRecord
    last: bool = False


class Passes:
    """The statistics-only exchanges of one run.

    Args:
        server: Whose statistics they change.
        private: Each exchange costs privacy, so none is made that nobody asked for.
    """

    def __init__(self, server: Server, private: bool = False) -> None:
        self.server, self.private = server, private
        self.outcomes: list[Pass] = []

    def calibration(self, rounds: int) -> int:
        """Exchanges before round 1, or ``UNTIL_STILL``."""
        if self.server.policy.calibrate != AS_METHOD:
            return self.server.policy.calibrate
        return UNTIL_STILL if self.server.method.uses_shared(rounds) and not self.private else 0

    def rescales(self, rounds: int) -> bool:
        """Whether the weights are brought to unit scale after the calibration."""
        policy = self.server.policy
        return policy.unit_scale and rounds > 0 and self.calibration(rounds) != 0 and self.server.method.uses_shared(rounds)

    def calibrated(
        self, transport: Transport, tensors: Named, rounds: int, show: Callable[[Measured], None] = lambda measured: None
    ) -> Named:
        """``tensors`` as round 1 of ``rounds`` starts from: after the exchanges before it, which ``outcomes`` has then, and on unit scale
        where training starts with shared statistics.

        With 0 rounds these exchanges are all of the run: ``show`` is called with what they start from, and after each of them; each needs
        the clients that a round needs.

        Raises:
            TooFewMeasured: they were not there.
        """
        shared, policy = self.server.shared, self.server.policy
        most, least = self.calibration(rounds), 0
        tolerance = TOLERANCE if most == UNTIL_STILL else 0.0
        if rounds == 0:
            show(Measured(tensors, Pass(0, (), 0, False), RoundRecord(0, Phase.MEASURE.value, 0.0)))
            least = max(1, policy.min_cohort, math.ceil(policy.min_replies * policy.clients))
        for measured in self._passes(transport, 0, tensors, most, tolerance):
            if measured.outcome.clients < least:
                raise TooFewMeasured(
                    f"pass {measured.outcome.number}: the statistics of {measured.outcome.clients} clients could be used, but {least} are "
                    "needed (min-replies, min-cohort); the warnings above say why"
                )
            tensors = measured.tensors
            self.outcomes.append(measured.outcome)
            if rounds == 0:
                show(measured)
        if self.outcomes and self.rescales(rounds):
            shared.load(tensors)
            shared.to_unit_scale()
            tensors = shared.tensors()
        return tensors

    def refreshed(self, transport: Transport, round: int, tensors: Named) -> Named:
        """``tensors`` with statistics of its weights, as the method wants them evaluated: exact, as training normalises, or as the round's
        clients reported them."""
        method, shared = self.server.method, self.server.shared
        refresh, made = method.refresh, 0
        if refresh is Refresh.REPORTED:
            shared.load(tensors)
            shared.store(shared.reported)
            return shared.tensors()
        most, what = (1, NORMALISERS) if refresh is Refresh.HYBRID else (UNTIL_STILL, INPUTS)
        for measured in self._passes(transport, round, tensors, most, measured=what):
            tensors, made = measured.tensors, measured.record.exchanges or measured.outcome.number
        said = "round %s: statistics for the evaluation: %s, by %d exchange%s with %s"
        LOGGER.info(said, round, refresh.value, made, "s" * (made != 1), "the cohort" if method.measures_cohort(round) else "all clients")
        return tensors

    def _passes(
        self, transport: Transport, round: int, tensors: Named, most: int, tolerance: float = 0.0, measured: str = INPUTS
    ) -> Iterator[Measured]:
        """``most`` exchanges, or UNTIL_STILL; fewer where one moves nothing by more than ``tolerance``: with 0 not a bit, so that more
        would not, either.

        Each measures under the statistics that the one before found; ``tensors`` itself is not touched. As many as make all layers exact
        are one that goes layer by layer, if possible.
        """
        layers = len(self.server.shared.statistics())
        most = layers if most == UNTIL_STILL and self.private else most  # what moves may be noise, and each costs privacy
        whole = measured == INPUTS and (most == UNTIL_STILL or most >= layers)
        if whole and layers > 1:
            made = self._pass(transport, transport.measure_layer_by_layer, 1, round, tensors, tolerance, measured)
            if made is not None:
                yield replace(made, last=True)
                return
        for number in count(1) if (layers if most == UNTIL_STILL else most) else ():
            made = self._pass(transport, transport.measure, number, round, tensors, tolerance, measured, whole)
            assert made is not None
            last = made.outcome.settled or number == most or (most == UNTIL_STILL and through(layers, made.outcome))
            yield replace(made, last=last)
            if last:
                return
            tensors = made.tensors

    def _pass(
        self,
        transport: Transport,
        ask: Ask,
        number: int,
        round: int,
        tensors: Named,
        tolerance: float,
        measured: str,
        from_below: bool = False,
    ) -> Measured | None:
        begin, shared, policy = time.perf_counter(), self.server.shared, self.server.policy
        shared.load(tensors)
        before, instruction = shared.statistics(), shared.instruction(round, Phase.MEASURE, measured=measured)
        if (replies := ask(instruction)) is None:
            return None
        clients = 0
        try:
            replies = transport.store(instruction, replies)
            clients = len(replies.parts)
        except TooFew as error:
            LOGGER.warning("the statistics stay as they are, since %s", error)
        after, exchanges = shared.statistics(), 0 if replies.exchange is None else replies.exchange.exchanges
        wrong = unreached(list(before), number) if from_below else ()
        outcome = Pass.between(number, clients, before, after, epsilons(shared.model), tolerance, exchanges, wrong)
        shared.store({name: before[name] for name in wrong})
        sent = RoundRecord(
            number,
            Phase.MEASURE.value,
            0.0,
            tensors_down=count_tensors(instruction.sections),
            bytes_down=EXACT.nbytes(instruction.sections),
        )
        record = replace(
            with_clients(sent, replies, replies.parts, replies.refused, called=policy.called, warning=MISSING),
            aggregated=clients > 0,
            drift=Drift.between(before, shared.statistics()),
            seconds=time.perf_counter() - begin,
        )
        return Measured(shared.tensors(), outcome, record)
