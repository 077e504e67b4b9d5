"""Kill drills: five clients in processes of their own, one of which dies or stands still in mid-round; the next round is exact again.

Each drill is four rounds of the real server and ClientApp, whose second is disturbed, under both policies. So is a calibration, once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn.federation.callbacks import Callback, Callbacks
from fl_bn.federation.record import RoundRecord
from fl_bn.federation.shared_model import SharedModel
from fl_bn.flower import BatchNormStrategy, Rounds
from tests.exchange.cohorts import POLICIES, ExchangeSettings, LocalTraining, Samples, Session, fedtan, to_numpy
from tests.exchange.processes import FIRST_NODE, SIZES, ProcessGrid, Strike, federation, network
from tests.federation import largest_deviation, union
from tests.in_process import arrays_of, identical, sections

pytestmark = [pytest.mark.slow, pytest.mark.timeout(100)]

RATE = 0.1
MESSAGE_TIMEOUT = 120.0  # of Flower's messages
NO_HANG = 20.0  # seconds, for a round: machines may be busy
VICTIM = 2
EVERYONE = tuple(range(len(SIZES)))
SURVIVORS = tuple(client for client in EVERYONE if client != VICTIM)
both_policies = pytest.mark.parametrize("policy", ["abort", "shrink"])


@dataclass
class Drill:
    """A run, and what became of it. ``models``: the shared tensors after each round, 0 for the start."""

    policy: str
    grid: ProcessGrid
    strategy: BatchNormStrategy
    records: dict[int, RoundRecord] = field(default_factory=dict)
    models: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

    @property
    def session(self) -> Session:
        return self.strategy.transport.exchanges.session


def drill(
    policy: str,
    strikes: Mapping[tuple[int, int], Strike],
    meanwhile: Callable[[Drill], None] = lambda ran: None,
    *,
    rounds: int = 4,
    deadline: float = 30.0,
    join_deadline: float = 30.0,
    notice: float = 0.5,
    restarts: bool = True,
) -> Drill:
    """``strikes``: by client and round; ``meanwhile`` is called again and again; ``notice``, ``restarts``: see ``ProcessGrid``."""
    exchange = ExchangeSettings(carrier="grpc", policy=policy, deadline=deadline, join_deadline=join_deadline)
    rules = Rounds(clients=len(SIZES), timeout=MESSAGE_TIMEOUT, rate=lambda round, rounds: RATE, exchange=exchange)
    with ProcessGrid(LocalTraining(batch_size=64, steps=1), notice=notice, restarts=restarts) as grid:
        ran = Drill(policy, grid, BatchNormStrategy(network(), fedtan(), rules))
        ran.strategy.transport.callbacks = Callbacks([ByRound(ran.records)])
        ran.models[0] = to_numpy(ran.strategy.transport.shared.tensors())
        grid.strikes.update(strikes)
        grid.meanwhile = lambda: meanwhile(ran)

        def keep(round: int, arrays: ArrayRecord) -> None:
            ran.models[round] = {name: array for name, array in arrays_of(arrays).items() if name in ran.models[0]}
            meanwhile(ran)
            end = time.monotonic() + NO_HANG
            exchanges = ran.strategy.transport.exchanges
            while round == 3 and restarts and exchanges.late_clients(grid) and time.monotonic() < end:  # Flower notices late
                time.sleep(0.05)
                meanwhile(ran)

        ran.strategy.start(grid, num_rounds=rounds, evaluate_fn=keep)
    return ran


class ByRound(Callback):
    def __init__(self, records: dict[int, RoundRecord]) -> None:
        self.records = records

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        self.records[record.round] = record


def centralised(start: Mapping[str, np.ndarray], together: Sequence[int] = EVERYONE) -> dict[str, Tensor]:
    """One step of plain torch on the union of the batches of ``together``."""
    model, clients = loaded(start), federation()
    sgd_step(model, union([clients[client] for client in together]))
    return average([model], [1])


def fedavg(start: Mapping[str, np.ndarray], counted: Sequence[int] = EVERYONE) -> dict[str, Tensor]:
    """Every client by itself, in plain torch."""
    models, clients = {client: loaded(start) for client in counted}, federation()
    for client, model in models.items():
        sgd_step(model, clients[client])
    return average(list(models.values()), [SIZES[client] for client in counted])


def loaded(arrays: Mapping[str, np.ndarray]) -> nn.Module:
    model = network().train()
    missing = model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, strict=False).missing_keys
    assert all(name.endswith("num_batches_tracked") for name in missing)
    return model


def sgd_step(model: nn.Module, samples: Samples) -> None:
    parameters = list(model.parameters())
    x, y = samples.batch(np.arange(len(samples)), parameters[0])
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= RATE * gradient


def average(models: Sequence[nn.Module], weights: Sequence[float]) -> dict[str, Tensor]:
    """Of the floating-point tensors."""
    return weighted([{name: t for name, t in model.state_dict().items() if t.is_floating_point()} for model in models], weights)


def weighted(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    return {name: sum(w * state[name] for w, state in zip(weights, states, strict=True)) / sum(weights) for name in states[0]}


def deviation(arrays: Mapping[str, np.ndarray], expected: dict[str, Tensor]) -> float:
    assert arrays.keys() == expected.keys()
    return largest_deviation({name: torch.from_numpy(array) for name, array in arrays.items()}, expected)


def assert_recovers(ran: Drill) -> None:
    """Round 3, which comes at once, is exact over all who have answered round 2; round 4, when Flower has noticed, over all five."""
    there = tuple(c.client for c in ran.records[3].clients)
    assert there in (SURVIVORS, tuple(EVERYONE))
    assert_exact(ran, 3, there)
    assert_exact(ran, 4)


def assert_exact(ran: Drill, round: int, together: Sequence[int] = EVERYONE) -> None:
    """``round`` was one centralised step on the batches of ``together``, and FedAvg would not have been."""
    before, after = ran.models[round - 1], ran.models[round]
    assert [(c.client, c.refused) for c in ran.records[round].clients] == [(client, "") for client in together]
    assert ran.records[round].aggregated
    assert deviation(after, centralised(before, together)) < 1e-10
    assert deviation(after, fedavg(before, together)) > 1e-4


def assert_given_up(ran: Drill, round: int, reason: str) -> None:
    """Nothing changed, and everybody was told why."""
    assert not ran.records[round].aggregated
    assert identical(ran.models[round], ran.models[round - 1])
    assert ran.records[round].accepted == []
    assert [c.client for c in ran.records[round].clients if reason not in c.refused and c.client != VICTIM] == []


def assert_survivors_averaged(ran: Drill, round: int) -> None:
    """Over the survivors' replies, with their batch sizes as weights."""
    assert ran.records[round].aggregated
    assert tuple(c.client for c in ran.records[round].accepted) == SURVIVORS
    mine = [m for m in ran.grid.received if m.metadata.message_type == "train" and m.metadata.group_id == str(round) and m.has_content()]
    sent = {
        m.metadata.src_node_id - FIRST_NODE: {n: torch.from_numpy(a.copy()) for s in sections(m.content).values() for n, a in s.items()}
        for m in mine
    }
    states = [sent[client] for client in SURVIVORS]
    assert deviation(ran.models[round], weighted(states, [SIZES[client] for client in SURVIVORS])) < 1e-12
    assert deviation(ran.models[round], weighted(states, [1.0] * len(SURVIVORS))) > 1e-5  # control


def assert_undisturbed_and_quick(ran: Drill) -> None:
    assert max(record.seconds for record in ran.records.values()) < NO_HANG
    assert_exact(ran, 1)


@both_policies
@pytest.mark.parametrize(
    "strike",
    [Strike(signal.SIGKILL, where, number) for where, number in (("forward", 0), ("backward", 4))],
    ids=lambda strike: f"{strike.where} {strike.number}",
)
def test_one_of_five_is_killed_in_the_exchange(strike: Strike, policy: str, log: pytest.LogCaptureFixture) -> None:
    ran = drill(policy, {(VICTIM, 2): strike}, notice=1.0)
    assert ran.grid.when(VICTIM, f"died with {-signal.SIGKILL}")
    noticed = [r.created for r in log.records if r.getMessage().startswith(f"exchange: client {VICTIM}: ")]
    assert len(noticed) == 1
    assert noticed[0] < ran.grid.when(VICTIM, "reported")[0]
    before, after = ran.models[1], ran.models[2]
    if policy == "abort":
        assert_given_up(ran, 2, f"client {VICTIM}: ")
    else:
        assert_survivors_averaged(ran, 2)
        if (strike.where, strike.number) == ("forward", 0):  # then everything is of the survivors alone
            assert deviation(after, centralised(before, SURVIVORS)) < 1e-10
            assert deviation(after, centralised(before)) > 1e-4
    assert_recovers(ran)
    assert_undisturbed_and_quick(ran)


@both_policies
def test_one_is_stopped_past_the_deadline_and_finds_itself_refused(policy: str, log: pytest.LogCaptureFixture) -> None:
    """It goes on when the others have begun the next round."""

    def resume(ran: Drill) -> None:
        if ran.grid.struck(VICTIM) and ran.strategy.transport.record.round == 3:
            ran.grid.resume(VICTIM)

    ran = drill(policy, {(VICTIM, 2): Strike(signal.SIGSTOP, "forward", 0)}, resume, deadline=2.0)
    (late,) = [r.getMessage() for r in log.records if r.getMessage().startswith(f"exchange: client {VICTIM}: ")]
    assert "stem.1 (moments)" in late
    assert len(ran.grid.when(VICTIM, "answered: ExchangeFailed")) == 1
    assert not ran.grid.when(VICTIM, "died")
    if policy == "abort":
        assert_given_up(ran, 2, f"client {VICTIM}: ")
    else:
        assert_survivors_averaged(ran, 2)
        assert deviation(ran.models[2], centralised(ran.models[1], SURVIVORS)) < 1e-10
    assert_recovers(ran)
    assert_undisturbed_and_quick(ran)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_that_never_comes_back_is_missing_but_the_run_goes_on(policy: str, log: pytest.LogCaptureFixture) -> None:
    """Flower notices 36 to 60 s after a death, for which 1.2 to 2 join deadlines of 30 s stand."""
    ran = drill(policy, {(VICTIM, 2): Strike(signal.SIGKILL, "forward", 0)}, rounds=6, join_deadline=2.0, notice=3.0, restarts=False)
    assert f"exchange: client {VICTIM}: " in log.text
    for round in (3, 4, 5, 6):
        assert_exact(ran, round, SURVIVORS)
    assert_undisturbed_and_quick(ran)


def calibrated(how: str, strikes: Mapping[tuple[int, int], Strike]) -> tuple[ProcessGrid, BatchNormStrategy]:
    """Measure the statistics before round 1, which is round 0. ``strikes``: by client and round."""
    rules = Rounds(clients=len(SIZES), timeout=30.0, exchange=ExchangeSettings(carrier="grpc"), calibrate=-1, recalibration=how)
    with ProcessGrid(LocalTraining(batch_size=64, steps=1)) as grid:
        grid.strikes.update(strikes)
        strategy = BatchNormStrategy(network(), fedtan(), rules)
        strategy.start(grid, num_rounds=0)
    return grid, strategy


def test_statistics_of_all_layers_take_one_message_and_one_that_dies_comes_back_and_is_measured_by_passes() -> None:
    grid, strategy = calibrated("auto", {})
    killed, others = calibrated("auto", {(VICTIM, 0): Strike(signal.SIGKILL, "forward", 3)})
    passes, third = calibrated("passes", {})
    messages = [sum("query.statistics" in reply.metadata.message_type for reply in ran.received) for ran in (grid, passes)]
    assert messages[0] == len(SIZES)
    assert messages[1] > 3 * len(SIZES)
    assert [(one.exchanges, one.clients) for one in strategy.transport.statistics.outcomes] == [(5, len(SIZES))]
    assert killed.when(VICTIM, "died")
    assert len(others.transport.statistics.outcomes) > 1
    assert {one.clients for one in others.transport.statistics.outcomes} == {len(SIZES)}
    wanted = to_numpy(third.transport.shared.tensors())
    assert identical(to_numpy(strategy.transport.shared.tensors()), wanted)
    assert deviation(to_numpy(others.transport.shared.tensors()), {name: torch.from_numpy(array) for name, array in wanted.items()}) < 1e-11
    assert deviation(to_numpy(SharedModel(network(), fedtan()).tensors()), average([third.transport.shared.model], [1])) > 1e-2  # control
