"""Whole runs with Byzantine clients: the same bits twice, nothing new without them, and the exchanges defended like the rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fl_bn.flower import FBN, Rounds
from fl_bn.methods import METHODS, attacked, hbn
from fl_bn.robust.attacks import ATTACKS
from tests.federation import random_samples
from tests.flower.byzantine import Tensors, both, equal_clients, lie
from tests.flower.inside import Defence, ExchangeSettings, Samples
from tests.in_process import FULL_BATCH, WatchedGrid, arrays_of, client_app, identical, run
from tests.listed import listed
from tests.networks import seeded_network

N, F = 5, 1
FAR_AWAY = lie(lambda mean: mean + 1e3, lambda var: var * 1e3)


@pytest.fixture(scope="module")
def clients() -> list[Samples]:
    return equal_clients(N, samples=4)


def statistics(tensors: Tensors) -> Tensors:
    return {name: array for name, array in tensors.items() if "running_" in name}


def away(tensors: Tensors, others: Tensors) -> float:
    return max(float(np.abs(tensors[k] - others[k]).max()) for k in others)


# The same bits


@pytest.mark.parametrize(("name", "attack"), [("fedavg", "alie-optimised"), ("fbn", "foe-optimised"), ("hbn", "gaussian")])
def test_an_attacked_run_is_made_of_the_same_bits_again_in_whatever_order_replies_come(
    name: str, attack: str, clients: list[Samples]
) -> None:
    method = attacked(METHODS[name](), attack, F)
    first, second = (
        run(method, clients, 2, grid=WatchedGrid(client_app(method, clients), N, shuffle), defence=both(F, "nnm+median"))
        for shuffle in (1, 2)
    )
    assert all(identical(first.trajectory[round], second.trajectory[round]) for round in (1, 2))
    assert [[c.distance for c in r.clients] for r in first.records] == [[c.distance for c in r.clients] for r in second.records]
    honest = run(METHODS[name](), clients, 2, defence=both(F, "nnm+median"))
    assert not identical(first.trajectory[1], honest.trajectory[1])  # control


@listed("name", ["fedavg", "fbn", "fedbn"])
def test_the_default_defence_changes_no_bit(name: str, tiny_clients: Callable[..., list[Samples]]) -> None:
    unequal = tiny_clients((3, 7, 5))
    plain, defended = (run(METHODS[name](), unequal, 2, **options) for options in ({}, {"defence": Defence(0, "mean", "mean")}))
    assert all(identical(plain.trajectory[round], defended.trajectory[round]) for round in (1, 2))
    assert all(np.isnan(c.distance) for record in defended.records for c in record.clients)
    active = run(METHODS[name](), unequal, 2, defence=Defence(1))  # control: told of one, it weighs all alike
    assert not identical(plain.trajectory[2], active.trajectory[2])


# Methods with an exchange


@pytest.mark.parametrize("attack", ATTACKS)
def test_every_attack_can_be_made_on_fedtan(attack: str, clients: list[Samples]) -> None:
    shrink = {"exchange": ExchangeSettings("auto", "shrink")}
    lied = run(attacked(METHODS["fedtan"](), attack, F), clients, 1, policy=shrink, defence=both(F, "nnm+median"))
    assert [record.aggregated for record in lied.records] == [True]
    assert {c.client for c in lied.records[0].clients if c.refused} <= {N - 1}
    assert all(np.isfinite(array).all() for array in lied.trajectory[1].values())


def test_under_abort_a_liar_who_is_refused_fails_the_round_of_an_exchange(clients: list[Samples]) -> None:
    lied = run(attacked(METHODS["fedtan"](), "nan", F), clients, 1, defence=both(F, "nnm+median"), may_fail=True)
    assert [record.aggregated for record in lied.records] == [False]
    assert all("client 4" in c.refused for c in lied.records[0].clients)
    assert run(attacked(METHODS["fedtan"](), "sign-flip", F), clients, 1, defence=both(F, "nnm+median")).records[0].aggregated  # control


@listed("lam", [0.01, 1.0], ids=["hybrid", "exact"])
def test_the_exchange_before_an_evaluation_is_defended(lam: float, clients: list[Samples]) -> None:
    """As is calibration. The weights are left alone, so what is measured under them can be compared."""
    method = attacked(hbn(lam), FAR_AWAY, F, "statistics")
    honest = run(hbn(lam), clients, 1, defence=Defence(F)).trajectory[1]
    robust, plain = (run(method, clients, 1, policy={"calibrate": 1}, defence=Defence(F, rule)) for rule in ("nnm+median", "mean"))
    ended = robust.trajectory[1]
    assert away(statistics(plain.trajectory[1]), statistics(honest)) > 100
    assert away(statistics(ended), statistics(honest)) < 1
    assert all((array > 0).all() for name, array in ended.items() if name.endswith("running_var"))
    assert np.abs(robust.grid.train(1)[0]["statistics"]["1.running_mean"]).max() < 10
    assert np.abs(plain.grid.train(1)[0]["statistics"]["1.running_mean"]).max() > 100


def test_too_few_statistics_leave_those_of_the_round(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    def disturb(client: int, what: str) -> None:
        if client == 0 and what.startswith("measure"):
            raise OSError("the disk is full")

    few = run(hbn(), clients, 1, grid=WatchedGrid(client_app(hbn(), clients, disturb=disturb), N), defence=Defence(1, "krum"))
    assert "f=1 Byzantine clients among at least 5, but got n=4" in log.text
    assert few.records[0].aggregated
    enough = run(hbn(), clients, 1, defence=Defence(1, "krum"))
    assert not identical(statistics(few.trajectory[1]), statistics(enough.trajectory[1]))
    liar_gone = run(attacked(hbn(), "nan", 1, "statistics"), clients, 1, defence=Defence(1, "krum"))  # control: one less to be afraid of
    assert liar_gone.records[0].aggregated
    assert log.text.count("but got n=4") == 1


def test_cohorts_with_and_without_attackers(clients: list[Samples]) -> None:
    method = attacked(METHODS["fbn"](), "foe", F, strength=30.0)
    ran = run(method, clients, 6, policy={"fraction": 0.6}, defence=both(F, "median"))
    attackers = [any(c.client == N - 1 for c in record.clients) for record in ran.records]
    assert any(attackers)
    assert not all(attackers)
    assert all(record.aggregated for record in ran.records)
    assert [record.far == [N - 1] for record in ran.records] == attackers
    assert all(np.isfinite(array).all() for array in ran.trajectory[6].values())


def test_flipped_signs_of_updates_that_are_alike_are_far() -> None:
    """Clients differ in one of twelve images. The control mimics an honest one."""
    common, *own = (random_samples(12, seed=1 + i) for i in range(8))
    for samples in own:
        samples.x[1:], samples.y[1:] = common.x[1:], common.y[1:]
    for attack, far in (("sign-flip", [5, 6]), ("mimic", [])):
        method = attacked(METHODS["fbn"](), attack, 2)
        ran = run(method, own, 1, settings=FULL_BATCH, model=seeded_network("plain"), defence=both(2, "nnm+median"))
        assert ran.records[0].far == far


# The strategy by name


def test_fbn_by_name_with_rules_is_fbn_with_the_rules(clients: list[Samples]) -> None:
    def end(**options: Any) -> Tensors:
        strategy = FBN(seeded_network("cnn"), rounds, **options)
        return arrays_of(strategy.start(WatchedGrid(client_app(METHODS["fbn"](), clients), N), num_rounds=2).arrays)

    rounds = Rounds(N, wait=0.0)
    as_rounds = {"calibrate": rounds.calibrate, "unit_scale": rounds.unit_scale, "rate": rounds.rate}
    ends = end(defence=both(F, "nnm+median"))
    assert identical(ends, run(METHODS["fbn"](), clients, 2, policy=as_rounds, defence=both(F, "nnm+median")).trajectory[2])
    assert not identical(ends, end())  # control
