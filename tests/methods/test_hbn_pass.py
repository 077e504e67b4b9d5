"""How many samples HBN's pass before training takes: by default as many as the client trains on, and the same in every engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fl_bn import local_round, server_state
from fl_bn.conversion import convert
from fl_bn.federation.client_round import client_round
from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.sources import SampleSource, alone
from fl_bn.methods import METHODS, StatisticsPass
from fl_bn.secure.settings import SecureAggregation
from tests.in_process import run
from tests.training.cohorts import as_one_program

N, SPOTS = 200, 36  # samples of the client; values per sample and channel behind the convolution
STEPS = LocalTraining(batch_size=4, steps=2)


def samples(n: int = N) -> Samples:
    rng = torch.Generator().manual_seed(n)
    return Samples(torch.randint(0, 256, (n, 3, 8, 8), generator=rng, dtype=torch.uint8), torch.arange(n) * 3 // n)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


@pytest.mark.parametrize("together", [False, True], ids=["alone", "one program"])
@pytest.mark.parametrize(
    ("settings", "options", "expected"),
    [
        (STEPS, {}, 64),
        (LocalTraining(batch_size=5, steps=20), {}, 100),
        (LocalTraining(batch_size=4, epochs=1), {}, N),
        (LocalTraining(batch_size=4, steps=2, weigh_all=True), {}, N),  # a client that counts for all it has
        (STEPS, {"stat_samples": 0}, N),
        (STEPS, {"stat_samples": 32}, 32),
    ],
    ids=["64 at least", "steps", "epoch", "weights of all", "all", "so many"],
)
def test_it_takes_as_many_as_the_client_trains_on(settings: LocalTraining, options: dict[str, int], expected: int, together: bool) -> None:
    method = METHODS["hbn"](**options)
    round = alone(convert(network(), method), method, settings, 0.1)
    reply, _ = as_one_program([round], [samples()], 0, [0])[0] if together else client_round(round, SampleSource(samples(), 0, 0))
    assert int(reply.sections["moments"]["1.count"]) == expected * SPOTS
    assert reply.metrics["measured"] == expected


def test_they_are_random_ones() -> None:
    """The samples are sorted by class, so the first 64 are of one class alone."""
    method, own = METHODS["hbn"](), samples()
    own.x[: N // 3] = 0
    round = alone(convert(network(), method), method, STEPS, 0.1)
    reply, _ = client_round(round, SampleSource(own, 0, 0))
    first, _ = client_round(alone(convert(network(), method), method, STEPS, 0.1), SampleSource(Samples(own.x[:64], own.y[:64]), 0, 0))
    assert float(reply.sections["moments"]["1.var"].min()) > 10 * float(first.sections["moments"]["1.var"].max())


def test_a_pass_without_training_takes_all() -> None:
    assert StatisticsPass.for_exchange("normalisers", METHODS["hbn"]().statistics_pass.samples).size(N, 8) == N
    assert StatisticsPass.for_exchange("normalisers", 32).size(N, 8) == 32


def test_batches_of_one_s_own_are_all_measured() -> None:
    method = METHODS["hbn"]()
    own = [(torch.randn(25, 3, 8, 8), torch.zeros(25, dtype=torch.long))] * 4
    with local_round(convert(network(), method), method, server_state(network(), method, rounds=2).instruction()) as round:
        round.measure(own)
        assert round.statistics_pass.samples == 100


def test_in_a_secure_run_it_takes_the_same() -> None:
    clients, settings = [samples(n) for n in (70, 90, 150)], LocalTraining(batch_size=4, steps=2)
    plain, secure = (
        run(METHODS["hbn"](), clients, 2, model=network(), settings=settings, secure=how)
        for how in (None, SecureAggregation(quantization_range=24))
    )
    other = run(METHODS["hbn"](stat_samples=0), clients, 2, model=network(), settings=settings)

    def off(a: object, b: object) -> float:
        x, y = a.trajectory[2], b.trajectory[2]  # type: ignore[attr-defined]
        return max(float(abs(x[name].astype("float64") - y[name]).max()) for name in x)

    assert off(plain, secure) < 1e-3
    assert off(plain, secure) < off(plain, other) / 10  # control
