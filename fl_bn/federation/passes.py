"""Make statistics-only exchanges: clients measure with the present weights, the server pools.

In a pass, every client makes one forward pass, and one exchange follows: pass p
makes layers 1..p exact. Passes take place before round 1 (``calibrate``), before
evaluations (HBN, static BN: ``Method.refresh``), and alone in a run of 0 rounds. If
all clients can run at the same time, one pass that goes layer by layer makes all
layers exact (``federation.client_pass``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count

from fl_bn.federation.aggregation import Drift, TooFew
from fl_bn.federation.policy import AS_METHOD, UNTIL_STILL
from fl_bn.federation.recalibration import TOLERANCE, Pass, epsilons, through, unreached, why_not
from fl_bn.federation.record import RoundRecord, with_clients
from fl_bn.federation.server import Server, Transport
from fl_bn.federation.shared_model import NotFinite
from fl_bn.federation.values import Instruction, Named, RoundReplies, count_tensors, section_bytes
from fl_bn.methods import INPUTS, NORMALISERS, Method, Phase, Refresh

LOGGER = logging.getLogger("flwr")
IDLE = "a run of 0 rounds only measures statistics: set calibrate to -1, or to a number of passes (now it asks for none)"
NOT_MEASURED = (
    "before round 1: the statistics of no client could be measured, so training begins with those of the network (mean 0, variance 1 in a "
    "new one). The warnings above say why; calibrate=0 leaves these exchanges out"
)
MISSING = "{client}'s statistics are missing from the exchange: {reason}"
Ask = Callable[[Instruction], RoundReplies | None]
"""Lets clients measure, and returns their replies, or None if the transport cannot do so."""


class TooFewMeasured(Exception):
    """Report too few usable replies in a run that only measures statistics."""


@dataclass(frozen=True)
class Measured:
    """Hold the result of one exchange.

    Attributes:
        outcome: How far the statistics moved, and how many clients were measured.
        record: The exchange's record. Its ``round`` is the number of the pass.
    """

    tensors: Named
    outcome: Pass
    record: RoundRecord
    last: bool = False


class Passes:
    """Make a run's statistics-only exchanges, which change the server's statistics.

    If each costs privacy (``private``), there are none before round 1 unless asked
    for.
    """

    def __init__(self, server: Server, private: bool = False) -> None:
        self.server, self.private = server, private
        self.outcomes: list[Pass] = []

    def calibration(self, rounds: int) -> int:
        """Return the number of exchanges before round 1, or ``UNTIL_STILL``."""
        if self.server.policy.calibrate != AS_METHOD:
            return self.server.policy.calibrate
        return UNTIL_STILL if self.server.method.uses_shared(rounds) and not self.private else 0

    def why_idle(self) -> str:
        """Return why a run of 0 rounds would do nothing, if it would."""
        return why_not(self.server.model, self.server.method) or ("" if self.calibration(0) else IDLE)

    def rescales(self, rounds: int) -> bool:
        """Tell whether weights are rescaled before round 1 (``federation.unit_scale``).

        The method must normalise the first batch with calibrated statistics.
        """
        policy = self.server.policy
        return policy.unit_scale and rounds > 0 and self.calibration(rounds) != 0 and self.server.method.uses_shared(rounds)

    def calibrated(
        self, transport: Transport, tensors: Named, rounds: int, show: Callable[[Measured], None] = lambda measured: None
    ) -> Named:
        """Make the exchanges before round 1, and rescale if ``rescales``. Return round 1's tensors.

        In a run of 0 rounds, each needs as many replies as a round does, and
        ``show`` is called with the state before the exchanges, and with each
        result.

        Raises:
            TooFewMeasured: In a run of 0 rounds, too few clients measured.
        """
        shared, policy = self.server.shared, self.server.policy
        most, least = self.calibration(rounds), 0
        tolerance = TOLERANCE if most == UNTIL_STILL else 0.0
        if rounds == 0:
            show(Measured(tensors, Pass(0, (), 0, False), RoundRecord(0, Phase.MEASURE.value, 0.0)))
            least = policy.needed(policy.clients)
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
        if self.outcomes and rounds > 0:
            if not measured.outcome.clients:
                LOGGER.warning(NOT_MEASURED)
            else:
                LOGGER.info("before round 1: statistics measured, by %s", self._in_words(measured, policy.clients, "all clients"))
        if self.outcomes and self.rescales(rounds):
            shared.load(tensors)
            shared.to_unit_scale()
            tensors = shared.tensors()
        return tensors

    def refreshed(self, transport: Transport, round: int, tensors: Named) -> Named:
        """Return the shared tensors, statistics renewed for an evaluation by ``Method.refresh``.

        ``EXACT``: those of all clients' data. ``HYBRID``: clients measure the
        moments with which training normalises. ``REPORTED``: those of this round's
        replies are combined.
        """
        method, shared = self.server.method, self.server.shared
        refresh, words = method.refresh, "no exchange"
        if refresh is Refresh.REPORTED:
            shared.load(tensors)
            shared.store(shared.reported)
            return shared.tensors()
        most, what = (1, NORMALISERS) if refresh is Refresh.HYBRID else (UNTIL_STILL, INPUTS)
        for measured in self._passes(transport, round, tensors, most, measured=what):
            tensors = measured.tensors
            who = "the cohort" if method.measures_cohort(round) else "all clients"
            words = self._in_words(measured, len(measured.record.clients), who)
        LOGGER.info("round %s: statistics for the evaluation: %s, by %s", round, refresh.value, words)
        return tensors

    @staticmethod
    def _in_words(measured: Measured, asked: int, who: str) -> str:
        """Say the number of exchanges, and ``who`` took part, if all ``asked``."""
        exchanges, clients = measured.record.exchanges or measured.outcome.number, measured.outcome.clients
        return f"{exchanges} exchange{'s' * (exchanges != 1)} with {who if clients >= asked else f'{clients} of {asked} clients'}"

    def _passes(
        self, transport: Transport, round: int, tensors: Named, most: int, tolerance: float = 0.0, measured: str = INPUTS
    ) -> Iterator[Measured]:
        """Yield the results of ``most`` exchanges, or of as many as make all layers exact.

        They end if one changes no statistic by more than ``tolerance``. One pass
        layer by layer replaces them if possible.
        """
        layers = len(self.server.shared.statistics())
        most = layers if most == UNTIL_STILL and self.private else most  # noise changes them every time, and each exchange costs privacy
        whole = measured == INPUTS and (most == UNTIL_STILL or most >= layers)
        if whole and layers > 1:
            result = self._pass(transport, transport.measure_layer_by_layer, 1, round, tensors, tolerance, measured)
            if result is not None:
                yield replace(result, last=True)
                return
        for number in count(1) if (layers if most == UNTIL_STILL else most) else ():
            result = self._pass(transport, transport.measure, number, round, tensors, tolerance, measured, whole)
            assert result is not None
            last = result.outcome.settled or number == most or (most == UNTIL_STILL and through(layers, result.outcome))
            yield replace(result, last=last)
            if last:
                return
            tensors = result.tensors

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
            transport.store(instruction, replies)
            clients = len(replies.parts)
        except (TooFew, NotFinite) as error:
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
            bytes_down=section_bytes(instruction.sections),
        )
        record = replace(
            with_clients(sent, replies, replies.parts, replies.refused, called=policy.called, warning=MISSING),
            aggregated=clients > 0,
            drift=Drift.between(before, shared.statistics()),
            seconds=time.perf_counter() - begin,
        )
        return Measured(shared.tensors(), outcome, record)


@dataclass
class Newest:
    """Hold a run's model as evaluated last, also in rounds without an evaluation.

    HBN and static BN measure statistics only before one. Other rounds' tensors are
    no usable model: under static BN, they have mean 0 and variance 1.

    Attributes:
        round: The round of these tensors; 0: before round 1.
        done: The last finished round; 0: none.
    """

    tensors: Named
    round: int = 0
    done: int = 0

    def take(self, round: int, evaluated: Named) -> None:
        """Take a finished round's ``evaluated`` tensors, if any."""
        self.done = round
        if evaluated:
            self.tensors, self.round = evaluated, round

    def say(self, method: Method) -> None:
        """Warn if the run ends early, and its model is that of an earlier round."""
        if method.refresh is Refresh.NOTHING or not self.tensors or self.round == self.done:
            return
        LOGGER.warning(
            "the run ends after round %d, but its model is that %s: %s measures statistics only before an evaluation. Evaluate more often "
            "to lose fewer rounds (evaluate_every)",
            self.done,
            f"of round {self.round}, the last evaluation" if self.round else "before round 1, since no round was evaluated",
            method.name,
        )
