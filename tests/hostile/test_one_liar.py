"""One client says what no client says: it is refused by name, the server lives, and the round goes on without it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from fl_bn.federation.optimizers import server_optimizer
from tests.hostile.liars import LIAR, SecureAggregation, Spoil, alters, ending, lacks, lied, people, sets
from tests.in_process import identical

HELLO = {
    "samples=nan": {"samples": math.nan},
    "client=True": {"client": True},
    "label-counts deep": {"label_counts": "[" * 100_000},
    "no signature": {"signature": None},
    "a long signature": {"signature": "x" * 10_000_000},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", HELLO)
def test_an_introduction_that_no_client_makes_costs_that_client_its_part(case: str, log: pytest.LogCaptureFixture) -> None:
    ran = lied(sets("query.hello", "hello", **HELLO[case]))
    assert [[c.client for c in record.accepted] for record in ran.records] == [[0, 2, 3, 4]] * 2
    (said,) = [message for message in log.messages if "node 2 is refused" in message]
    (field,) = HELLO[case]
    assert f"hello/{field.replace('_', '-')}" in said
    assert len(said) < 1000
    assert identical(ran.trajectory[2], without_the_liar())


@cache
def without_the_liar() -> dict[str, np.ndarray]:
    """What the same run ends with where the liar introduces itself not at all."""
    return lied(lacks("query.hello", "hello")).trajectory[2]


# secure aggregation

SECURE: dict[str, tuple[Spoil, str]] = {
    "setup without pk1": (sets("train setup", "secaggplus_configs", pk1=None), "secaggplus_configs/pk1: "),
    "pk2 no key": (sets("train setup", "secaggplus_configs", pk2=b"no key at all"), "secaggplus_configs/pk2: "),
    "plan of text": (sets("train setup", "plan", samples=2.5), "plan/samples: "),
    "no plan": (lacks("train setup", "plan"), "plan: "),
    "hashes of a round to come": (
        sets("train setup", "told", **{"secagg-rounds": [2], "secagg-told": b"x" * 32}),
        "told/secagg-rounds: ",
    ),
    "hashes of no round": (sets("train setup", "told", **{"secagg-told": b"x" * 32}), "told/secagg-told: "),
    "keys without dsts": (sets("train share_keys", "secaggplus_configs", dsts=None), "secaggplus_configs/dsts: "),
    "dsts of text": (sets("train share_keys", "secaggplus_configs", dsts=["a", "b"]), "secaggplus_configs/dsts: "),
    "dsts of a stranger": (sets("train share_keys", "secaggplus_configs", dsts=[1, 3, 4, 999]), "secaggplus_configs/dsts: "),
    "no masked vector": (
        sets("train collect_masked_vectors", "secaggplus_configs", masked_params=[b"no array", b"at all"]),
        "secaggplus_configs/masked_params: ",
    ),
    "collect without activations": (lacks("train collect_masked_vectors", "fitres.metrics"), "fitres.metrics: "),
    "activations deep": (sets("train collect_masked_vectors", "fitres.metrics", activations="[" * 100_000), "fitres.metrics/activations: "),
    "activations unlike the others'": (
        sets("train collect_masked_vectors", "fitres.metrics", activations='{"1": 63, "5": 64}'),
        "fitres.metrics: ",
    ),
    "nids of a stranger": (sets("train unmask", "secaggplus_configs", nids=[1, 2, 3, 4, 999]), ""),  # its vector is in the sum
}


@pytest.mark.sample("[setup", "[pk2", "[plan", "[dsts of text", "[status code x", "[nids")
@pytest.mark.parametrize("case", SECURE)
def test_in_a_secure_round_too(case: str) -> None:
    spoil, begins = SECURE[case]
    (record,) = lied(spoil, "fbn", secure=SecureAggregation(), rounds=1).records
    assert record.aggregated
    assert not any(c.refused for c in record.clients if c.client != LIAR)
    assert record.clients[LIAR].refused.startswith(begins)


@pytest.mark.parametrize("change", [lambda s: s[:4] + bytes(len(s) - 4), lambda s: bytes(4) + s[4:], lambda s: b"\x01\0\0\0" + s[4:]])
@pytest.mark.parametrize(("kind", "field"), [("train unmask", "shares"), ("train share_keys", "ctxts")])
def test_false_shares_change_nothing(kind: str, field: str, change: Callable[[bytes], bytes]) -> None:
    def spoil(message: Message, asked: str, content: RecordDict) -> None:
        if asked == kind:
            record = content.config_records["secaggplus_configs"]
            record[field] = [change(item) for item in record[field]]

    ran = lied(spoil, "fbn", secure=SecureAggregation(), rounds=1, policy={"max_failed": 2}, may_fail=True)
    assert not ran.records[0].aggregated


# reports and steps that are not finite together


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["fbn", "hbn", "fedavg"])
def test_one_finite_report_does_not_end_an_undefended_run(name: str) -> None:
    section = "statistics" if name == "fedavg" else "moments"
    ran = lied(alters(section, ending("mean", 3e38)), name, rounds=2)
    for record in ran.records:
        assert [c.client for c in record.accepted] == [0, 2, 3, 4]
        assert "mean" in record.clients[LIAR].refused
    assert all(np.isfinite(array).all() for array in ran.trajectory[2].values())


@pytest.mark.parametrize("optimizer", ["fedadam"])
def test_weights_that_overflow_in_the_server_s_step_are_never_stored(optimizer: str) -> None:
    spoil = alters("weights", lambda name, array: np.full_like(array, -3e38))
    ran = lied(spoil, "gn", people(3), rounds=3, optimizer=server_optimizer(optimizer, 20.0))
    assert all(record.aggregated for record in ran.records)
    assert all(np.isfinite(array).all() for array in ran.trajectory[3].values())


@pytest.mark.parametrize("name", ["fbn", "hbn"])
def test_moments_of_one_batch_or_pass_weigh_no_more_than_its_samples(name: str) -> None:
    """Before, they could weigh as much as those of all local steps."""
    for record in lied(sets("train setup", "plan", passes=7), name, secure=SecureAggregation(), rounds=1).records:
        assert record.aggregated
        assert record.clients[LIAR].refused.startswith("plan/passes: ")
