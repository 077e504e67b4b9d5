"""What FBN's clients report, and how fast its statistics follow."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from client_app.app import app
from fl_bn import Federation
from fl_bn.conversion import convert
from fl_bn.federation.clipping import STEP
from fl_bn.federation.local import Samples
from fl_bn.federation.payload import decode_moments, to_tensors
from fl_bn.federation.settings import LocalTraining
from fl_bn.flower import BatchNormStrategy, InProcessGrid, RunFailed
from fl_bn.methods.fbn import fbn
from fl_bn.methods.hbn import hbn
from fl_bn.methods.method import LayerReports
from fl_bn.methods.tracking import LIMIT, slowdown
from fl_bn.moments import Moments, Running
from fl_bn.observation import observe
from fl_bn.run import testing
from fl_bn.run.assembly import source_model
from fl_bn.run.config import RunConfig
from tests.federation import ONE_STEP
from tests.in_process import run
from tests.local import train
from tests.networks import seeded_network

Clients = Callable[..., list[Samples]]
BATCHES = [np.array([0, 1, 2]), np.array([3, 4]), np.array([5, 6, 7])]


def reported(report: str, samples: Samples) -> dict[str, Moments]:
    model = convert(seeded_network("plain", dtype=torch.float64), fbn(report=report))
    return train(model, samples, BATCHES, ONE_STEP, 0.1, fbn(report=report)).moments


def test_the_first_batch_is_seen_by_the_shared_weights(tiny_clients: Clients) -> None:
    (samples,) = tiny_clients((8,))
    model = convert(seeded_network("plain", dtype=torch.float64), fbn())
    with torch.no_grad(), observe(model.train()) as seen:
        model(samples.batch(BATCHES[0], next(model.parameters()))[0])
    for name, (moments,) in seen.items():
        first = reported("first", samples)[name]
        assert first.count == moments.count
        assert torch.equal(first.mean, moments.mean)
        assert torch.equal(first.var, moments.var)
        assert not torch.allclose(reported("all", samples)[name].mean, moments.mean, atol=1e-3)  # control
    assert reported("pass", samples) == {}  # that of ``statistics_pass``


def test_a_pass_is_made_before_training(tiny_clients: Clients) -> None:
    clients = tiny_clients((6, 5))
    ran = run(fbn(report="pass"), clients, 1)
    for client, payload in zip(clients, ran.grid.train(1, replies=True), strict=True):
        moments = decode_moments(to_tensors(payload["moments"]))
        assert {m.count for m in moments.values()} == {len(client) * 64}  # every sample once, 8 x 8 pixels
    first = decode_moments(to_tensors(run(fbn(), clients, 1).grid.train(1, replies=True)[0]["moments"]))
    assert {m.count for m in first.values()} == {4 * 64}  # one batch of four


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
    shared = Running(torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64))
    part = Moments(11, torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([3.0, 0.5], dtype=torch.float64))
    after = fbn(**options).combine(LayerReports(shared, [part], 0.1, steps, pace=pace))  # type: ignore[arg-type]
    assert torch.allclose(after.mean, weight * part.mean, rtol=1e-12)
    assert torch.allclose(after.var, (1 - weight) + weight * part.bessel(), rtol=1e-12)


def test_tracking_stops_where_the_scale_has_grown() -> None:
    part = Moments(11, torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([3.0, 0.5], dtype=torch.float64))
    moved = {}
    brought = LayerReports(Running(torch.zeros(2, dtype=torch.float64), torch.full((2,), 0.375, dtype=torch.float64)), [part], 0.1, 1.0)
    assert float(fbn(tracking=0.2).combine(brought).mean[0]) == pytest.approx(0.2)
    brought = replace(brought, scale=0.5)  # by the server: from there it has grown by the square root of 1.5
    assert float(fbn(tracking=0.2).combine(brought).mean[0]) == float(hbn(tracking=0.2).combine(brought).mean[0]) == pytest.approx(0.1)
    for deviation in (0.1, 1.0, 1.5**0.5, 1.5, 9.0):
        shared = Running(torch.zeros(2, dtype=torch.float64), torch.full((2,), deviation**2, dtype=torch.float64))
        reports = LayerReports(shared, [part], 0.1, 1.0)
        moved[deviation] = float(fbn(tracking=0.2).combine(reports).mean[0])
        assert float(hbn(tracking=0.2).combine(reports).mean[0]) == pytest.approx(moved[deviation])
        for paper in (fbn(momentum=0.2), hbn(lam=0.2)):  # Algorithm 2, and HBN's equation 11, know no limit
            assert float(paper.combine(reports).mean[0]) == pytest.approx(0.2)
    assert moved == pytest.approx({0.1: 0.2, 1.0: 0.2, 1.5**0.5: 0.1, 1.5: 0.0, 9.0: 0.0})


@pytest.mark.parametrize("dead", [0.0, 1e-38])
def test_a_dead_channel_does_not_release_the_brake(dead: float) -> None:
    for deviation, speed in ((1.0, 1.0), (1.5**0.5, 0.5), (9.0, 0.0)):
        var = torch.full((16,), deviation**2, dtype=torch.float64)
        healthy = slowdown(Running(torch.zeros(16), var))
        assert healthy == min(1.0, max(0.0, 1 - float(var.log().mean()) / 2 / math.log(LIMIT)))  # to the bit
        assert healthy == pytest.approx(speed, abs=1e-12)
        var[3] = dead
        assert slowdown(Running(torch.zeros(16), var)) == pytest.approx(speed, abs=1e-12)
    assert slowdown(Running(torch.zeros(2), torch.tensor([9.0, 1e-6]))) == 1.0  # control: small, but alive
    assert slowdown(Running(torch.zeros(16), torch.zeros(16))) == 1.0


def test_a_run_tracks_as_its_learning_rate_says(tiny_clients: Clients) -> None:
    clients = tiny_clients((6, 5))
    rates = {"rate": lambda round, rounds: 0.1 if round == 1 else 0.025}
    ran = run(fbn(tracking=0.4), clients, 2, policy=rates)
    constant = run(fbn(tracking=0.4), clients, 2)
    for round, ran_, weight in ((1, ran, 0.4), (2, ran, 0.1), (2, constant, 0.4)):
        sent, after = ran_.grid.train(round)[0]["statistics"], ran_.trajectory[round]
        parts = [decode_moments(to_tensors(p["moments"]))["1"] for p in ran_.grid.train(round, replies=True)]
        mean = sum(p.count * p.mean.numpy() for p in parts) / sum(p.count for p in parts)
        assert np.allclose(after["1.running_mean"], (1 - weight) * sent["1.running_mean"] + weight * mean, atol=1e-6)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fbn's tracking must be in \(0, 1\], but got 0"):
        fbn(tracking=0.0)
    with pytest.raises(ValueError, match="fbn's report must be one of first, pass, all, but got 'last'"):
        fbn(report="last")


def test_a_round_s_path_is_bounded(tiny_clients: Clients) -> None:
    (samples,) = tiny_clients((8,))
    moved = {}
    for path in (0.01, 100.0):
        model = convert(seeded_network("plain", dtype=torch.float64), fbn())
        before = {k: p.detach().clone() for k, p in model.named_parameters()}
        settings = LocalTraining(batch_size=4, steps=3, momentum=0.9, clip="round", clip_limit=path)
        train(model, samples, BATCHES, settings, 5.0, fbn())
        moved[path] = float(torch.cat([(p.detach() - before[k]).flatten() for k, p in model.named_parameters()]).norm())
    assert moved[0.01] < 0.01
    assert moved[100.0] > 1  # control: unbounded, it is far away
    with pytest.raises(ValueError, match="clip='round' needs optimizer='sgd'"):
        LocalTraining(batch_size=4, steps=3, optimizer="adam", clip="round")


def test_a_single_step_s_path_is_bounded_without_momentum(tiny_clients: Clients) -> None:
    """The first step of reset momentum is a plain step; with several steps ``clip_limit`` counts."""
    (samples,) = tiny_clients((8,))
    moved = {}
    for steps, limit in ((1, 0.01), (1, 0.0), (2, 0.01)):
        model = convert(seeded_network("plain", dtype=torch.float64), fbn())
        before = {k: p.detach().clone() for k, p in model.named_parameters()}
        settings = LocalTraining(batch_size=4, steps=2, momentum=0.9, clip="round", clip_limit=100.0, step_clip=limit)
        train(model, samples, BATCHES[:steps], settings, 5.0, fbn())
        moved[steps, limit] = float(torch.cat([(p.detach() - before[k]).flatten() for k, p in model.named_parameters()]).norm())
    assert moved[1, 0.01] == pytest.approx(0.01, rel=1e-5)
    assert moved[1, 0.0] > 1  # control: clip_limit alone
    assert moved[2, 0.01] > 1
    with pytest.raises(ValueError, match="step_clip must be >= 0 and finite, but got -1"):
        LocalTraining(batch_size=4, steps=1, step_clip=-1.0)


LARGE_STEP = {"method": "fbn", "local-steps": 1, "learning-rate": 0.4, "output": ""}


@pytest.mark.parametrize(
    ("keys", "limits"),
    [
        ({}, ("round", STEP)),
        ({"local-steps": 5}, ("round", STEP)),  # in rounds of one step, which a client with one batch has
        ({"method": "hbn"}, ("none", 0.0)),
        ({"method": "hbn", "local-steps": 5}, ("round", 0.0)),
        ({"method": "fedavg"}, ("none", 0.0)),
        ({"fbn-momentum": 0.1}, ("none", 0.0)),  # Algorithm 2 as printed: it starts at a scale of 1
        ({"centre-gradients": "never"}, ("none", 0.0)),  # the same
        ({"update": "gradients"}, ("none", 0.0)),  # the server's step is the centralised one
        ({"clip": "none"}, ("none", 0.0)),
        ({"clip": "norm", "clip-limit": 5.0}, ("norm", 0.0)),
        ({"optimizer": "adam", "momentum": 0.0}, ("none", 0.0)),
    ],
)
def test_which_runs_bound_a_single_step(keys: dict[str, Any], limits: tuple[str, float]) -> None:
    training = RunConfig.from_mapping({**LARGE_STEP, **keys}).local_training()
    assert (training.clip, training.step_clip) == limits


def accuracy(**keys: Any) -> float:
    """Return the accuracy of the last evaluation in a run on digits that takes one large step a round."""
    run_of_digits = {"rounds": 8, "evaluate-every": 2, "partition": "iid", "seed": 1, "batch-size": 32}
    config = RunConfig.from_mapping({**LARGE_STEP, **run_of_digits, **keys})
    found = [math.nan]

    def evaluate(model: nn.Module) -> dict[str, float]:
        metrics = testing.test_metrics(config, model, torch.device("cpu"))
        found.append(metrics["accuracy"])
        return metrics

    strategy = BatchNormStrategy(source_model(config), config.build_method(), config.round_policy(), evaluate=evaluate)
    with suppress(RunFailed):
        strategy.start(InProcessGrid(app, config.clients, config.to_mapping()), num_rounds=config.rounds)
    return found[-1]


def test_one_large_step_a_round_does_not_diverge() -> None:
    """Found by the map of methods: without a bound FBN ends at the accuracy of guessing."""
    assert accuracy() > 0.45
    assert not accuracy(clip="norm", **{"clip-limit": 1e9}) > 0.2  # control: at the same scale, without a bound


def test_federation_bounds_a_single_step_too() -> None:
    federation = Federation(seeded_network("plain"), fbn(), [[(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3]))]] * 2, progress=False)
    assert {own.settings.step_clip for own in federation._transport.clients.own} == {STEP}
    plain = Federation(seeded_network("plain"), hbn(), [[(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3]))]] * 2, progress=False)
    assert {own.settings.step_clip for own in plain._transport.clients.own} == {0.0}  # control
