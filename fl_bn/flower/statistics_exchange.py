"""Statistics-only exchanges: all clients measure under the present weights, the server pools; pass p makes layers 1..p exact.

Before round 1 (``calibrate``), before evaluations (HBN, static BN), and as a run of its own (``rounds=0``: re-calibration).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from fl_bn.flower import schema
from fl_bn.flower.all_or_nothing import without_overflow
from fl_bn.flower.client_app import STATISTICS
from fl_bn.flower.codec import Header, count_tensors, nbytes
from fl_bn.flower.messages import REPLIED
from fl_bn.flower.population import Client, Population, RunFailed
from fl_bn.flower.posting import send_and_receive
from fl_bn.flower.replies import Contribution, read_replies, section_bytes
from fl_bn.flower.round_record import ClientRecord, RoundRecord
from fl_bn.flower.rounds import Rounds
from fl_bn.flower.secure_rounds import SecureRounds
from fl_bn.flower.shared_model import SharedModel
from fl_bn.methods import Phase
from fl_bn.training.aggregation import Drift
from fl_bn.training.defence import Defence, TooFew
from fl_bn.training.recalibration import TOLERANCE, Pass, epsilons

Messages = Callable[[str, Header, Sequence[Client], Mapping[str, Any]], list[Message]]
UNTIL_STILL = -1  # of ``calibrate``: one exchange per BatchNorm layer, or until nothing moves


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

    def calibrated(
        self, arrays: ArrayRecord, population: Population, timeout: float, show: Callable[[Measured], None] | None = None
    ) -> ArrayRecord:
        """``arrays`` after the exchanges that ``calibrate`` asks for, which ``outcomes`` has then.

        ``show``: these exchanges are all of the run. It is called with what they start from, and after each of them; each needs the clients
        that a round needs.
        """
        most, tolerance, least = self.rounds.calibrate, 0.0, 0
        if most == UNTIL_STILL:
            most, tolerance = len(self.shared.statistics()), TOLERANCE
        if show is not None:
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
            if show is not None:
                show(measured)
        return arrays

    def synchronised(self, server_round: int, arrays: ArrayRecord, population: Population, timeout: float) -> ArrayRecord:
        """``arrays`` with the statistics of its weights, by as many exchanges as the method makes before an evaluation."""
        most = self.shared.method.passes or len(self.shared.layers)
        for measured in self._passes(server_round, arrays, population, timeout, most):
            arrays = measured.arrays
        return arrays

    def _passes(
        self, server_round: int, arrays: ArrayRecord, population: Population, timeout: float, most: int, tolerance: float = 0.0
    ) -> Iterator[Measured]:
        """``most`` exchanges, fewer where one moves nothing by more than ``tolerance``: with 0 not a bit, so that more would not, either.

        Each measures under the statistics that the one before found; ``arrays`` itself is not touched.
        """
        for number in range(1, most + 1):
            measured = self._measured(number, server_round, arrays, population, timeout, tolerance, number == most)
            yield measured
            if measured.last:
                return
            arrays = measured.arrays

    def _measured(
        self, number: int, server_round: int, arrays: ArrayRecord, population: Population, timeout: float, tolerance: float, last: bool
    ) -> Measured:
        begin, shared, everyone = time.perf_counter(), self.shared, population.everyone()
        shared.load(arrays)
        header, payload, before = shared.header(server_round, Phase.MEASURE), shared.payload(), shared.statistics()
        sent = self._messages(STATISTICS, header, everyone, {})
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
