"""A client says what no client says: it is refused by name, the server lives, and the round goes on without it.

A federation has a liar for each lie of a table, and honest clients, whose result is that of a federation without the liars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from flwr.app import Message, RecordDict

from fl_bn.flower import RunFailed
from tests.hostile import own_app
from tests.hostile.liars import Defence, SecureAggregation, Spoil, lacks, lied, people, sets
from tests.in_process import identical

HELLO: dict[str, dict[str, Any]] = {
    "samples=nan": {"samples": math.nan},
    "client=True": {"client": True},
    "label-counts deep": {"label_counts": "[" * 100_000},
    "no signature": {"signature": None},
    "a long signature": {"signature": "x" * 10_000_000},
    "another signature": {"signature": "0" * 16},
    "another version": {"version": "0.0.0"},
}
VOTED: dict[str, dict[str, Any]] = {  # what an own app's nodes agree on
    **{f"clients={number}": {"clients": number} for number in (0, 2, 100, 2**53, 20_000_000)},
    "a client beyond their number": {"client": 99},
}
HONEST = 10


def each(cases: Mapping[str, Any], lie: Callable[[Any], Spoil]) -> dict[int, Spoil]:
    """Return the liars, which come before the honest clients."""
    return {client: lie(case) for client, case in enumerate(cases.values())}


def introduced(fields: dict[str, Any]) -> Spoil:
    return sets("query.hello", "hello", **fields)


def honest_alone(ran: Any, cases: Mapping[str, Any]) -> None:
    count = len(cases)
    assert [[c.client for c in record.accepted] for record in ran.records] == [[*range(count, count + HONEST)]] * len(ran.records)


def test_an_introduction_that_no_client_makes_costs_that_client_its_part(log: pytest.LogCaptureFixture) -> None:
    clients = people(len(HELLO) + HONEST, 3)
    ran = lied(each(HELLO, introduced), clients=clients)
    honest_alone(ran, HELLO)
    for node, fields in enumerate(HELLO.values(), 1):
        (said,) = [message for message in log.messages if f"node {node} is refused" in message]
        assert next(iter(fields)).replace("_", "-") in said
        assert len(said) < 1000
    silent = lied(each(HELLO, lambda _: lacks("query.hello", "hello")), clients=clients)
    assert identical(ran.trajectory[2], silent.trajectory[2])


def test_in_an_app_of_ones_own_no_introduction_decides_for_the_others(log: pytest.LogCaptureFixture) -> None:
    lies = HELLO | VOTED
    ran = own_app.lied(each(lies, introduced), nodes=len(lies) + HONEST, rounds=1)
    honest_alone(ran, lies)
    assert all(any(f"node {node} is refused" in line for line in log.messages) for node in range(1, len(lies) + 1))


def test_where_nodes_do_not_agree_the_server_must_be_told() -> None:
    """Two say 5, two 4, and one 3: nobody can tell who lies. Nor may a run begin whose least number of nodes is all."""
    lies = {client: introduced({"clients": number}) for client, number in {1: 4, 2: 4, 3: 3}.items()}
    with pytest.raises(RunFailed, match=r"\(3, 1\), \(4, 2\), \(5, 2\)"):
        own_app.lied(lies)
    ran = own_app.lied(lies, clients=5)
    assert [[c.client for c in record.accepted] for record in ran.records] == [[0, 4]] * 2
    with pytest.raises(RunFailed):
        own_app.lied({4: introduced({"signature": "0" * 16})}, min_available_nodes=5)


EVALUATED: dict[str, tuple[dict[str, Any], str]] = {
    "accuracy=nan": ({"accuracy": math.nan}, "accuracy"),
    "loss=inf": ({"loss": math.inf}, "loss"),
    "num-examples=-1": ({"num_examples": -1}, "num-examples"),
    "no num-examples": ({"num_examples": None}, "num-examples"),
    "a name of two lines": ({"a\nround 1: all is well": 1.0}, "all is well"),
    "a name with an escape": ({"\x1b[2Ja": 1.0}, "2Ja"),
    "a long name": ({"a" * 10_000: 1.0}, "aaaa"),
    "many names": ({f"m{i}": 1.0 for i in range(2000)}, "1000"),
}


def test_an_evaluation_that_no_client_makes_is_not_counted(log: pytest.LogCaptureFixture) -> None:
    lies = each(EVALUATED, lambda case: sets("evaluate", "metrics", **case[0]))
    nothing = each(EVALUATED, lambda _: sets("evaluate", "metrics", num_examples=0))
    ran, without = (own_app.lied(liars, nodes=len(lies) + HONEST) for liars in (lies, nothing))
    assert len(ran.records[-1].accepted) == len(lies) + HONEST
    assert dict(ran.result.evaluate_metrics_clientapp[2]) == dict(without.result.evaluate_metrics_clientapp[2])
    for client, (_, word) in enumerate(EVALUATED.values()):
        (line,) = [line for line in log.messages if f"client {client}'s evaluation" in line and word in line]  # once, of two evaluations
        assert line.isprintable()
        assert len(line) < 500


def test_under_a_defence_no_client_s_evaluation_weighs_more_than_another() -> None:
    def metrics(samples: int, **options: Any) -> dict[str, Any]:
        lie = sets("evaluate", "metrics", accuracy=1.0, loss=0.0, num_examples=samples)
        return dict(own_app.lied({4: lie}, rounds=1, **options).result.evaluate_metrics_clientapp[1])

    defence = {"defence": Defence(1, "median", "median")}
    assert metrics(2**53, **defence) == metrics(8, **defence)
    assert metrics(2**53) != metrics(8)  # control


SET_UP, COLLECT, COUNTS = "train setup", "train collect_masked_vectors", "fitres.metrics"
SECURE: dict[str, tuple[Spoil, str]] = {
    "setup without pk1": (sets(SET_UP, "secaggplus_configs", pk1=None), "secaggplus_configs/pk1: "),
    "pk2 no key": (sets(SET_UP, "secaggplus_configs", pk2=b"no key at all"), "secaggplus_configs/pk2: "),
    "plan of text": (sets(SET_UP, "plan", samples=2.5), "plan/samples: "),
    "no plan": (lacks(SET_UP, "plan"), "plan: "),
    "more in its batch than its samples": (sets(SET_UP, "plan", passes=7), "plan/passes: "),
    "hashes of a round to come": (sets(SET_UP, "told", **{"secagg-rounds": [2], "secagg-told": b"x" * 32}), "told/secagg-rounds: "),
    "hashes of no round": (sets(SET_UP, "told", **{"secagg-told": b"x" * 32}), "told/secagg-told: "),
    "keys without dsts": (sets("train share_keys", "secaggplus_configs", dsts=None), "secaggplus_configs/dsts: "),
    "dsts of text": (sets("train share_keys", "secaggplus_configs", dsts=["a", "b"]), "secaggplus_configs/dsts: "),
    "dsts of a stranger": (sets("train share_keys", "secaggplus_configs", dsts=[1, 3, 4, 999]), "secaggplus_configs/dsts: "),
    "no masked vector": (sets(COLLECT, "secaggplus_configs", masked_params=[b"no array", b"at all"]), "secaggplus_configs/masked_params: "),
    "collect without activations": (lacks(COLLECT, COUNTS), "fitres.metrics: "),
    "activations deep": (sets(COLLECT, COUNTS, activations="[" * 100_000), "fitres.metrics/activations: "),
    "activations unlike the others'": (sets(COLLECT, COUNTS, activations='{"1": 63, "5": 64}'), "fitres.metrics: "),
    "nids of a stranger": (sets("train unmask", "secaggplus_configs", nids=[1, 2, 3, 4, 999]), ""),  # its vector is in the sum
}


@pytest.mark.slow
def test_in_a_secure_round_too() -> None:
    clients, policy = people(len(SECURE) + HONEST + 4), {"min_replies": 0.3}  # 4 are lost after the threshold is set
    (record,) = lied(each(SECURE, lambda case: case[0]), "fbn", clients, 1, policy=policy, secure=SecureAggregation()).records
    assert record.aggregated
    assert not any(c.refused for c in record.clients[len(SECURE) :])
    wrong = {case: c.refused for (case, (_, begins)), c in zip(SECURE.items(), record.clients, strict=False) if begins not in c.refused}
    assert wrong == {}
    assert all(c.refused or case == "nids of a stranger" for case, c in zip(SECURE, record.clients, strict=False))


@pytest.mark.parametrize("change", [lambda s: s[:4] + bytes(len(s) - 4), lambda s: b"\x01\0\0\0" + s[4:]])
@pytest.mark.parametrize(("kind", "field"), [("train unmask", "shares"), ("train share_keys", "ctxts")])
def test_false_shares_change_nothing(kind: str, field: str, change: Callable[[bytes], bytes]) -> None:
    def spoil(message: Message, asked: str, content: RecordDict) -> None:
        if asked == kind:
            record = content.config_records["secaggplus_configs"]
            record[field] = [change(item) for item in record[field]]

    ran = lied(spoil, "fbn", secure=SecureAggregation(), rounds=1, policy={"max_failed": 2}, may_fail=True)
    assert not ran.records[0].aggregated
