"""What a client claims of its counts, steps and numbers: no more than it can have; and under a defence it has no weight at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from fl_bn.exchange import Session
from fl_bn.exchange.call import Join, Local, Request
from fl_bn.exchange.session import Deliver
from tests.hostile import own_app
from tests.hostile.liars import (
    LIAR,
    Defence,
    ExchangeSettings,
    LocalTraining,
    RunConfig,
    SecureAggregation,
    Spoil,
    alters,
    both,
    ending,
    lied,
    nothing,
    sets,
    silent,
)
from tests.in_process import Run, identical
from tests.listed import listed

HUGE, MANY = 2**53, 10**6
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


def test_a_plain_mean_believes_a_finite_number() -> None:
    """A count of activations, a control variate, a running mean: docs/security.md says what an undefended mean is open to."""
    for name, spoil in (("fbn", alters("moments", counted(HUGE))), ("fixbn", alters("statistics", ending("mean", -1e6)))):
        assert len(lied(spoil, name, rounds=1).records[0].accepted) == 5


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
    config = RunConfig.from_mapping({"clients": 3, "batch-size": 64, "local-epochs": 2, "local-steps": 0})
    assert config.round_policy().most_steps(130) == 6  # the application says so, too


# under a defence


def test_under_a_defence_no_count_has_weight_and_the_rule_decides_about_large_weights() -> None:
    lies = {"counts": ("fbn", alters("moments", counted(HUGE))), "none": ("fbn", nothing)}
    lies["huge"] = ("fedavg", alters("weights", everything(1e6)))
    ran = {lie: lied(spoil, name, defence=MEDIAN) for lie, (name, spoil) in lies.items()}
    assert [len(record.accepted) for lie in lies for record in ran[lie].records] == [5] * 6
    assert identical(ran["counts"].trajectory[2], ran["none"].trajectory[2])
    assert largest(ran["huge"]) < 100


def test_a_robust_rule_keeps_the_shared_variance_among_the_honest_whatever_steps_are_claimed() -> None:
    """Running variances of 0. Control: undefended, the lie shows, whatever the steps."""

    def least(defence: Defence, spoil: Spoil) -> float:
        ran = own_app.lied({4: spoil}, "fedavg", 1, defence=defence, fraction_evaluate=0)
        assert len(ran.records[0].accepted) == 5
        return float(ran.trajectory[-1]["1.running_var"].min())

    low, honest = alters("statistics", ending("var", 0.0)), least(MEDIAN, nothing)
    for defence in (MEDIAN, Defence()):
        claimed, told = least(defence, both(low, sets("train", "metrics", steps=MANY))), least(defence, low)
        assert claimed == told
        assert abs(claimed / honest - 1) < 0.05 if defence.active else claimed < 0.85 * honest


# the exchange of FedTAN

BOASTS = sets("query.hello", "hello", samples=2**50)  # so that no batch is above what it has


@contextmanager
def lying(batch: int = 0, count: int = 0, size: float = 1.0) -> Iterator[None]:
    """In every session ``LIAR`` announces ``batch``, counts ``count`` activations, and sends its values times ``size``."""
    submit = Session.submit

    def lie(self: Session, client: int, request: Request, deliver: Deliver) -> None:
        if client == LIAR and isinstance(request, Join) and batch:
            request = Join(batch)
        elif client == LIAR and isinstance(request, Local):
            request = replace(request, count=count or request.count, values=request.values * size)
        submit(self, client, request, deliver)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Session, "submit", lie)
        yield


def fedtan(spoil: Spoil = nothing, policy: str = "shrink", rule: str = "", carrier: str = "local") -> Run:
    rules, defence = {"exchange": ExchangeSettings(carrier, policy)}, Defence(1, rule, rule) if rule else Defence()
    return lied(spoil, "fedtan", policy=rules, defence=defence, may_fail=policy == "abort")


@listed("policy", ["abort", "shrink"])
@listed(("rule", "carrier"), [("", "local"), ("nnm+median", "replay")])
def test_a_batch_above_a_client_s_own_samples_is_refused_by_name(rule: str, carrier: str, policy: str) -> None:
    with lying(batch=HUGE):
        ran = fedtan(policy=policy, rule=rule, carrier=carrier)
    for record in ran.records:
        assert str(HUGE) in record.clients[LIAR].refused
        assert record.aggregated == (policy == "shrink")
    assert policy == "abort" or largest(ran) < 2 * largest(fedtan(rule=rule))


@listed("rule", ["mean", "krum", "nnm+median"])
def test_under_a_defence_claims_change_no_bit(rule: str) -> None:
    """And with whatever values, the model stays within the honest range."""
    alone = fedtan(rule=rule)
    with lying(batch=HUGE // 8, count=HUGE // 8):
        claimed, undefended = fedtan(BOASTS, rule=rule), fedtan(BOASTS)
    assert all(len(record.accepted) == 5 for record in claimed.records)
    assert identical(claimed.trajectory[2], alone.trajectory[2])
    assert not identical(undefended.trajectory[2], fedtan().trajectory[2])  # control: such a client is believed
    with lying(batch=HUGE // 8, count=1, size=1e9):
        lied_to = fedtan(BOASTS, rule=rule)
    assert all(record.aggregated for record in lied_to.records)
    assert (largest(lied_to) < 2 * largest(alone)) == (rule != "mean")


@pytest.mark.parametrize("policy", ["abort", "shrink"])
def test_who_is_left_out_after_an_exchange_was_part_of_its_step(policy: str) -> None:
    """So the round counts only where the step may do without it."""
    for record in fedtan(sets("train", "metrics", steps=float("inf")), policy).records:
        assert record.aggregated == (policy == "shrink")
        assert record.clients[LIAR].refused
