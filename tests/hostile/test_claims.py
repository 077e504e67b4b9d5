"""What a client claims of its counts, steps and numbers: no more than it can have; and under a defence it has no weight at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord

from fl_bn.exchange import Session
from fl_bn.exchange.call import Join, Local, Quantity, Request
from fl_bn.exchange.session import Deliver
from fl_bn.flower import BatchNormStrategy, InProcessGrid
from fl_bn.robust import RULES
from tests.hostile import own_app
from tests.hostile.liars import (
    LIAR,
    Defence,
    ExchangeSettings,
    RoundRecord,
    RunConfig,
    SecureAggregation,
    Spoil,
    alters,
    both,
    ending,
    lied,
    nothing,
    people,
    sets,
    silent,
    source_model,
)
from tests.in_process import Run, identical
from tests.kept import Kept
from tests.listed import listed, slow

HUGE, MANY = 2**53, 10**6
OTHERS = [0, 2, 3, 4]
ROBUST = (*[rule for rule in RULES if rule != "mean"], "nnm+median")
MEDIAN = Defence(1, "median", "median")
EXCHANGE = ExchangeSettings("local", "shrink")


def everything(value: float) -> Callable[[str, np.ndarray], np.ndarray]:
    return lambda name, array: np.full_like(array, value)


def counted(value: int) -> Callable[[str, np.ndarray], np.ndarray]:
    return lambda name, array: np.where(array > 0, value, array).astype(array.dtype) if name.endswith("count") else array


# without a defence: what the schema bounds. Its sender alone is left out, by name

IMPOSSIBLE: dict[str, tuple[str, Spoil, str]] = {
    "samples of a batch": ("fbn", sets("train", "metrics", batch=HUGE), "metrics/batch"),
    "samples of a pass": ("hbn", sets("train", "metrics", measured=HUGE), "metrics/measured"),
    "weights": ("fedavg", alters("weights", everything(1e6)), "weights"),
    "a variance of a batch": ("fbn", alters("moments", ending("var", -1e-3)), "moments/"),
    "a running variance": ("fixbn", alters("statistics", ending("running_var", -1e-3)), "statistics/"),
}


@listed("kind", IMPOSSIBLE)
def test_what_no_client_can_have_costs_its_sender_alone(kind: str) -> None:
    name, spoil, word = IMPOSSIBLE[kind]
    ran, without = (lied(lie, name, rounds=2) for lie in (spoil, silent))
    assert all(record.aggregated for record in ran.records)
    assert [c.client for c in ran.records[0].accepted] == OTHERS
    assert word in ran.records[0].clients[LIAR].refused
    assert identical(ran.trajectory[1], without.trajectory[1])


def test_a_plain_mean_believes_a_finite_number() -> None:
    """A count of activations, a control variate, a running mean: docs/security.md says what an undefended mean is open to."""
    for name, spoil in (("fbn", alters("moments", counted(HUGE))), ("fixbn", alters("statistics", ending("mean", -1e6)))):
        assert len(lied(spoil, name, rounds=1).records[0].accepted) == 5


def steps_of(claim: int, clients: int = 3, secure: SecureAggregation | None = None) -> RoundRecord:
    """Run a round of two epochs of the application, in which client 1 says that it took, or plans, ``claim`` local steps."""

    class OneClaims(InProcessGrid):
        def _answer(self, message: Message) -> Message:
            reply = super()._answer(message)
            if message.metadata.dst_node_id == 2 and message.metadata.message_type == "train":
                for record in {"fl-bn/metrics", "fl-bn/plan"} & {*reply.content.metric_records}:
                    reply.content[record] = MetricRecord({**reply.content.metric_records[record], "steps": claim})
            return reply

    config = {"clients": clients, "method": "fedavg", "dataset": "digits-plain", "model": "mlp", "output": "", "batch-size": 64}
    config |= {"local-epochs": 2, "local-steps": 0, "partition": "iid", "calibrate": 0}
    checked, records = RunConfig.from_mapping(config), list[RoundRecord]()
    method, policy = checked.build_method(), checked.round_policy()
    strategy = BatchNormStrategy(source_model(checked), method, policy, callbacks=[Kept(records)], secure=secure)
    strategy.start(OneClaims("fl_bn.apps.client:app", clients, config), num_rounds=1, train_config=ConfigRecord())
    return records[0]


@pytest.mark.parametrize("secure", [None, SecureAggregation()], ids=["plain", "secure"])
def test_nobody_may_claim_more_steps_than_its_samples_make(secure: SecureAggregation | None) -> None:
    """Before, the claim was in the record of a secure round."""
    clients = 3 if secure is None else 4
    honest = steps_of(1, clients, secure).clients[0].steps
    assert honest > 2
    assert steps_of(honest, clients, secure).clients[1].refused == ""
    refused = steps_of(honest + 1, clients, secure).clients[1].refused
    assert refused.startswith("metrics/steps" if secure is None else "plan/steps")


# under a defence


def largest(ran: Run) -> float:
    return max(float(np.abs(array).max()) for array in ran.trajectory[2].values())


def test_under_a_defence_no_count_has_weight_and_the_rule_decides_about_large_weights() -> None:
    claimed, honest, huge = (
        lied(spoil, name, defence=MEDIAN)
        for spoil, name in (
            (alters("moments", counted(HUGE)), "fbn"),
            (nothing, "fbn"),
            (alters("weights", everything(1e6)), "fedavg"),
        )
    )
    assert [len(record.accepted) for ran in (claimed, huge) for record in ran.records] == [5] * 4
    assert identical(claimed.trajectory[2], honest.trajectory[2])
    assert largest(huge) < 100


def without_variance(steps: int | None) -> Spoil:
    """Running variances of 0, after so many steps as the client says; None: as it took."""
    low = alters("statistics", ending("var", 0.0))
    return low if steps is None else both(low, sets("train", "metrics", steps=steps))


def test_a_robust_rule_keeps_the_shared_variance_among_the_honest_whatever_steps_are_claimed() -> None:
    """Control: undefended, the lie shows, whatever the steps. Before, it was refused after 2 steps, and believed after 10**6."""

    def least(defence: Defence, spoil: Spoil) -> float:
        ran = own_app.lied(5, spoil, "fedavg", 1, defence=defence, fraction_evaluate=0)
        assert len(ran.records[0].accepted) == 5
        return float(ran.trajectory[-1]["1.running_var"].min())

    honest = least(MEDIAN, nothing)
    for defence in (MEDIAN, Defence()):
        claimed, told = (least(defence, without_variance(steps)) for steps in (MANY, None))
        assert claimed == told
        assert abs(claimed / honest - 1) < 0.05 if defence.active else claimed < 0.85 * honest


# the exchange of FedTAN

BOASTS = sets("query.hello", "hello", samples=2**50)  # so that no batch is above what it has


def lies(monkeypatch: pytest.MonkeyPatch, batch: int = 0, count: int = 0, size: float = 1.0, of: Quantity | None = None) -> None:
    """In every session ``LIAR`` announces ``batch``, counts ``count`` activations, and sends its values times ``size``."""
    submit = Session.submit

    def lie(self: Session, client: int, request: Request, deliver: Deliver) -> None:
        if client == LIAR and isinstance(request, Join) and batch:
            request = Join(batch)
        elif client == LIAR and isinstance(request, Local) and of in (None, request.key.quantity):
            request = replace(request, count=count or request.count, values=request.values * size)
        submit(self, client, request, deliver)

    monkeypatch.setattr(Session, "submit", lie)


def fedtan(spoil: Spoil = nothing, policy: str = "shrink", rule: str = "", clients: int = 5, carrier: str = "local", **chosen: Any) -> Run:
    rules = {"exchange": ExchangeSettings(carrier, policy)}
    defence = Defence(1, rule, rule) if rule else Defence()
    return lied(spoil, "fedtan", people(clients), policy=rules, defence=defence, may_fail=policy == "abort", chosen=chosen)


@cache
def honest_run(rule: str) -> Run:
    return fedtan(rule=rule)


@pytest.mark.sample(3)
@pytest.mark.parametrize("policy", ["abort", "shrink"])
@pytest.mark.parametrize("carrier", ["local", slow("replay")])
@pytest.mark.parametrize("rule", ["", "nnm+median"])
def test_a_batch_above_a_client_s_own_samples_is_refused_by_name(
    rule: str, carrier: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = honest_run(rule)
    lies(monkeypatch, batch=HUGE)
    ran = fedtan(policy=policy, rule=rule, carrier=carrier)
    for record in ran.records:
        assert str(HUGE) in record.clients[LIAR].refused
        assert record.aggregated == (policy == "shrink")
    if policy == "shrink":
        assert largest(ran) < 2 * largest(alone)


@pytest.mark.sample("[mean", "[median", "[krum", "[nnm+median")
@pytest.mark.parametrize("policy", [slow("abort"), "shrink"])
@pytest.mark.parametrize("rule", ["mean", *ROBUST])
def test_under_a_defence_claims_change_no_bit(rule: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with whatever values, the model stays within the honest range."""
    alone = honest_run(rule)
    lies(monkeypatch, batch=HUGE // 8, count=HUGE // 8)
    claimed = fedtan(BOASTS, policy, rule)
    assert all(len(record.accepted) == 5 for record in claimed.records)
    assert identical(claimed.trajectory[2], alone.trajectory[2])
    if rule == "mean":  # control: undefended, a client that also boasts of its samples is believed, as weighting by batches means
        assert not identical(fedtan(BOASTS, policy).trajectory[2], honest_run("").trajectory[2])
    else:
        monkeypatch.undo()
        lies(monkeypatch, batch=HUGE // 8, count=1, size=1e9)
        lied_to = fedtan(BOASTS, policy, rule)
        assert all(record.aggregated for record in lied_to.records)
        assert largest(lied_to) < 2 * largest(alone)


@pytest.mark.parametrize("policy", ["abort", "shrink"])
def test_who_is_left_out_after_an_exchange_was_part_of_its_step(policy: str) -> None:
    """So the round counts only where the step may do without it."""
    for record in fedtan(sets("train", "metrics", steps=float("inf")), policy).records:
        assert record.aggregated == (policy == "shrink")
        assert record.clients[LIAR].refused
