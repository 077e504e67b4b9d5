"""Run a federation: calibrate, train, renew statistics where needed, and evaluate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fl_bn.federation.composition import check_learns
from fl_bn.federation.passes import Measured, Passes
from fl_bn.federation.record import RoundRecord, first_loss, why_failed
from fl_bn.federation.server import Server, Transport
from fl_bn.federation.values import Named
from fl_bn.methods import Phase, Refresh

LOGGER = logging.getLogger("flwr")


class Diverged(RuntimeError):
    """Report that too few replies could be used in several rounds in a row."""


@dataclass(frozen=True)
class Round:
    """Hold the results of a finished round.

    Attributes:
        evaluated: Name -> shared tensor for an evaluation. Empty: none was due, nor
            measured (hbn, static-bn).
        failed: The number of failed rounds in a row up to this one.
    """

    record: RoundRecord
    tensors: Named
    evaluated: Named
    failed: int


def run(
    server: Server,
    transport: Transport,
    rounds: int,
    passes: Passes | None = None,
    first: int = 1,
    failed: int = 0,
    earlier: Sequence[RoundRecord] = (),
    show: Callable[[Measured], None] = lambda measured: None,
) -> Iterator[Round]:
    """Train for ``rounds`` rounds, and yield each round's results when it is over.

    This is a generator: a round runs when its result is requested.

    Args:
        server: The run's server.
        transport: Reaches its clients.
        rounds: The whole run's number of rounds; 0: only the statistics are
            measured.
        passes: Makes the statistics-only exchanges.
        first: The first round, above 1 if the run continues.
        failed: The number of failed rounds in a row just before.
        earlier: The records of the rounds before, if the run continues.
        show: Called in a run of 0 rounds with the state before the exchanges, and
            each result.

    Raises:
        Diverged: Too few replies could be used in ``max_failed`` rounds in a row.
        TooFewMeasured: In a run of 0 rounds, too few clients measured.
        ValueError: The model has no parameter that can be trained.
    """
    if rounds:
        check_learns(server.model)
    passes, policy = passes or Passes(server), server.policy
    server.rounds, server.first_loss = rounds, first_loss(earlier)
    tensors: Named = server.shared.tensors()
    if first == 1 and server.shared.statistics():
        tensors = passes.calibrated(transport, tensors, rounds, show)
    for number in range(first, rounds + 1):
        begin = time.perf_counter()
        server.shared.load(tensors)
        changed = transport.conclude(transport.train(server.begin(number)))
        failed = 0 if changed else failed + 1
        tensors = server.shared.tensors()
        due = policy.due(number, rounds) and failed < policy.max_failed
        measures = server.method.refresh is not Refresh.NOTHING and not server.method.freezes_statistics(Phase(server.record.phase))
        evaluated: Named = {} if measures else tensors
        if due and measures:
            evaluated = passes.refreshed(transport, number, tensors)
        evaluation = transport.evaluate(number, evaluated) if due else {}
        transport.finish_round(number, changed)
        server.record = replace(server.record, evaluation=evaluation, seconds=time.perf_counter() - begin)
        for warning in server.warnings(number == rounds, failed):
            LOGGER.warning("%s", warning)
        yield Round(server.record, tensors, evaluated, failed)
        if failed >= policy.max_failed:
            raise Diverged(f"{failed} rounds in a row had too few usable replies. {why_failed(server.record)}")
