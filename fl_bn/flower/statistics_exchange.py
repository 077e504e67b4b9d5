"""Statistics-only exchanges: all clients measure under the present weights, the server pools; pass p makes layers 1..p exact.

Before round 1 (``calibrate``), before evaluations (HBN, static BN: ``Method.refresh``), and as a run of its own (``rounds=0``:
re-calibration).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fl_bn.federation.aggregation import Drift
from fl_bn.federation.defence import Defence, TooFew
from fl_bn.federation.recalibration import TOLERANCE, Pass, epsilons
from fl_bn.federation.record import ClientRecord, RoundRecord
from fl_bn.federation.rounds import AS_METHOD, UNTIL_STILL, Rounds
from fl_bn.flower import schema
from fl_bn.flower.all_or_nothing import without_overflow
from fl_bn.flower.client_app import STATISTICS
from fl_bn.flower.codec import Header, count_tensors, nbytes
from fl_bn.flower.log import log
from fl_bn.flower.messages import REPLIED
from fl_bn.flower.population import Client, Population, RunFailed
from fl_bn.flower.posting import send_and_receive
from fl_bn.flower.replies import Contribution, read_replies, section_bytes
from fl_bn.flower.shared_model import SharedModel
from fl_bn.methods import INPUTS, NORMALISERS, Phase, Refresh

if TYPE_CHECKING:
    from fl_bn.flower.secure_rounds import SecureRounds

Messages = Callable[[str, Header, Sequence[Client], Mapping[str, Any]], list[Message]]


@dataclass(frozen=True)
class Measured:
    """After one exchange. ``arrays``: everything shared, with the new statistics; ``record.round`` is the pass's number."""

    arrays: ArrayRecord
    outcome: Pass
    record: RoundRecord
    last: bool


class StatisticsExchange:
    """``messages`` makes those of the run, ``overheard`` maps replies to those that arrive (see ``BatchNormStrategy``)."""

    def __init__(
        self,
        shared: SharedModel,
        rounds: Rounds,
        defence: Defence,
        messages: Messages,
        overheard: Callable[[Iterable[Message]], list[Message]],
        secure: SecureRounds | None = None,
    ) -> None:
        self.shared, self.rounds, self.defence, self.secure = shared, rounds, defence, secure
        self._messages, self._overheard = messages, overheard
        self.outcomes: list[Pass] = []

    def calibration(self, rounds: int) -> int:
        """Exchanges before round 1, or ``UNTIL_STILL``. With privacy each would cost, so only those that the run config asks for."""
        if self.rounds.calibrate != AS_METHOD:
            return self.rounds.calibrate
        private = self.secure is not None and self.secure.accountant is not None
        return UNTIL_STILL if self.shared.method.uses_shared(rounds) and not private else 0

    def calibrated(
        self, arrays: ArrayRecord, population: Population, timeout: float, rounds: int, show: Callable[[Measured], None]
    ) -> ArrayRecord:
        """``arrays`` as round 1 of ``rounds`` starts from: after the exchanges before it, which ``outcomes`` has then, and on unit scale
        where training starts with shared statistics.

        With 0 rounds these exchanges are all of the run: ``show`` is called with what they start from, and after each of them; each needs
        the clients that a round needs.
        """
        most, tolerance, least = self.calibration(rounds), 0.0, 0
        if most == UNTIL_STILL:
            most, tolerance = len(self.shared.statistics()), TOLERANCE
        if rounds == 0:
            show(Measured(arrays, Pass(0, (), 0, False), RoundRecord(0, Phase.MEASURE.value, 0.0), False))
            least = max(1, self.rounds.min_cohort, math.ceil(self.rounds.min_replies * self.rounds.clients))
        for measured in self._passes(0, arrays, population, timeout, most, tolerance):
            if measured.outcome.clients < least:
                raise RunFailed(
                    f"pass {measured.outcome.number}: the statistics of {measured.outcome.clients} clients could be used, but {least} are "
                    "needed (min-replies, min-cohort); the warnings above say why"
                )
            arrays = measured.arrays
            self.outcomes.append(measured.outcome)
            if rounds == 0:
                show(measured)
        unit = self.rounds.unit_scale and rounds > 0 and most != 0 and self.shared.method.uses_shared(rounds)
        return self.shared.unit_scaled(arrays) if unit else arrays

    def refreshed(self, server_round: int, arrays: ArrayRecord, population: Population, timeout: float) -> ArrayRecord:
        """``arrays`` with statistics of its weights, as the method wants them evaluated: exact, or as training normalises."""
        refresh, made = self.shared.method.refresh, 0
        most, what = (1, NORMALISERS) if refresh is Refresh.HYBRID else (len(self.shared.layers), INPUTS)
        for measured in self._passes(server_round, arrays, population, timeout, most, measured=what):
            arrays, made = measured.arrays, measured.outcome.number
        said = "round %s: statistics for the evaluation: %s, by %d exchange%s with all clients"
        log(logging.INFO, said, server_round, refresh.value, made, "s" * (made != 1))
        return arrays

    def _passes(
        self,
        server_round: int,
        arrays: ArrayRecord,
        population: Population,
        timeout: float,
        most: int,
        tolerance: float = 0.0,
        measured: str = INPUTS,
    ) -> Iterator[Measured]:
        """``most`` exchanges, fewer where one moves nothing by more than ``tolerance``: with 0 not a bit, so that more would not, either.

        Each measures under the statistics that the one before found; ``arrays`` itself is not touched.
        """
        for number in range(1, most + 1):
            made = self._measured(number, server_round, arrays, population, timeout, tolerance, number == most, measured)
            yield made
            if made.last:
                return
            arrays = made.arrays

    def _measured(
        self,
        number: int,
        server_round: int,
        arrays: ArrayRecord,
        population: Population,
        timeout: float,
        tolerance: float,
        last: bool,
        measured: str,
    ) -> Measured:
        begin, shared, everyone = time.perf_counter(), self.shared, population.everyone()
        shared.load(arrays)
        header, payload, before = shared.header(server_round, Phase.MEASURE), shared.payload(), shared.statistics()
        sent = self._messages(STATISTICS, header, everyone, {"measured": measured})
        if self.secure is not None:
            contributions, refused = self.secure.measure(population.grid, sent, everyone, timeout)
            clients = len(contributions)
        else:
            contributions, refused, clients = self._in_the_clear(population.grid, sent, everyone, header, timeout)
        for index, reason in refused.items():
            log(logging.WARNING, "client %s's statistics are missing from the exchange: %s", index, reason)
        after = shared.statistics()
        outcome = Pass.between(number, clients, before, after, epsilons(shared.model), tolerance)
        record = RoundRecord(number, Phase.MEASURE.value, 0.0, tensors_down=count_tensors(payload), bytes_down=section_bytes(payload))
        down, parts = nbytes(payload), {part.client.index: part for part in contributions}
        for client in everyone:
            if (part := parts.get(client.index)) is None:
                record.clients.append(ClientRecord(client.index, bytes_down=down, refused=refused[client.index]))
                continue
            record.bytes_up, record.tensors_up = section_bytes(part.payload), count_tensors(part.payload)
            record.clients.append(ClientRecord(client.index, part.samples, bytes_down=down, bytes_up=nbytes(part.payload)))
        record.aggregated, record.drift, record.seconds = clients > 0, Drift.between(before, after), time.perf_counter() - begin
        return Measured(shared.arrays(), outcome, record, last or outcome.settled)

    def _in_the_clear(
        self, grid: Grid, sent: list[Message], everyone: Sequence[Client], header: Header, timeout: float
    ) -> tuple[list[Contribution], dict[int, str], int]:
        """Store what the clients measured; the contributions, who is missing and why, and how many clients count: 0, too few came."""
        replies = send_and_receive(grid, sent, timeout, self.rounds.retry)
        expected = schema.reply(self.shared.model, self.shared.method, Phase.MEASURE)
        contributions, refused, wrong = read_replies(self._overheard(replies), everyone, expected, header, REPLIED, sent)

        def store(parts: list[Contribution], overflowing: int) -> None:
            defence = self.defence.without(len(wrong) + overflowing)
            defence.check(len(parts))
            self.shared.store(self.shared.measured(parts, defence))

        try:
            contributions, overflowing, _ = without_overflow(contributions, store)
        except TooFew as error:
            log(logging.WARNING, "the statistics stay as they are, since %s", error)
            return contributions, refused, 0
        return contributions, refused | overflowing, len(contributions)
