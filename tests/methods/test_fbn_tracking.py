"""How fast FBN's and HBN's statistics follow, and how far the weights may move in a round."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from fl_bn import Federation
from fl_bn.bn.moments import Moments, Running
from fl_bn.federation.gradients import PATH, STEP
from fl_bn.methods import METHODS, LayerReports
from fl_bn.methods.fbn import LIMIT, slowdown
from tests.equivalence.row import make_clients
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
    after = fbn(**options).combine(LayerReports(shared(), [PART], 0.1, steps, pace=pace))
    assert torch.allclose(after.mean, weight * PART.mean, rtol=1e-12)
    assert torch.allclose(after.var, (1 - weight) + weight * PART.bessel(), rtol=1e-12)


def test_tracking_stops_where_the_scale_has_grown() -> None:
    for deviation, moves in {0.1: 0.2, 1.0: 0.2, 1.5**0.5: 0.1, 1.5: 0.0, 9.0: 0.0}.items():
        reports = LayerReports(shared(deviation), [PART], 0.1, 1.0)
        for follows in (fbn(tracking=0.2), hbn(tracking=0.2)):
            assert float(follows.combine(reports).mean[0]) == pytest.approx(moves, abs=1e-12)
        for paper in (fbn(momentum=0.2), hbn(lam=0.2)):  # Algorithm 2, and HBN's equation 11, know no limit
            assert float(paper.combine(reports).mean[0]) == pytest.approx(0.2)
    for scale, moves in ((1.0, 0.2), (0.5, 0.1)):  # by the server: from there it has grown by the square root of 1.5
        reports = LayerReports(shared(0.375**0.5), [PART], 0.1, 1.0, scale=scale)
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
