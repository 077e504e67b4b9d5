"""Statistics layer by layer over the gRPC service, by clients in processes of their own, some of which die."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.aggregation import running_statistics
from fl_bn.federation.settings import LocalTraining
from fl_bn.flower import BatchNormStrategy, Rounds
from fl_bn.methods.fedtan import fedtan
from tests.exchange.processes import SIZES, ProcessGrid, Strike, federation, network
from tests.federation import union
from tests.training.test_recalibration import EXACT, off, reference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(100)]
STEP = LocalTraining(batch_size=64, steps=1)


def calibrated(how: str, strikes: dict[tuple[int, int], Strike] | None = None, **exchange: Any) -> tuple[ProcessGrid, BatchNormStrategy]:
    """``strikes``: by client and round, which is 0."""
    settings = ExchangeSettings(carrier="grpc", **exchange)
    rules = Rounds(clients=len(SIZES), timeout=30.0, exchange=settings, calibrate=-1, recalibration=how)
    with ProcessGrid(STEP, restarts=True) as grid:
        grid.strikes.update(strikes or {})
        strategy = BatchNormStrategy(network(), fedtan(), rules)
        strategy.start(grid, num_rounds=0)
    return grid, strategy


def answers(grid: ProcessGrid) -> int:
    return sum("query.statistics" in reply.metadata.message_type for reply in grid.received)


def test_all_layers_are_exact_after_one_message() -> None:
    grid, strategy = calibrated("auto")
    assert answers(grid) == len(SIZES)
    true = reference(network(), union(federation()))
    found = running_statistics(strategy.shared.model)
    assert max(off(found, true).values()) < EXACT
    assert min(off(running_statistics(network()), true).values()) > 1e-2  # control
    (only,) = strategy.statistics.outcomes
    assert (only.exchanges, only.clients) == (5, len(SIZES))
    passes, other = calibrated("passes")
    assert answers(passes) > 3 * len(SIZES)
    wanted = running_statistics(other.shared.model)
    assert all(found[k].mean.equal(wanted[k].mean) and found[k].var.equal(wanted[k].var) for k in wanted)


@pytest.mark.parametrize("number", [0, 3])
def test_a_client_that_dies_in_it_comes_back_and_is_measured_by_passes(number: int, caplog: pytest.LogCaptureFixture) -> None:
    grid, strategy = calibrated("auto", {(2, 0): Strike(signal.SIGKILL, "forward", number)})
    assert grid.when(2, "died")
    assert len(strategy.statistics.outcomes) > 1
    assert {one.clients for one in strategy.statistics.outcomes} == {len(SIZES)}
    true = reference(network(), union(federation()))
    assert max(off(running_statistics(strategy.shared.model), true).values()) < EXACT
