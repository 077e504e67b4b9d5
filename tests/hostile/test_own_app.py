"""A Flower app of one's own of which one node lies: it is left out by name, and neither ends the run nor decides for the others."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
from flwr.app import Message, RecordDict

from fl_bn.flower import RunFailed
from tests.doors.doors import apart
from tests.hostile.liars import Defence, nothing, sets
from tests.hostile.own_app import CLIENTS, lied
from tests.listed import slow

NODES = pytest.mark.parametrize("node", [1, 5], ids=["the first", "the last"])
ANY_NODE = pytest.mark.parametrize("node", [5, slow(1)], ids=["the last", "the first"])


def others(node: int) -> list[int]:
    return [client for client in range(CLIENTS) if client != node - 1]


HELLO: dict[str, dict[str, Any]] = {
    "clients=2e7": {"clients": 20_000_000},
    "clients=2**53": {"clients": 2**53},
    "clients=2": {"clients": 2},
    "clients=100": {"clients": 100},
    "clients=0": {"clients": 0},
    "another signature": {"signature": "0" * 16},
    "another version": {"version": "0.0.0"},
    "samples=nan": {"samples": math.nan},
    "client 7 of 5": {"client": 7},
}


@pytest.mark.sample(3)
@ANY_NODE
@pytest.mark.parametrize("case", HELLO)
def test_an_introduction_that_is_unlike_the_others_costs_that_node_its_part(case: str, node: int, log: pytest.LogCaptureFixture) -> None:
    ran = lied(node, sets("query.hello", "hello", **HELLO[case]))
    assert [[c.client for c in record.accepted] for record in ran.records] == [others(node)] * 2
    assert any(f"node {node} is refused" in line for line in log.messages)


def test_where_nodes_do_not_agree_the_server_must_be_told() -> None:
    """Two say 5, two 4, and one 3: nobody can tell who lies."""

    def spoil(message: Message, asked: str, content: RecordDict) -> None:
        sets("query.hello", "hello", clients={2: 4, 3: 4, 4: 3}[message.metadata.dst_node_id])(message, asked, content)

    with pytest.raises(RunFailed, match=r"\(3, 1\), \(4, 2\), \(5, 2\)"):
        lied([2, 3, 4], spoil)
    ran = lied([2, 3, 4], spoil, clients=CLIENTS)
    assert [[c.client for c in record.accepted] for record in ran.records] == [[0, 4]] * 2


@pytest.mark.parametrize("node", [5])
def test_a_run_whose_least_number_of_nodes_is_all_fails_with_the_reason(node: int) -> None:
    with pytest.raises(RunFailed):
        lied(node, sets("query.hello", "hello", signature="0" * 16), min_available_nodes=CLIENTS)


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


@cache
def without_the_node(node: int) -> dict[str, Any]:
    """What the others' evaluations give where the node has nothing to evaluate on."""
    return dict(lied(node, sets("evaluate", "metrics", num_examples=0)).result.evaluate_metrics_clientapp[2])


@pytest.mark.sample("[accuracy", "[no num", "[a long")
@ANY_NODE
@pytest.mark.parametrize("case", EVALUATED)
def test_an_evaluation_that_no_client_makes_is_not_counted(case: str, node: int, log: pytest.LogCaptureFixture) -> None:
    fields, word = EVALUATED[case]
    ran = lied(node, sets("evaluate", "metrics", **fields))
    assert len(ran.records[-1].accepted) == CLIENTS
    assert dict(ran.result.evaluate_metrics_clientapp[2]) == without_the_node(node)
    lines = [line for line in log.messages if f"client {node - 1}'s evaluation" in line and word in line]
    assert len(lines) == 1  # of two evaluations, for the same reason
    assert all(line.isprintable() and len(line) < 500 for line in lines)


@NODES
def test_under_a_defence_no_client_weighs_more_than_another(node: int) -> None:
    lying, defence = {"accuracy": 1.0, "loss": 0.0, "num_examples": 2**53}, Defence(1, "median", "median")
    claimed, modest = (
        lied(node, sets("evaluate", "metrics", **fields), rounds=1, defence=defence).result.evaluate_metrics_clientapp[1]
        for fields in (lying, lying | {"num_examples": 8})
    )
    assert dict(claimed) == dict(modest)


def test_control_with_nobody_lying_all_count(log: pytest.LogCaptureFixture) -> None:
    ran, again = lied(1, nothing), lied(5, nothing)
    assert [[c.client for c in record.accepted] for record in ran.records] == [[0, 1, 2, 3, 4]] * 2
    assert apart(ran.trajectory, again.trajectory) == 0
    assert not any("refused" in line or "evaluation" in line for line in log.messages)
