"""What a client claims of its counts, steps and numbers: no more than it can have; and under a defence it has no weight at all."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.aggregation import Defence
from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import METHODS
from fl_bn.secure.settings import SecureAggregation
from tests.hostile.liars import LIAR, Spoil, alters, ending, lied, nothing, people, sets, silent
from tests.in_process import FULL_BATCH, Run, identical, run
from tests.listed import listed
from tests.networks import seeded_network

HUGE = 2**53
OTHERS = [0, 2, 3, 4]
MEDIAN = Defence(1, "median", "median")


def everything(value: float) -> Callable[[str, np.ndarray], np.ndarray]:
    return lambda name, array: np.full_like(array, value)


def counted(value: int) -> Callable[[str, np.ndarray], np.ndarray]:
    return lambda name, array: np.where(array > 0, value, array).astype(array.dtype) if name.endswith("count") else array


def largest(ran: Run) -> float:
    return max(float(np.abs(array).max()) for array in ran.trajectory[2].values())


# without a defence: what the schema bounds. Its sender alone is left out, by name

IMPOSSIBLE: dict[str, tuple[str, Spoil, str]] = {
    "samples of a batch": ("fbn", sets("train", "metrics", batch=HUGE), "metrics/batch"),
    "samples of a pass": ("hbn", sets("train", "metrics", measured=HUGE), "metrics/measured"),
    "weights": ("fedavg", alters("weights", everything(1e6)), "weights"),
    "negative weights": ("fedavg", alters("weights", everything(-1e6)), "weights"),
    "a mean of a batch": ("fbn", alters("moments", ending("mean", 3e38)), "mean"),
    "a mean of a pass": ("hbn", alters("moments", ending("mean", 3e38)), "mean"),
    "a running mean": ("fedavg", alters("statistics", ending("mean", 3e38)), "mean"),
    "a variance of a batch": ("fbn", alters("moments", ending("var", -1e-3)), "moments/"),
    "a running variance": ("fixbn", alters("statistics", ending("running_var", -1e-3)), "statistics/"),
}


@cache
def without_the_liar(name: str) -> Run:
    return lied(silent, name)


@listed("kind", IMPOSSIBLE)
def test_what_no_client_can_have_costs_its_sender_alone(kind: str) -> None:
    name, spoil, word = IMPOSSIBLE[kind]
    ran = lied(spoil, name)
    assert all(record.aggregated for record in ran.records)
    assert [c.client for c in ran.records[0].accepted] == OTHERS
    assert word in ran.records[0].clients[LIAR].refused
    assert identical(ran.trajectory[1], without_the_liar(name).trajectory[1])


EPOCHS = LocalTraining(batch_size=2, epochs=2)


@pytest.mark.parametrize("secure", [None, SecureAggregation()], ids=["plain", "secure"])
def test_nobody_may_claim_more_steps_than_its_samples_make(secure: SecureAggregation | None) -> None:
    """Three batches of six samples in each of two epochs are six steps."""
    kind, record = ("train", "metrics") if secure is None else ("train setup", "plan")
    for steps, refused in ((6, ""), (7, f"{record}/steps")):
        policy = {"planned_steps": EPOCHS.most_steps}
        ran = lied(sets(kind, record, steps=steps), "fedavg", rounds=1, settings=EPOCHS, policy=policy, secure=secure)
        assert ran.records[0].clients[LIAR].refused.startswith(refused)
        assert bool(ran.records[0].clients[LIAR].refused) == bool(refused)


def test_under_a_defence_no_count_has_weight_and_the_rule_decides_about_large_weights() -> None:
    lies = {"counts": ("fbn", alters("moments", counted(HUGE))), "none": ("fbn", nothing)}
    lies["huge"] = ("fedavg", alters("weights", everything(1e6)))
    ran = {lie: lied(spoil, name, defence=MEDIAN) for lie, (name, spoil) in lies.items()}
    assert [len(record.accepted) for lie in lies for record in ran[lie].records] == [5] * 6
    assert identical(ran["counts"].trajectory[2], ran["none"].trajectory[2])
    assert largest(ran["huge"]) < 100


def exchanged(spoil: Spoil, policy: str) -> Run:
    """Run FedTAN with batches of all samples."""
    rules = {"exchange": ExchangeSettings("local", policy)}
    return lied(spoil, "fedtan", settings=FULL_BATCH, policy=rules, may_fail=policy == "abort")


@listed("policy", ["abort", "shrink"])
def test_a_batch_above_a_client_s_own_samples_is_refused_by_name(policy: str) -> None:
    """Six samples, of which it told the server one."""
    for record in exchanged(sets("query.hello", "hello", samples=1), policy).records:
        assert "expected a batch of 0 to 1 samples, but got 6" in record.clients[LIAR].refused
        assert record.aggregated == (policy == "shrink")


@listed("rule", ["krum", "nnm+median"])
def test_under_a_defence_a_client_of_many_samples_has_no_more_weight(rule: str) -> None:
    """It has each of its samples ten times. Control: undefended, such a client is believed."""
    many = people()
    many[LIAR] = Samples(many[LIAR].x.repeat(10, 1, 1, 1), many[LIAR].y.repeat(10))
    policy, model = {"exchange": ExchangeSettings("local")}, seeded_network("plain")

    def moves(rule: str) -> float:
        how = {"settings": FULL_BATCH, "policy": policy, "model": model, "defence": Defence(1, rule, rule) if rule else Defence()}
        one, other = (run(METHODS["fedtan"](), clients, 2, **how).trajectory[2] for clients in (people(), many))
        return max(float(np.abs(one[name] - other[name]).max()) for name in one)

    assert moves(rule) < 1e-4
    assert moves("") > 1e-3


@listed("policy", ["abort", "shrink"])
def test_who_is_left_out_after_an_exchange_was_part_of_its_step(policy: str) -> None:
    """So the round counts only where the step may do without it."""
    for record in exchanged(sets("train", "metrics", steps=float("inf")), policy).records:
        assert record.aggregated == (policy == "shrink")
        assert record.clients[LIAR].refused
