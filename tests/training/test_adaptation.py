"""Adapting a model to an unseen client: statistics exact to float64, averages averages, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fl_bn import convert
from fl_bn.advise.measure import divergence
from fl_bn.bn.moments import Running
from fl_bn.bn.roles import batch_norms, roles
from fl_bn.data.dataset import to_input
from fl_bn.federation.aggregation import running_statistics
from fl_bn.federation.recalibration import AVERAGE_AFFINE, RECOMPUTE, TEST_BATCH, Adaptation, Known, with_batch_statistics
from fl_bn.federation.schema import Locality
from fl_bn.methods import METHODS, Place, Role
from tests.federation import largest_deviation, random_samples
from tests.listed import listed
from tests.networks import seeded_network
from tests.refusals import naming
from tests.training.test_recalibration import EXACT, off, reference

OWN = random_samples(90, brightness=0.5, seed=7)


def network(seed: int = 1) -> nn.Module:
    return seeded_network("no dropout", seed, torch.float64)


WITH_STATISTICS = [name for name in METHODS if METHODS[name]().shares(Role.WEIGHT) and batch_norms(convert(network(), METHODS[name]()))]


def known(method: str = "fedbn") -> Known:
    """A shared model that is not the initial one, and clients with BatchNorm of their own."""
    chosen = METHODS[method]()
    shared, *own = (convert(network(seed), chosen) for seed in range(2, 6))
    locality = Locality.of(shared, chosen)
    travels = {name: shared.state_dict()[name] for name in locality.names(Place.SHARED, Place.STATISTIC)}
    states = {f"client {i}": {**model.state_dict(), **travels} for i, model in enumerate(own)}
    return Known(travels, states if chosen.personal else {})


def adaptation(method: str = "fedbn") -> Adaptation:
    return Adaptation(network(), METHODS[method](), known(method))


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", [AVERAGE_AFFINE, RECOMPUTE])
@pytest.mark.parametrize("method", WITH_STATISTICS)
def test_statistics_are_those_of_the_clients_own_data_in_every_layer(method: str, how: str) -> None:
    made, half = (adaptation(method).adapt(how, x) for x in (OWN.x, OWN.x[:45]))
    distances, others = (off(running_statistics(model), reference(model, OWN)) for model in (made, half))
    assert len(distances) == 2
    assert max(distances.values()) < EXACT
    assert min(others.values()) > 1e-4  # control: half of the data


def test_the_affine_is_the_clients_average_and_the_weights_are_the_shared_ones() -> None:
    run, role = adaptation(), roles(network())
    affine = [name for name, part in role.items() if part is Role.AFFINE]
    mean = {name: torch.stack([state[name] for state in run.known.clients.values()]).mean(0) for name in affine}
    for how in (AVERAGE_AFFINE, TEST_BATCH):
        state = run.adapt(how, OWN.x).state_dict()
        assert largest_deviation(state, mean) < 1e-15
        assert largest_deviation(state, dict(run.known.shared)) == 0
    own = {name: network().state_dict()[name] for name in affine}
    assert largest_deviation(run.adapt(RECOMPUTE, OWN.x).state_dict(), own) == 0  # which has nobody's affine
    assert largest_deviation(mean, own) > 0.1  # control
    assert largest_deviation(network().state_dict(), dict(run.known.shared)) > 0.01  # control: the run moved the weights


def test_the_distance_is_torchs_divergence_both_ways_and_knows_no_scale(rng: np.random.Generator) -> None:
    mean_a, mean_b, sd_a, sd_b = (torch.from_numpy(rng.uniform(0.5, 2, 5)) for _ in range(4))
    p, q = torch.distributions.Normal(mean_a, sd_a), torch.distributions.Normal(mean_b, sd_b)
    right = sum(float(torch.distributions.kl_divergence(*both).mean()) for both in ((p, q), (q, p)))
    scale = torch.tensor([1e-3, 1, 10, 1e3, 7], dtype=torch.float64)
    for by in (torch.ones(5), scale):
        a, b = Running(by * mean_a, (by * sd_a) ** 2), Running(by * mean_b, (by * sd_b) ** 2)
        assert divergence(a, b) == pytest.approx(right, rel=1e-9)
        assert divergence(a, a) == pytest.approx(0, abs=1e-12)
    assert divergence(Running(mean_a, 0 * sd_a), Running(mean_a, 0 * sd_a), 1e-5) == 0  # dead channels


def test_test_batch_is_the_forward_pass_of_training() -> None:
    model = adaptation().adapt(TEST_BATCH, OWN.x)
    batch = to_input(OWN.x[:32], torch.float64)
    with torch.no_grad():
        found, before = with_batch_statistics(model)(batch), copy.deepcopy(model.state_dict())
        evaluated, trained = model.eval()(batch), copy.deepcopy(model).train()(batch)
    assert float((found - trained).abs().max()) < 1e-12
    assert float((found - evaluated).abs().max()) > 0.01  # control
    assert largest_deviation(model.state_dict(), before) == 0


def given(method: str, known: Known, how: str = RECOMPUTE, samples: int = 90, net: nn.Module | None = None) -> None:
    Adaptation(net or network(), METHODS[method](), known).adapt(how, OWN.x[:samples])


FLAT = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.BatchNorm1d(4))


@listed(
    ("key", "call"),
    [
        ("gn", lambda: given("gn", Known(convert(network(), METHODS["gn"]()).state_dict()))),
        ("affine", lambda: given("fedbn", Known(known().shared), AVERAGE_AFFINE)),
        ("9.weight", lambda: given("fedbn", Known({**known().shared, "9.weight": torch.zeros(24, 4)}))),
        ("client 7", lambda: given("fedbn", Known(known().shared, {"client 7": {}}))),
        ("layer 2", lambda: given("fedavg", Known(FLAT.state_dict()), samples=1, net=FLAT)),  # has no variance
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(key: str, call: Callable[[], None]) -> None:
    with naming(key):
        call()
    given("fedavg", Known(FLAT.state_dict()), samples=2, net=FLAT)  # control
