"""Adapting a model to an unseen client: statistics exact to float64, averages averages, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn import convert
from fl_bn.advise.measure import divergence
from fl_bn.federation.recalibration import (
    AVERAGE_AFFINE,
    HOW,
    RECOMPUTE,
    TEST_BATCH,
    Adaptation,
    Known,
    recompute_statistics,
    with_batch_statistics,
)
from fl_bn.federation.schema import Locality
from fl_bn.methods import METHODS, Place, Role
from tests.federation import largest_deviation, random_samples
from tests.listed import listed
from tests.networks import seeded_network
from tests.refusals import naming
from tests.training.core import Running, batch_norms, roles, running_statistics, to_input
from tests.training.test_recalibration import EXACT, off, reference

OWN = random_samples(90, brightness=0.5, seed=7)


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    return seeded_network("no dropout", 1, dtype)


WITH_STATISTICS = [name for name in METHODS if METHODS[name]().shares(Role.WEIGHT) and batch_norms(convert(network(), METHODS[name]()))]


def known(method: str = "fedbn", dtype: torch.dtype = torch.float64, clients: int = 3) -> Known:
    """A shared model that is not the initial one, and clients with BatchNorm of their own, on ever brighter data."""
    chosen, start = METHODS[method](), network(dtype)
    shared = convert(start, chosen)
    with torch.no_grad():
        for parameter in shared.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3), dtype=dtype))
    locality, states = Locality.of(shared, chosen), {}
    for client in range(clients):
        model = copy.deepcopy(shared)
        for name, tensor in model.state_dict().items():
            if name in locality.names(Place.HOME, of=[Role.AFFINE]):
                tensor.add_(0.2 * (client + 1))
        recompute_statistics(model, random_samples(60, brightness=client / clients, seed=20 + client).x)
        states[f"client {client}"] = model.state_dict()
    travels = {name: shared.state_dict()[name] for name in locality.names(Place.SHARED, Place.STATISTIC)}
    return Known(travels, states if chosen.personal else {})


def adaptation(method: str = "fedbn", dtype: torch.dtype = torch.float64, clients: int = 3) -> Adaptation:
    return Adaptation(network(dtype), METHODS[method](), known(method, dtype, clients))


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", [AVERAGE_AFFINE, RECOMPUTE])
@pytest.mark.parametrize("method", WITH_STATISTICS)
def test_statistics_are_those_of_the_clients_own_data_in_every_layer(method: str, how: str) -> None:
    made, half = (adaptation(method).adapt(how, x) for x in (OWN.x, OWN.x[:45]))
    distances, others = (off(running_statistics(model), reference(model, OWN)) for model in (made, half))
    assert len(distances) == 2
    assert max(distances.values()) < EXACT
    assert min(others.values()) > 1e-4  # control: half of the data


def affine_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    role = roles(network())
    return {name: tensor for name, tensor in state.items() if role.get(name) is Role.AFFINE}


def average_of(clients: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    affine = [affine_of(state) for state in clients]
    return {name: torch.stack([client[name] for client in affine]).mean(0) for name in affine[0]}


def test_the_affine_is_the_clients_average_and_the_weights_are_the_shared_ones() -> None:
    run = adaptation()
    mean = average_of(run.known.clients.values())
    for how in (AVERAGE_AFFINE, TEST_BATCH):
        state = run.adapt(how, OWN.x).state_dict()
        assert largest_deviation(state, mean) < 1e-15
        assert largest_deviation(state, dict(run.known.shared)) == 0
    own = affine_of(network().state_dict())
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


@listed("method", WITH_STATISTICS)
def test_each_method_has_the_ways_that_its_shared_tensors_allow(method: str) -> None:
    """Where the affine is shared, the clients' average is the shared one."""
    run, chosen = adaptation(method, torch.float32), METHODS[method]()
    assert run.before() is not None
    made = {how: run.adapt(how, OWN.x).state_dict() for how in HOW if not run.refusal(how)}
    for state in made.values():
        network(torch.float32).load_state_dict(state, strict=True)
        weights = {name: tensor for name, tensor in run.known.shared.items() if "running" not in name}
        assert largest_deviation(state, weights) == 0 or not chosen.personal
    same = largest_deviation(made[AVERAGE_AFFINE], made[RECOMPUTE])
    assert same == 0 if chosen.shares(Role.AFFINE) and chosen.local_in is None else same > 0.1


def test_the_clients_average_may_be_told_instead() -> None:
    whole = adaptation()
    told = average_of(whole.known.clients.values())
    run = Adaptation(network(), METHODS["fedbn"](), Known(whole.known.shared, average=told))
    assert run.before() is None  # the affine alone was told
    for how in (AVERAGE_AFFINE, RECOMPUTE):
        assert largest_deviation(run.adapt(how, OWN.x).state_dict(), whole.adapt(how, OWN.x).state_dict()) < 1e-12


def given(method: str, known: Known, how: str = RECOMPUTE, samples: int = 90, net: nn.Module | None = None) -> None:
    Adaptation(net or network(), METHODS[method](), known).adapt(how, OWN.x[:samples])


def with_weight(tensor: Tensor | None) -> Known:
    shared = {**known().shared, "9.weight": tensor}
    return Known({key: tensor for key, tensor in shared.items() if tensor is not None})


FLAT = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.BatchNorm1d(4))


def without_statistics(method: str) -> Any:
    return lambda: given(method, Known(convert(network(), METHODS[method]()).state_dict()))


@listed(
    ("key", "call"),
    [
        *[(name, without_statistics(name)) for name in METHODS if name not in WITH_STATISTICS],
        ("affine", lambda: given("fedbn", Known(known().shared), AVERAGE_AFFINE)),
        ("affine", lambda: given("fedbn", Known(known().shared), TEST_BATCH)),
        ("guess", lambda: given("fedbn", known(), "guess")),
        ("9.weight", lambda: given("fedbn", with_weight(None))),
        ("9.weight", lambda: given("fedbn", with_weight(torch.zeros(24, 4)))),
        ("client 7", lambda: given("fedbn", Known(known().shared, {"client 7": {}}))),
        ("layer 2", lambda: given("fedavg", Known(FLAT.state_dict()), samples=1, net=FLAT)),  # has no variance
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(key: str, call: Callable[[], None]) -> None:
    with naming(key):
        call()
    given("fedavg", Known(FLAT.state_dict()), samples=2, net=FLAT)  # control
