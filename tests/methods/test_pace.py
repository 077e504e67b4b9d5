"""How fast FBN's and HBN's statistics follow, and how far the weights may move in a round."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from fl_bn import Federation
from fl_bn.app.config import RunConfig
from fl_bn.bn.moments import Moments, Running
from fl_bn.federation.gradients import PATH, STEP
from fl_bn.federation.settings import Schedule
from fl_bn.methods import METHODS, LayerReports, Method, freeze
from fl_bn.methods.fbn import LIMIT, slowdown
from tests.equivalence.row import make_clients
from tests.listed import listed
from tests.networks import seeded_network

fbn, hbn = METHODS["fbn"], METHODS["hbn"]
PART = Moments(11, torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([3.0, 0.5], dtype=torch.float64))


def shared(deviation: float = 1.0) -> Running:
    return Running(torch.zeros(2, dtype=torch.float64), torch.full((2,), deviation**2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "steps", "pace", "weight"),
    [
        ({}, 5.0, 1.0, 0.02),
        ({}, 5.0, 0.3, 0.006),  # the learning rate stepped down: weights that move less need statistics that move less
        ({"tracking": 0.5}, 1.0, 1.0, 0.5),
        ({"momentum": 0.1}, 1.0, 0.3, 0.1),  # Algorithm 2: whatever the learning rate
        ({"momentum": 0.1}, 3.0, 1.0, 0.1),  # one batch is reported
        ({"momentum": 0.1, "report": "all"}, 3.0, 1.0, 1 - 0.9**3),
    ],
)
def test_the_weight_of_a_round(options: dict[str, object], steps: float, pace: float, weight: float) -> None:
    after = fbn(**options).combine(LayerReports(shared(), [PART], steps, pace=pace))
    assert torch.allclose(after.mean, weight * PART.mean, rtol=1e-12)
    assert torch.allclose(after.var, (1 - weight) + weight * PART.bessel(), rtol=1e-12)


def test_tracking_stops_where_the_scale_has_grown() -> None:
    for deviation, moves in {0.1: 0.2, 1.0: 0.2, 1.5**0.5: 0.1, 1.5: 0.0, 9.0: 0.0}.items():
        reports = LayerReports(shared(deviation), [PART], 1.0, scale=1.0)
        for follows in (fbn(tracking=0.2), hbn(tracking=0.2)):
            assert float(follows.combine(reports).mean[0]) == pytest.approx(moves, abs=1e-12)
            assert float(follows.combine(LayerReports(shared(deviation), [PART], 1.0)).mean[0]) == pytest.approx(
                0.2
            )  # nothing was rescaled
        for paper in (fbn(momentum=0.2), hbn(lam=0.2)):  # Algorithm 2, and HBN's equation 11, know no limit
            assert float(paper.combine(reports).mean[0]) == pytest.approx(0.2)
    for scale, moves in ((1.0, 0.2), (0.5, 0.1)):  # by the server: from there it has grown by the square root of 1.5
        reports = LayerReports(shared(0.375**0.5), [PART], 1.0, scale=scale)
        assert float(fbn(tracking=0.2).combine(reports).mean[0]) == pytest.approx(moves)


@pytest.mark.parametrize("dead", [0.0, 1e-38])
def test_a_dead_channel_does_not_release_the_brake(dead: float) -> None:
    for deviation, speed in ((1.0, 1.0), (1.5**0.5, 0.5), (9.0, 0.0)):
        var = torch.full((16,), deviation**2, dtype=torch.float64)
        exact = min(1.0, max(0.0, 1 - float(var.log().mean()) / 2 / math.log(LIMIT)))
        assert slowdown(Running(torch.zeros(16), var)) == exact
        var[3] = dead
        assert slowdown(Running(torch.zeros(16), var)) == pytest.approx(speed, abs=1e-12)
    assert slowdown(Running(torch.zeros(2), torch.tensor([9.0, 1e-6]))) == 1.0  # control: small, but alive
    assert slowdown(Running(torch.zeros(16), torch.zeros(16))) == 1.0


def test_a_run_tracks_as_its_learning_rate_says() -> None:
    clients, net = make_clients(6, 5, shape=(5,)), nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 4)).double()
    mean = torch.cat([own[0][0] for own in clients]).mean(0)
    for factor, weight in ((1.0, 0.4), (0.25, 0.1)):
        options = {"schedule": lambda n, _, f=factor: f if n > 1 else 1.0, "calibrate": 0}
        federation = Federation(net, fbn(tracking=0.4), clients, **options)
        first, second = [federation.model[0].running_mean.clone() for _ in federation.run(2)]
        assert torch.allclose(first, 0.4 * mean)
        assert torch.allclose(second, (1 - weight) * first + weight * mean)


def test_a_round_s_path_is_bounded_and_that_of_a_single_step() -> None:
    def moved(pieces: int, **options: str) -> float:
        net = seeded_network("plain", dtype=torch.float64)
        before = nn.utils.parameters_to_vector(net.parameters())
        given: dict[str, Any] = {"optimizer": partial(SGD, lr=500.0, momentum=0.9), "calibrate": 0}
        federation = Federation(net, fbn(), make_clients(8, pieces=pieces), **given, **options)
        list(federation.run(1))
        return float((nn.utils.parameters_to_vector(federation.model.parameters()) - before).detach().norm())

    assert moved(1) == pytest.approx(STEP, rel=1e-5)
    assert STEP < moved(3) < PATH
    assert moved(1, clip="none") > PATH  # control: unbounded, it is far away


# The calendar belongs to the method


fixbn, fedavg, ROUNDS, BASE = METHODS["fixbn"], METHODS["fedavg"], 8, 0.05
Rates = Callable[[int, int], float]
SCHEDULES: dict[str, Rates] = {
    "constant": Schedule(BASE, "constant", 1.0),
    "cosine": Schedule(BASE, "cosine", 1.0),
    "step, the paper's": Schedule(BASE, "step", 0.1),
    "step, gentle": Schedule(BASE, "step", 0.5),
    "milestones": Schedule(BASE, "milestones", 1.0, ((0.5, 0.02), (0.75, 2.0))),
    "warm-up": lambda round, rounds: BASE * min(1.0, round / 3),
}
FREEZING: dict[str, tuple[Method, float]] = {
    "fixbn": (fixbn(), 0.1),
    "fedtan2": (METHODS["fedtan2"](), 0.02),
    "fedavg, frozen": (freeze(fedavg(), ROUNDS // 2), 0.1),
    "a key": (fixbn(frozen_rate=0.3), 0.3),
}
# the schedule alone decides: a share of 1, no round after the freeze or before it, batch statistics to the end
UNBOUNDED = [fixbn(frozen_rate=1.0), fixbn(freeze_after=ROUNDS), fixbn(freeze_after=0), fixbn(freeze_what="affine")]


def rates(method: Method, schedule: Rates) -> list[float]:
    return [method.learning_rate(schedule, round, ROUNDS) for round in range(1, ROUNDS + 1)]


@listed("schedule", SCHEDULES)
def test_no_frozen_round_is_faster_than_the_share(schedule: str) -> None:
    plan, half = rates(fedavg(), SCHEDULES[schedule]), ROUNDS // 2
    for name, (method, share) in FREEZING.items():
        want = plan[:half] + [min(rate, share * max(plan[:half])) for rate in plan[half:]]
        assert rates(method, SCHEDULES[schedule]) == want, name
    assert plan == [SCHEDULES[schedule](round, ROUNDS) for round in range(1, ROUNDS + 1)]
    assert all(rates(method, SCHEDULES[schedule]) == plan for method in UNBOUNDED)


def test_what_the_schedule_dropped_is_not_dropped_again() -> None:
    paper = SCHEDULES["step, the paper's"]
    for method in (fixbn(), fixbn(freeze_after=6)):  # the latter is frozen at the second drop
        assert rates(method, paper) == rates(fedavg(), paper)  # to the bit
    assert rates(fixbn(), SCHEDULES["step, gentle"])[4] == pytest.approx(0.1 * BASE)  # control: a drop that is too small
    late = [0.0] * (ROUNDS // 2) + [BASE] * (ROUNDS - ROUNDS // 2)  # a share of nothing is no limit
    assert rates(fixbn(), lambda round, rounds: late[round - 1]) == late


def test_the_run_config_s_key() -> None:
    def share(**keys: Any) -> float:
        values = {name.replace("_", "-"): value for name, value in keys.items()}
        return RunConfig.from_mapping({"setup": "experiments.papers:Papers", **values}).build_method().frozen_rate

    assert (share(method="fixbn"), share(method="fedtan2"), share(method="hbn", freeze_after=3)) == (0.15, 0.15, 0.15)
    for unsafe in ({"clip": "none"}, {"centre_gradients": "never"}, {"optimizer": "adam", "momentum": 0.0}):
        assert (share(method="fixbn", **unsafe), share(method="fedtan2", **unsafe)) == (0.1, 0.02)
    assert share(method="hbn", freeze_after=3, hbn_lam=0.1) == 0.1  # the paper's, whose gradients are as they are
    for method in ({"method": "fixbn"}, {"method": "fedtan2"}, {"method": "silobn", "freeze_after": 3}):
        assert share(frozen_rate=0.5, **method) == 0.5
    assert share(method="fedavg") == 1.0
