"""Every method through every door: the same federation is asked what is shared, what stays at home, and what it computed.

``Federation`` is the reference; tests/equivalence compares it with the papers' algorithms and with plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fl_bn import Federation, convert
from fl_bn.federation.schema import Locality
from fl_bn.flower import RunFailed
from fl_bn.methods import METHODS, Place, Refresh, Role, StatisticsReport, freeze
from tests.conformance import doors
from tests.conformance.cases import every_method
from tests.conformance.doors import (
    CLIENTS,
    ROUNDS,
    Asked,
    Outcome,
    Tensors,
    application,
    federation,
    flower,
    measured,
    network,
    numpy_client,
    own_loop,
)

EXACT, SINGLE, OTHER_BATCHES = 1e-11, 5e-6, 2e-3
"""Limits of differences: in float64, in float32, and where the application's statistics pass has larger batches than training."""
Door = Callable[..., Outcome]
DOORS: dict[str, tuple[Door, Asked]] = {
    "own loop": (own_loop, Asked("")),
    "flower": (flower, Asked("", passes=True)),
    "numpy client": (numpy_client, Asked("", passes=True)),
    "application": (application, Asked("", passes=True, seeded=True, dtype=torch.float32)),
    "workers": (partial(federation, workers=2), Asked("", passes=True, seeded=True)),
    "vectorised": (partial(federation, engine="vectorised"), Asked("", passes=True, seeded=True)),
}
LOOPS = ["own loop", "flower", pytest.param("numpy client", marks=pytest.mark.slow)]


@cache
def ran(train: Door, asked: Asked) -> Outcome:
    """Run a federation once for all questions."""
    return train(asked)


def outcome(door: str, method_name: str) -> tuple[Outcome, Outcome]:
    """Return the door's outcome and the reference."""
    train, asked = DOORS[door]
    asked = replace(asked, method=method_name)
    return ran(train, asked), ran(federation, asked)


@cache
def role_of(name: str) -> Role:
    """Return the part that a tensor plays, by the kind of its module in the network as it was written."""
    module = network().get_submodule(name.rpartition(".")[0])
    if not isinstance(module, _BatchNorm):
        return Role.WEIGHT
    last = name.rpartition(".")[2]
    return Role.STATISTIC if last in ("running_mean", "running_var") else Role.AFFINE if last in ("weight", "bias") else Role.MIXING


@cache
def places(method_name: str) -> Mapping[str, Place]:
    """Return where each tensor of the converted network lives."""
    method = METHODS[method_name]()
    return Locality.of(convert(network(), method), method).place


def at_home(tensors: Tensors, method_name: str) -> set[str]:
    """Return the names of those ``tensors`` that stay at their client."""
    return {name for name in tensors if places(method_name).get(name) is Place.HOME}


def apart(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> float:
    """Return the largest difference of a tensor that both have."""
    common = found.keys() & wanted.keys()
    assert common
    return max(float((found[name].double() - wanted[name].double()).abs().max()) for name in common)


def without(tensors: Tensors, *roles: Role, names: Collection[str] = ()) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if role_of(name) not in roles and name not in names}


@pytest.mark.parametrize("door", DOORS)
@every_method
def test_it_computes_the_same(method_name: str, door: str) -> None:
    """Clients have unequal numbers of samples and of steps. A loop of one's own does not measure statistics for an evaluation."""
    found, wanted = outcome(door, method_name)
    limit = EXACT if door != "application" else OTHER_BATCHES if METHODS[method_name]().report.name == "PASS" else SINGLE
    left_out = [Role.STATISTIC] if door == "own loop" and METHODS[method_name]().refresh is not Refresh.NOTHING else []
    for one, other in zip(found.clients, wanted.clients, strict=True):
        assert apart(without(one, *left_out), other) < limit
    for one, other in zip(reversed(found.rounds), reversed(wanted.rounds), strict=False):
        sent = without(one, names=at_home(one, method_name))
        assert not sent or apart(without(sent, *left_out), other) < limit
    assert found.cohorts == wanted.cohorts == [[*range(CLIENTS)]] * ROUNDS


@pytest.mark.parametrize("door", LOOPS[:1])
@every_method
def test_control_a_client_that_weighs_another_number_of_samples(method_name: str, door: str) -> None:
    train, asked = DOORS[door]
    method = METHODS[method_name]()
    if method.shares(Role.WEIGHT) and not method.exchanges:  # whose weights are the numbers of samples of the first batch
        wrong = train(replace(asked, method=method_name, equal=True)).clients[0]
        assert not apart(without(wrong, Role.STATISTIC), outcome(door, method_name)[1].clients[0]) < EXACT


@pytest.mark.parametrize("door", LOOPS)
@every_method
def test_what_leaves_a_client(method_name: str, door: str) -> None:
    """Each shared tensor leaves, statistics by themselves or as moments, and nothing that stays at home."""
    method, found = METHODS[method_name](), outcome(door, method_name)[0]
    left = {one.rpartition("/")[2] for one in found.sent}
    reported = {one.removesuffix(".count") for one in left if one.endswith(".count")}
    left = {one for one in left if one.rpartition(".")[0] not in reported or role_of(one) is Role.AFFINE}
    statistics = method.has_statistics and not method.pools and method.refresh is Refresh.NOTHING
    leaving = (Place.SHARED, Place.STATISTIC) if statistics else (Place.SHARED,)
    assert left == {one for one, place in places(method_name).items() if place in leaving}
    assert bool(reported) == method.pools
    assert not any("num_batches" in one for one in left)


@pytest.mark.parametrize("door", DOORS)
@every_method
def test_what_stays_at_home(method_name: str, door: str) -> None:
    """Clients differ in the tensors that they keep, and in no others."""
    first, second = outcome(door, method_name)[0].clients[:2]
    home = at_home(second, method_name)
    for one in first:
        assert torch.equal(first[one], second[one]) != (one in home) or role_of(one) is Role.MIXING, one


@pytest.mark.parametrize("door", [door for door in DOORS if door != "own loop"])
@every_method
def test_metrics_are_those_of_the_network(method_name: str, door: str) -> None:
    """Loss and accuracy are those that plain torch computes with the final networks."""
    method, (found, _) = METHODS[method_name](), outcome(door, method_name)
    dtype = DOORS[door][1].dtype
    wanted = []
    for tensors in found.clients if method.personal else found.clients[:1]:
        model = convert(network(dtype), method)
        model.load_state_dict(tensors, strict=False)
        wanted.append(measured(model, doors.held_out(dtype)))
    for metric in ("loss", "accuracy"):
        mean = sum(one[metric] for one in wanted) / len(wanted)
        assert abs(found.metrics[metric] - mean) < (SINGLE if door == "application" else EXACT)
    assert not abs(found.metrics["loss"] - measured(convert(network(dtype), method), doors.held_out(dtype))["loss"]) < EXACT  # control


@pytest.mark.parametrize("door", ["federation", *LOOPS])
@every_method
def test_a_round_of_some_clients(method_name: str, door: str) -> None:
    """The cohorts are the same through every door. Who is not in a round keeps what it has."""
    train, asked = (federation, Asked("")) if door == "federation" else DOORS[door]
    asked = replace(asked, method=method_name, fraction=0.67, rounds=2)
    found, wanted = ran(train, asked), ran(federation, asked)
    assert found.cohorts == wanted.cohorts
    assert [len(cohort) for cohort in found.cohorts] == [2, 2]
    left_out = [Role.STATISTIC] if METHODS[method_name]().refresh is not Refresh.NOTHING else []
    assert all(apart(without(one, *left_out), other) < EXACT for one, other in zip(found.clients, wanted.clients, strict=True))
    assert not apart(without(found.clients[0], Role.STATISTIC), ran(federation, replace(asked, fraction=1.0)).clients[0]) < EXACT  # control


@pytest.mark.parametrize("door", ["federation", *LOOPS])
@every_method
def test_a_reply_that_is_not_finite_is_left_out_by_name(method_name: str, door: str) -> None:
    """The others go on without it, as if it were not in the cohort. An exchange layer by layer ends with the client's name."""
    train, asked = (federation, Asked("")) if door == "federation" else DOORS[door]
    asked, method = replace(asked, method=method_name, broken=1, rounds=2, passes=False), METHODS[method_name]()
    if method.exchanges:
        try:
            said = str(train(asked).refused[0])
        except (RuntimeError, RunFailed) as error:
            said = str(error)
        assert "client 1" in said
        return
    if not method.shares(Role.WEIGHT):
        return
    found = train(asked)
    assert found.cohorts == [[0, 2]] * 2
    assert [[*refused] for refused in found.refused] == [[1]] * 2
    alone = ran(own_loop, replace(asked, broken=None, cohort=(0, 2)))
    tensors = without(found.clients[0], Role.STATISTIC, names=at_home(found.clients[0], method_name))
    assert apart(tensors, alone.clients[0]) < EXACT
    assert not apart(tensors, ran(own_loop, replace(asked, broken=None)).clients[0]) < EXACT  # control


@pytest.mark.parametrize("door", ["federation", "own loop"])
@every_method
def test_a_run_goes_on_from_what_it_saved(method_name: str, door: str) -> None:
    train = federation if door == "federation" else own_loop
    whole, stopped = ran(train, Asked(method_name)), train(Asked(method_name, stop=1))
    assert all(torch.equal(one[key], other[key]) for one, other in zip(whole.clients, stopped.clients, strict=True) for key in one)
    assert all(torch.equal(whole.rounds[-1][key], stopped.rounds[-1][key]) for key in whole.rounds[-1])
    first = ran(federation, Asked(method_name, rounds=1))
    assert not apart(whole.clients[0], first.clients[0]) < EXACT  # control: rounds after the first change it


@pytest.mark.parametrize("door", ["federation", *LOOPS])
@every_method
def test_frozen_statistics_do_not_change_by_a_bit(method_name: str, door: str) -> None:
    """From the freeze on, statistics are as they were, at the server and at clients that keep them, and the weights go on."""
    method = METHODS[method_name]()
    train, asked = (federation, Asked("")) if door == "federation" else DOORS[door]
    try:
        frozen = freeze(method, 1)
    except ValueError:  # it has no statistics in training
        assert not method.has_statistics or method.report is StatisticsReport.NOTHING
        return
    if method.refresh is not Refresh.NOTHING:  # whose evaluation measures them again
        return
    before, after = (train(replace(asked, method=method_name, frozen=frozen, rounds=rounds)) for rounds in (2, 3))
    for one, other in zip(before.clients, after.clients, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one if role_of(key) is Role.STATISTIC)
        assert not any(torch.equal(one[key], other[key]) for key in one if role_of(key) in (Role.WEIGHT, Role.AFFINE))
    plain = ran(federation, replace(asked, method=method_name)) if method.phase(ROUNDS, ROUNDS).value != "frozen" else None
    assert plain is None or apart(plain.clients[0], after.clients[0]) > EXACT  # control


@every_method
def test_statistics_are_those_of_the_union_where_the_method_says_so(method_name: str) -> None:
    """The first layer's statistics do not depend on how the data are divided. FedAvg and its like are the control.

    A first layer that stays at home is left out, since what it makes of the data depends on how they are divided.
    """
    method = METHODS[method_name]()

    def first_layer(sizes: tuple[tuple[int, ...], ...]) -> Tensors:
        x, y = (torch.cat(parts) for parts in zip(*map(doors.data, range(CLIENTS)), strict=True))
        loaders = [[pair] for pair in zip(x.split([sum(one) for one in sizes]), y.split([sum(one) for one in sizes]), strict=True)]
        fed = Federation(network(), method, loaders, calibrate=0, unit_scale=False, clip="none")
        next(fed.run(2))  # of one round, FixBN's statistics are frozen from the start
        state = fed.model.state_dict()
        return {key: state[key] for key in state if key in ("1.running_mean", "1.running_var")}

    if not method.has_statistics or places(method_name).get("1.running_mean") is not Place.STATISTIC or method.refresh is Refresh.EXACT:
        return
    divided = apart(first_layer(doors.SIZES), first_layer(((5,), (5, 5), (6,))))
    if method.refresh is Refresh.NOTHING:
        assert (divided < EXACT) == (method.pools or method.exchanges)


@every_method
def test_a_secure_sum_is_the_plain_one(method_name: str) -> None:
    """Up to the bound of its fixed-point numbers; the application alone sums securely."""
    method = METHODS[method_name]()
    asked = Asked(method_name, passes=True, seeded=True, dtype=torch.float32)
    if method.exchanges or not method.shares(Role.WEIGHT):
        return
    plain, secure = outcome("application", method_name)[0], application(asked, **{"secure-aggregation": True})
    assert apart(secure.clients[0], plain.clients[0]) < 1e-3
    assert apart(secure.clients[0], plain.clients[0]) > 0  # control: something else was computed
