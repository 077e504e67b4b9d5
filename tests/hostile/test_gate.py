"""What leaves a client: the gate of its app. A server that may ask often enough reads samples from accuracies by bisection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fl_bn.flower import Gate
from fl_bn.flower.wire.gate import KINDS, Kind
from fl_bn.flower.wire.messages import RECORD_KEY_CONFIGS
from fl_bn.methods import METHODS, Phase
from fl_bn.support.wire import WireError
from tests.flower.own_apps import net
from tests.hostile.liars import Samples, SecureAggregation, SharedModel, header_for, to_numpy, to_records
from tests.hostile.own_app import own_app
from tests.in_process import WatchedGrid, client_app, run
from tests.listed import listed

ASKED = 8  # evaluations that a server asks of a node
SECURE = {"secure-aggregation": True}


def samples(n: int, seed: int = 0, of_class_0: int = 3) -> Samples:
    """Make ``n`` samples: the first ``of_class_0`` are of class 0, the others of class 1."""
    x = np.random.default_rng(seed).random((n, 4), dtype=np.float32)
    return Samples(torch.from_numpy(x), torch.tensor([0] * of_class_0 + [1] * (n - of_class_0)))


DATA = [samples(12, seed=i) for i in range(3)]


def at(grid: WatchedGrid, **policy: Any) -> WatchedGrid:
    """Put a site's policy into the node config of all clients."""
    for context in grid._contexts.values():
        context.node_config.update({key.replace("_", "-"): value for key, value in policy.items()})
    return grid


DOORS: dict[str, Callable[[], WatchedGrid]] = {
    "application": lambda: WatchedGrid(client_app(METHODS["fedavg"](), DATA, model=net()), len(DATA)),
    "own app": lambda: WatchedGrid(own_app("fedavg"), len(DATA)),
    "own app with a gate": lambda: WatchedGrid(own_app("fedavg", Gate()), len(DATA)),
}
application, doors = DOORS["application"], pytest.mark.parametrize("door", DOORS)


def ask(grid: WatchedGrid, kind: str = "evaluate", node: int = 1, phase: str = "train", sum_of: str = "", **config: Any) -> Message:
    """Send a message to a node; return its answer. ``sum_of``: the stage of a secure sum that the message belongs to."""
    shared = SharedModel(net(), METHODS["fedavg"]())
    sections = {section: to_numpy(tensors) for section, tensors in shared.sections().items()}
    content = to_records(sections, header_for(shared, 1, Phase(phase)))
    content["fl-bn/config"] = ConfigRecord({"learning-rate": 0.0, "save": "run", **config})
    if sum_of:
        content[RECORD_KEY_CONFIGS] = ConfigRecord({"stage": sum_of})
    (reply,) = grid.send_and_receive([Message(content, node, kind, ttl=600.0, group_id="1")])
    return reply


def refusals(grid: WatchedGrid, times: int = ASKED, node: int = 1) -> list[str]:
    """Ask for evaluations; return the reasons why some were refused."""
    return [str(reply.error.reason) for reply in (ask(grid, node=node) for _ in range(times)) if reply.has_error()]


LIMITS: dict[str, tuple[dict[str, Any], int, str]] = {  # a site's policy, the answers that it gives, and words of its refusals
    "none": ({}, ASKED, ""),
    "no evaluation": ({"max_evaluations": 0}, 0, "max-evaluations"),
    "five": ({"max_evaluations": 5}, 5, "5 evaluations"),
    "secure aggregation": ({"secure_aggregation": True}, 0, "secure-aggregation is on"),
    "no number": ({"max_evaluations": "x"}, 0, "node config/max-evaluations"),
}


@doors
@listed("limit", LIMITS)
def test_a_server_gets_the_budget_and_no_more(limit: str, door: str) -> None:
    policy, answers, word = LIMITS[limit]
    grid = at(DOORS[door](), **policy)
    for node in (1, 2):  # another client has a budget of its own
        why = refusals(grid, node=node)
        assert len(why) == ASKED - answers
        assert all(word in one for one in why)


@doors
def test_a_client_that_starts_anew_remembers_what_it_has_answered(door: str, tmp_path: Path) -> None:
    """Where evaluations cannot be counted, none is answered."""
    policy = {"max_evaluations": 4, "state_dir": str(tmp_path), "site": "A"}
    assert refusals(at(DOORS[door](), **policy), times=3) == []
    assert len(refusals(at(DOORS[door](), **policy), node=2)) == ASKED - 1  # with an empty context.state, and another node id
    (tmp_path / "file").touch()
    assert len(refusals(at(DOORS[door](), **policy | {"state_dir": str(tmp_path / "file")}))) == ASKED


def test_numbers_of_few_samples_are_withheld() -> None:
    told = ask(at(application(), min_samples=4)).content.metric_records["fl-bn/metrics"]
    assert np.isnan(told["accuracy-class-0"])  # of 3 samples
    assert not np.isnan(told["accuracy-class-1"])  # of 9
    assert (told["fewest"], told["samples"]) == (9, 12)
    for door in ("application", "own app with a gate"):  # without a gate, nothing sees what a handler of one's own replies
        why = refusals(at(DOORS[door](), min_samples=13))
        assert len(why) == ASKED
        assert "min-samples = 13" in why[0]


@listed("kind", sorted(KINDS))
def test_a_client_that_requires_secure_aggregation_says_in_the_clear_who_it_is_and_nothing_else(kind: str) -> None:
    reply = ask(at(application(), secure_aggregation=True), kind)
    if kind == "query.hello":
        assert set(reply.content) == {"fl-bn/hello"}
        assert reply.content.config_records["fl-bn/hello"]["label-counts"] == "[]"
        assert ask(application(), kind).content.config_records["fl-bn/hello"]["label-counts"] == "[12]"  # control
    elif kind == "query.save":
        assert not reply.content
    else:
        assert all(word in str(reply.error.reason) for word in ("secure-aggregation", kind))


@listed("told", [{"exchange": "grpc"}, {"phase": "exchange"}])
def test_a_secure_sum_leads_to_no_layer_wise_exchange(told: dict[str, str]) -> None:
    """It would carry the moments of each layer to the server, beside the masked vector."""
    reply = ask(at(application(), secure_aggregation=True), "train", sum_of="collect_masked_vectors", **told)
    assert "layer-wise exchange" in str(reply.error.reason)


FOUND, ARRAYS = MetricRecord({"samples": 9}), ArrayRecord([np.ones(3)])
REPLIES: dict[str, tuple[str, RecordDict, str]] = {  # a message's kind, a handler's reply, and words of the gate's refusal
    "a kind that nobody declared": ("query.mean", RecordDict({"found": FOUND}), "query.mean"),
    "a record more": ("evaluate", RecordDict({"metrics": FOUND, "data": ConfigRecord({"first": b"sample"})}), "['data']"),
    "arrays": ("evaluate", RecordDict({"metrics": FOUND, "data": ARRAYS}), "arrays"),
    "arrays of training": ("train", RecordDict({"metrics": FOUND, "data": ARRAYS}), ""),
    "a kind that is declared": ("query.declared", RecordDict({"found": FOUND}), ""),
}


@listed("case", REPLIES)
def test_a_reply_holds_what_its_kind_may_and_nothing_else(case: str) -> None:
    kind, reply, word = REPLIES[case]
    app = ClientApp(mods=[Gate({**KINDS, "query.declared": Kind(frozenset({"found"}))})])
    category, _, action = kind.partition(".")

    @getattr(app, category)(*([action] if action else []))
    def handle(message: Message, context: Context) -> Message:
        return Message(reply, reply_to=message)

    got = ask(WatchedGrid(app, 1), kind)
    assert got.has_error() == bool(word)
    assert not word or word in str(got.error.reason)
    assert ask(at(WatchedGrid(app, 1), secure_aggregation=True), kind).has_error()


@listed("error", [ValueError("fc.weight: not finite, since 0.3712"), WireError("weights", "fc.weight", "0.3712")])
def test_a_client_that_fails_does_not_say_why_and_fails_three_times_at_most(error: ValueError, log: pytest.LogCaptureFixture) -> None:
    """A server could send weights that overflow for samples above a threshold alone, and bisect on who fails."""
    app, tried = ClientApp(mods=[Gate()]), list[str]()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        tried.append(str(message.content.config_records[RECORD_KEY_CONFIGS].pop("stage")))  # Flower's mod takes it out, too
        raise error

    def reasons(**policy: Any) -> list[str]:
        grid = at(WatchedGrid(app, 1), **policy)
        return [str(ask(grid, "train", sum_of="collect_masked_vectors").error.reason) for _ in range(6)]

    said = reasons(secure_aggregation=True)
    assert len(tried) == 3
    assert not any("0.3712" in why or "fc.weight" in why for why in said)
    assert len(set(said[:3])) == len(set(said[3:])) == 1
    assert "0.3712" in log.text
    assert all("0.3712" in why for why in reasons())  # control: a client that does not require secure aggregation


# evaluations in a secure sum


def secure_run(policies: dict[int, dict[str, Any]], sizes: tuple[int, ...] = (12, 13, 14, 15, 16), rounds: int = 2, **options: Any) -> Any:
    """Run FedBN with secure aggregation; ``policies`` are those of nodes."""
    people = [samples(n, seed=i, of_class_0=n // 2) for i, n in enumerate(sizes)]
    asked = WatchedGrid(client_app(METHODS["fedbn"](), people, model=net()), len(sizes))
    for node, config in policies.items():
        asked._contexts[node].node_config.update(config)
    options = {"secure": SecureAggregation(), "policy": {"evaluate_every": 1}, **options}
    return run(METHODS["fedbn"](), people, rounds, grid=asked, model=net(), **options)


def parts(ran: Any) -> list[int]:
    """Return how many clients have a part in each round's evaluation."""
    return [sum(d.what.startswith("a masked evaluation") for d in record.disclosures) for record in ran.records]


def test_secure_evaluations_are_the_mean_of_the_plain_ones_and_no_message_holds_one_of_these() -> None:
    plain, secure = secure_run({}, secure=None), secure_run(dict.fromkeys(range(1, 6), SECURE))
    for one, other in zip(plain.records, secure.records, strict=True):
        assert other.evaluation.keys() == {"accuracy", "loss"}
        assert abs(one.evaluation["accuracy"] - other.evaluation["accuracy"]) < 1e-5
        assert abs(one.evaluation["loss"] - other.evaluation["loss"]) < 1e-3
        assert not other.client_evaluation
    own = {value for record in plain.records for m in record.client_evaluation.values() for value in m.values()}
    received = [m.content for m in secure.grid.received if m.has_content()]
    assert not ({float(v) for content in received for r in content.metric_records.values() for v in r.values()} & own) - {0.0, 1.0}
    assert len(own) > 5  # control
    assert not any(m.metadata.message_type == "evaluate" for m in secure.grid.sent)
    assert {d.section for record in secure.records for d in record.disclosures} == {"masked"}
    assert parts(secure) == [5, 5]


def test_only_clients_that_trained_evaluate_what_they_keep() -> None:
    assert parts(secure_run({}, sizes=(12,) * 6, policy={"evaluate_every": 1, "fraction": 0.5}, rounds=1)) == [3]


@listed(
    ("sizes", "policy", "wanted"),
    [
        ((12, 13, 14), {**SECURE, "max-evaluations": 1}, [3, 0, 0]),
        ((12, 13, 14, 15), {**SECURE, "min-samples": 13}, [3, 3, 3]),
        ((7, 12, 12, 12), SECURE, [3, 3, 3]),  # eight samples, if its policy says nothing else
    ],
)
def test_a_client_whose_evaluations_are_spent_or_too_small_has_no_part_in_the_mean(
    sizes: tuple[int, ...], policy: dict[str, Any], wanted: list[int]
) -> None:
    """With too few clients left there is no evaluation, and the run goes on."""
    ran = secure_run({1: policy}, sizes, rounds=3)
    assert parts(ran) == wanted
    assert [bool(record.evaluation) for record in ran.records] == [bool(number) for number in wanted]
    assert all(record.aggregated for record in ran.records)
