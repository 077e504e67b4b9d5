"""FedTAN's first local step equals one step of plain torch on the union of the batches. Controls: every tempting shortcut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fl_bn.exchange.call import Answer, Key, Quantity
from fl_bn.federation.aggregation import average
from fl_bn.federation.local import Samples
from fl_bn.methods import METHODS
from fl_bn.methods.fedtan import SCHEDULES
from tests.federation import largest_deviation, union
from tests.methods.centralised import batch_of, centralised, make_sgd, rough_network
from tests.methods.cohort import CARRIERS, Cohort, step

SIZES, EXACT, WRONG = (3, 7, 5), 1e-10, 1e-3
NETWORKS = ("resnet", "plain")
FEDTAN = METHODS["fedtan"]
Clients = Callable[..., list[Samples]]


def reference(clients: list[Samples], network: str = "resnet") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters, and running statistics, of the centralised step."""
    want = centralised(rough_network(network), *batch_of(union(clients)))
    statistics = {key: tensor for key, tensor in want.items() if "running" in key}
    return {key: tensor for key, tensor in want.items() if key not in statistics}, statistics


def off(cohort: Cohort, clients: list[Samples], network: str = "resnet") -> tuple[float, float]:
    """Largest deviation of the clients' mean from the centralised parameters, and of any client's running statistics."""
    parameters, statistics = reference(clients, network)
    worst = max(largest_deviation(model.state_dict(), statistics) for model in cohort.models)
    return largest_deviation(cohort.mean([len(client) for client in clients]), parameters), worst


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_first_step_is_the_centralised_one(network: str, schedule: str, carrier: str, tiny_clients: Clients) -> None:
    clients = tiny_clients(SIZES)
    assert max(off(step(rough_network(network), FEDTAN(schedule), clients, carrier), clients, network)) < EXACT


def test_the_schedules_agree_and_differ_in_the_number_of_exchanges(tiny_clients: Clients) -> None:
    clients, depth = tiny_clients(SIZES), 5
    merged, paper = (step(rough_network(), FEDTAN(schedule), clients) for schedule in ("merged", "paper"))
    for ours, theirs in zip(merged.models, paper.models, strict=True):
        assert largest_deviation(ours.state_dict(), theirs.state_dict()) < 1e-12
    assert (merged.session.exchanges, paper.session.exchanges) == (2 * depth, 3 * depth)
    assert not largest_deviation(merged.models[0].state_dict(), paper.models[1].state_dict()) < WRONG  # control: clients differ


def test_only_the_mean_of_the_clients_is_centralised(tiny_clients: Clients) -> None:
    clients = tiny_clients(SIZES)
    parameters, _ = reference(clients)
    cohort = step(rough_network(), FEDTAN(), clients)
    for model in cohort.models:
        assert not largest_deviation(model.state_dict(), parameters) < WRONG
    assert not largest_deviation(cohort.mean([1, 1, 1]), parameters) < WRONG
    first, *others = (model.state_dict() for model in cohort.models)
    for other in others:
        assert all(torch.equal(first[key], other[key]) for key in first if "running" in key)


def divided_by_all(key: Key, p: float, s: float, answer: Answer) -> Answer:
    """The bracket of the backward pass divided by M instead of m_i."""
    return replace(answer, values=answer.values * s) if key.quantity is Quantity.GRADIENTS else answer


def of_huge_batches(key: Key, p: float, s: float, answer: Answer) -> Answer:
    """The same weights, and a Bessel factor of 1."""
    return replace(answer, count=answer.count * 10**9, batch=answer.batch * 10**9)


def uniform(values: Tensor, counts: Tensor) -> Tensor:
    return values.mean(0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(
    "wrong",
    [{"mean": uniform, "announced": [5, 5, 5]}, {"announced": [5, 5, 5]}, {"alter": divided_by_all}],
    ids=["uniform", "equal-batches-announced", "divided-by-all"],
)
def test_control_wrong_weights(wrong: dict, carrier: str, schedule: str, tiny_clients: Clients) -> None:
    clients = tiny_clients(SIZES)
    assert not off(step(rough_network(), FEDTAN(schedule), clients, carrier, **wrong), clients)[0] < WRONG


def test_uniform_weights_are_right_for_equal_batches(tiny_clients: Clients) -> None:
    clients = tiny_clients((5, 5, 5))
    assert max(off(step(rough_network(), FEDTAN(), clients, mean=uniform), clients)) < EXACT


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_control_forward_exchanges_alone(schedule: str, tiny_clients: Clients) -> None:
    """FedAvg with Algorithm 2: the statistics of the union, but not its gradient."""
    clients = tiny_clients(SIZES)
    cohort = step(rough_network(), METHODS["fedavg-alg2"](schedule), clients)
    parameters, statistics = off(cohort, clients)
    assert statistics < EXACT
    assert not parameters < WRONG
    assert cohort.session.exchanges == 5 * {"merged": 1, "paper": 2}[schedule]


def test_control_no_exchange(tiny_clients: Clients) -> None:
    """FedAvg with BatchNorm."""
    clients, states = tiny_clients(SIZES), []
    for client in clients:
        model = copy.deepcopy(rough_network()).train()
        optimizer = make_sgd(model)
        x, y = batch_of(client)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        states.append(model.state_dict())
    mean = average(states, SIZES)
    for want in reference(clients):
        assert not largest_deviation(mean, want) < WRONG


def test_control_running_variances_without_bessels_factor(tiny_clients: Clients) -> None:
    clients = tiny_clients((1, 2, 1))  # few values per channel, so that the factor is far from 1
    cohort = step(rough_network(), FEDTAN(), clients, alter=of_huge_batches)
    parameters, statistics = reference(clients)
    assert largest_deviation(cohort.mean([1, 2, 1]), parameters) < EXACT
    state = cohort.models[0].state_dict()
    variances = {key: tensor for key, tensor in statistics.items() if key.endswith("var")}
    assert largest_deviation(state, {key: statistics[key] for key in statistics if key not in variances}) < EXACT
    assert not largest_deviation(state, variances) < WRONG
    assert all(not largest_deviation(state, {key: variances[key]}) < EXACT for key in variances)
    assert max(off(step(rough_network(), FEDTAN(), clients), clients)) < EXACT
