"""The calendar belongs to the method: rounds with frozen statistics run at no more than its share of the learning rate, in every door."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fl_bn import Federation, convert, local_round, server_round, server_state
from fl_bn.federation.loaders import SeededBatches
from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining, learning_rate
from fl_bn.flower import FixBN, InProcessGrid, answer, training
from fl_bn.methods import METHODS, Method, Phase, freeze
from fl_bn.run.config import RunConfig
from tests.in_process import run
from tests.listed import listed

ROUNDS = 8
BASE = 0.05
Schedule = Callable[[int, int], float]
SCHEDULES: dict[str, Schedule] = {
    "constant": partial(learning_rate, "constant", BASE, 1.0),
    "step, the paper's": partial(learning_rate, "step", BASE, 0.1),
    "step, gentle": partial(learning_rate, "step", BASE, 0.5),
    "exponential": partial(learning_rate, "exponential", BASE, 0.9),
    "exponential, steep": partial(learning_rate, "exponential", BASE, 0.2),
    "cosine": partial(learning_rate, "cosine", BASE, 1.0),
    "milestones": partial(learning_rate, "milestones", BASE, 1.0, milestones=((0.5, 0.02), (0.75, 2.0))),
    "warm-up": lambda round, rounds: BASE * min(1.0, round / 3),
}
FREEZING: dict[str, tuple[Method, float]] = {
    "fixbn": (METHODS["fixbn"](), 0.1),
    "fixbn, both": (METHODS["fixbn"](freeze_what="both"), 0.1),
    "fedtan2": (METHODS["fedtan2"](), 0.02),
    "silobn, frozen": (freeze(METHODS["fedavg"](), ROUNDS // 2), 0.1),
    "a key": (METHODS["fixbn"](frozen_rate=0.3), 0.3),
}


def rates(method: Method, schedule: Schedule, rounds: int = ROUNDS) -> list[float]:
    return [method.learning_rate(schedule, round, rounds) for round in range(1, rounds + 1)]


@listed("schedule", SCHEDULES)
@listed("name", FREEZING)
def test_no_frozen_round_is_faster_than_the_share(name: str, schedule: str) -> None:
    (method, share), planned = FREEZING[name], [SCHEDULES[schedule](round, ROUNDS) for round in range(1, ROUNDS + 1)]
    found, half = rates(method, SCHEDULES[schedule]), ROUNDS // 2
    assert found[:half] == planned[:half]
    assert found[half:] == [min(rate, share * max(planned[:half])) for rate in planned[half:]]
    assert all(rate <= share * BASE for rate in found[half:])


def test_what_the_schedule_dropped_is_not_dropped_again() -> None:
    paper = SCHEDULES["step, the paper's"]
    assert rates(METHODS["fixbn"](), paper) == [paper(round, ROUNDS) for round in range(1, ROUNDS + 1)]  # to the bit
    late = METHODS["fixbn"](freeze_after=6)  # of 8: frozen at the second drop
    assert rates(late, paper) == [paper(round, ROUNDS) for round in range(1, ROUNDS + 1)]
    assert rates(METHODS["fixbn"](), SCHEDULES["step, gentle"])[4] == pytest.approx(0.1 * BASE)  # control: a drop that is too small


@listed(
    "method",
    [
        METHODS["fixbn"](frozen_rate=1.0),
        METHODS["fixbn"](freeze_after=ROUNDS),  # FedAvg
        METHODS["fixbn"](freeze_after=0),  # no round before the freeze
        METHODS["fixbn"](freeze_what="affine"),  # batch statistics to the end
        METHODS["fedavg"](),
    ],
)
@listed("schedule", SCHEDULES)
def test_where_the_schedule_alone_decides(method: Method, schedule: str) -> None:
    assert rates(method, SCHEDULES[schedule]) == [SCHEDULES[schedule](round, ROUNDS) for round in range(1, ROUNDS + 1)]


def test_a_share_of_nothing_is_no_limit() -> None:
    """All rates before the freeze are 0. Without this, the rates after it would be 0, too."""
    late = [0.0] * (ROUNDS // 2) + [BASE] * (ROUNDS - ROUNDS // 2)
    assert rates(METHODS["fixbn"](), lambda round, rounds: late[round - 1]) == late


def test_the_share_is_one() -> None:
    for wrong in (0.0, -0.1, 1.5):
        with pytest.raises(ValueError, match=r"frozen_rate must be in \(0, 1\], but got"):
            METHODS["fixbn"](frozen_rate=wrong)
        with pytest.raises(ValueError, match=r"in frozen rounds, must be in \(0, 1\], but got"):
            freeze(METHODS["fedavg"](), rate=wrong)


def test_the_run_config_s_key() -> None:
    def share(**keys: Any) -> float:
        return RunConfig.from_mapping({name.replace("_", "-"): value for name, value in keys.items()}).build_method().frozen_rate

    assert (share(method="fixbn"), share(method="fedtan2"), share(method="hbn", freeze_after=3)) == (0.15, 0.15, 0.15)
    for unsafe in ({"clip": "none"}, {"centre_gradients": "never"}, {"optimizer": "adam", "momentum": 0.0}):
        assert (share(method="fixbn", **unsafe), share(method="fedtan2", **unsafe)) == (0.1, 0.02)
    assert share(method="hbn", freeze_after=3, hbn_lam=0.1) == 0.1  # the paper's, whose gradients are as they are
    for method in ({"method": "fixbn"}, {"method": "fedtan2"}, {"method": "silobn", "freeze_after": 3}):
        assert share(frozen_rate=0.5, **method) == 0.5
    assert share(method="fedavg") == 1.0


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def data(client: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(client))
    return x, x[:, :3].argmax(1)


class Recording(torch.optim.SGD):
    """Notes the rate of every step."""

    seen: list[float] = []  # noqa: RUF012 - of the class, since each round makes an optimiser of its own

    def step(self, closure: Any = None) -> Any:
        self.seen.append(self.param_groups[0]["lr"])
        return super().step(closure)


@pytest.mark.parametrize(("share", "clip", "steps"), [
    (None, "none", [0.2, 0.2, 0.02, 0.02]),
    (0.1, "auto", [0.2, 0.2, 0.02, 0.02]),
    (None, "auto", [0.2, 0.2, 0.03, 0.03]),
    (1.0, "none", [0.2] * 4),
])  # fmt: skip
def test_the_library_s_federation(share: float | None, clip: str, steps: list[float]) -> None:
    Recording.seen.clear()
    method, sgd = METHODS["fixbn"](frozen_rate=share), partial(Recording, lr=0.2)
    list(Federation(network(), method, [[data(0)]], optimizer=sgd, clip=clip, progress=False).run(4))
    assert pytest.approx(steps) == Recording.seen


def test_the_library_s_schedule_is_capped_not_multiplied() -> None:
    Recording.seen.clear()
    halving = partial(learning_rate, "step", 1.0, 0.1)
    federation = Federation(
        network(), METHODS["fixbn"](), [[data(0)]], optimizer=partial(Recording, lr=0.2), schedule=halving, clip="none", progress=False
    )
    assert [record.learning_rate for record in federation.run(4)] == pytest.approx([0.2, 0.2, 0.02, 0.002])
    assert pytest.approx([0.2, 0.2, 0.02, 0.002]) == Recording.seen


def test_a_cohort_as_one_program(caplog: pytest.LogCaptureFixture) -> None:
    """It trains as the clients one by one; at another share it does not."""

    def weights(engine: str, share: float | None) -> Tensor:
        batches = [SeededBatches(x.double(), y, batch_size=8) for x, y in map(data, range(2))]
        method = METHODS["fixbn"](frozen_rate=share)
        federation = Federation(network().double(), method, batches, progress=False, engine=engine)
        list(federation.run(4))
        return federation.model.state_dict()["0.weight"]

    assert (weights("vectorised", 0.1) - weights("sequential", 0.1)).abs().max() < 1e-12
    assert (weights("vectorised", 1.0) - weights("sequential", 0.1)).abs().max() > 1e-6
    assert "one by one" not in caplog.text


def test_a_loop_of_one_s_own_is_told() -> None:
    method, told = METHODS["fixbn"](), []
    state = server_state(network(), method, rounds=4, rate=SCHEDULES["constant"])
    for _ in range(4):
        asked = state.instruction()
        told.append((asked.learning_rate, asked.rate_share))
        with local_round(convert(network(), method), method, asked) as round:
            optimizer = torch.optim.SGD(round.model.parameters(), lr=asked.learning_rate)
            x, y = data(0)
            F.cross_entropy(round.model(x), y).backward()
            optimizer.step()
        state, _ = server_round(state, [round.reply(samples=16)[0]])
    assert told == [(BASE, 1.0)] * 2 + [(pytest.approx(0.1 * BASE), pytest.approx(0.1))] * 2


def test_the_application_s_clients(tiny_clients: Callable[..., list[Samples]], monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = list[float]()
    make = LocalTraining.make_optimizer

    def noted(self: LocalTraining, parameters: Any, rate: float) -> torch.optim.Optimizer:
        stepped.append(rate)
        return make(self, parameters, rate)

    monkeypatch.setattr(LocalTraining, "make_optimizer", noted)
    ran = run(METHODS["fixbn"](), tiny_clients((6,)), 4, policy={"rate": SCHEDULES["constant"]})
    assert stepped == pytest.approx([BASE, BASE, 0.1 * BASE, 0.1 * BASE])
    assert [record.learning_rate for record in ran.records] == pytest.approx(stepped)
    assert [record.phase for record in ran.records] == [Phase.TRAIN.value] * 2 + [Phase.FROZEN.value] * 2


@pytest.mark.parametrize(("named", "options", "want"), [
    ({"lr": 0.2}, {}, [(0.2, 0.2, 1.0)] * 2 + [(0.02, 0.02, 0.1)] * 2),  # the quickstart's loop, unchanged
    ({"learning_rate": 0.2}, {"frozen_rate": 1.0}, [(0.2, 0.2, 1.0)] * 4),
    ({}, {"rate": SCHEDULES["constant"]}, [(None, BASE, 1.0)] * 2 + [(None, 0.1 * BASE, 0.1)] * 2),
])  # fmt: skip
def test_a_flower_app_of_one_s_own(named: dict[str, float], options: dict[str, Any], want: list[tuple[float | None, float, float]]) -> None:
    app, seen = ClientApp(), list[tuple[float | None, float, float]]()
    loader = DataLoader(TensorDataset(*data(0)), batch_size=8)
    answer(app, network, METHODS["fixbn"](), lambda context: loader)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with training(message, context, network(), METHODS["fixbn"]()) as round:
            config: Any = message.content["config"]
            rate = next((config[name] for name in named), None)
            seen.append((rate, round.local.instruction.learning_rate, round.rate_share))
            optimizer = torch.optim.SGD(round.model.parameters(), lr=rate or 0.1)
            for x, y in loader:
                F.cross_entropy(round.model(x), y).backward()
                optimizer.step()
        return round.message(16)

    strategy = FixBN(network(), fraction_evaluate=0, min_train_nodes=1, min_available_nodes=1, **options)
    strategy.start(InProcessGrid(app, 1, {}), num_rounds=4, train_config=ConfigRecord({**named}))
    assert [tuple(map(pytest.approx, one)) for one in want] == seen
