"""What leaves a client: the gate of its app, and a server that bisects on accuracies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fl_bn.federation.local import evaluate
from fl_bn.flower import Gate, answer, evaluating
from fl_bn.flower.wire.gate import KINDS, Kind
from fl_bn.flower.wire.messages import RECORD_KEY_CONFIGS
from fl_bn.methods import METHODS
from tests.hostile.bisecting import Bisecting, network, samples, secrets_of, with_node_config
from tests.hostile.liars import SecureAggregation
from tests.in_process import WatchedGrid, client_app, run
from tests.listed import listed, slow

DATA = [samples(12, seed=i) for i in range(3)]
SECRETS = secrets_of(DATA[0])
THIRDS = (1 / 3, 2 / 3, 1.0)


def grid(**node_config: Any) -> WatchedGrid:
    return with_node_config(WatchedGrid(client_app(METHODS["fedavg"](), DATA, model=network()), len(DATA)), **node_config)


def own_app(mods: list[Any]) -> ClientApp:
    """A Flower app of one's own, whose evaluate handler gives every metric."""
    app, method = ClientApp(mods=mods), METHODS["fedavg"]()
    answer(app, network, method, lambda context: [(DATA[0].x, DATA[0].y)])

    @app.evaluate()
    def tested(message: Message, context: Context) -> Message:
        model, data = evaluating(message, context, network(), method), DATA[int(context.node_config["partition-id"])]
        found = {**evaluate(model, data).result(), "num-examples": len(data)}
        return Message(RecordDict({"metrics": MetricRecord(found)}), reply_to=message)

    return app


def own_grid(*mods: Any, **node_config: Any) -> WatchedGrid:
    return with_node_config(WatchedGrid(own_app(list(mods)), len(DATA)), **node_config)


DOORS: dict[str, Callable[..., WatchedGrid]] = {
    "application": grid,
    "own app": own_grid,
    "own app with a gate": lambda **node_config: own_grid(Gate(), **node_config),
}


@pytest.mark.parametrize("door", DOORS)
def test_control_without_a_budget_a_server_reads_one_feature_of_every_sample(door: str) -> None:
    attacker = Bisecting(DOORS[door]())
    found = attacker.bisect(1, "accuracy-class-0", THIRDS)
    assert attacker.answers == 66
    assert np.allclose([np.mean(interval) for interval in found], SECRETS, atol=1e-4)


@pytest.mark.parametrize("budget", [0, 5])
@pytest.mark.parametrize("door", DOORS)
def test_a_server_gets_the_budget_and_no_more(door: str, budget: int) -> None:
    attacker = Bisecting(DOORS[door](max_evaluations=budget))
    found = attacker.bisect(1, "accuracy-class-0", THIRDS)
    assert attacker.answers == budget
    assert min(high - low for low, high in found) >= 2.0**-budget
    assert len(attacker.refusals) == 3
    assert all(f"{budget} evaluations" in why and "max-evaluations" in why for why in attacker.refusals)
    assert Bisecting(attacker.grid).bisect(2, "accuracy-class-0", (1.0,), rounds=budget)  # another client has a budget of its own


@pytest.mark.parametrize("door", DOORS)
def test_a_client_that_requires_secure_aggregation_gives_a_bisecting_server_nothing(door: str) -> None:
    attacker = Bisecting(DOORS[door](secure_aggregation=True))
    assert attacker.bisect(1, "accuracy-class-0", THIRDS) == [(0.0, 1.0)] * 3
    assert attacker.answers == 0
    assert all("secure-aggregation is on" in why for why in attacker.refusals)


@listed("kind", sorted(KINDS))
def test_such_a_client_answers_in_the_clear_who_it_is_and_nothing_else(kind: str) -> None:
    asked = grid(secure_aggregation=True)
    message = Bisecting(asked).message(1, 0.5, kind)
    message.content["fl-bn/config"] = ConfigRecord({"learning-rate": 0.0, "save": "run"})
    (reply,) = asked.send_and_receive([message])
    if kind == "query.hello":
        assert set(reply.content) == {"fl-bn/hello"}
        assert reply.content.config_records["fl-bn/hello"]["label-counts"] == "[]"
    elif kind == "query.save":
        assert not reply.content
    else:
        assert "secure-aggregation" in str(reply.error.reason)
        assert kind in str(reply.error.reason)
    (plain,) = grid().send_and_receive([Bisecting(grid()).message(1, 0.5, "query.hello")])  # control
    assert plain.content.config_records["fl-bn/hello"]["label-counts"] == "[12]"


def test_a_secure_sum_leads_to_no_layer_wise_exchange() -> None:
    """It would carry the moments of each layer to the server, beside the masked vector."""
    for header, config in (({}, {"exchange": "grpc"}), ({"phase": "exchange"}, {})):
        asked = grid(secure_aggregation=True)
        message = Bisecting(asked).message(1, 0.5, "train")
        message.content[RECORD_KEY_CONFIGS] = ConfigRecord({"stage": "collect_masked_vectors"})
        message.content["fl-bn/config"] = ConfigRecord({"learning-rate": 0.0, **config})
        message.content["fl-bn/header"] = ConfigRecord({**message.content.config_records["fl-bn/header"], **header})
        (reply,) = asked.send_and_receive([message])
        assert "layer-wise exchange" in str(reply.error.reason)


# the budget


@pytest.mark.parametrize("door", DOORS)
def test_a_client_that_starts_anew_remembers_what_it_has_answered(door: str, tmp_path: Path) -> None:
    first = Bisecting(DOORS[door](max_evaluations=4, state_dir=str(tmp_path)))
    first.bisect(1, "accuracy", (1.0,), rounds=3)
    again = Bisecting(DOORS[door](max_evaluations=4, state_dir=str(tmp_path)))  # with an empty context.state
    again.bisect(1, "accuracy", (1.0,))
    assert (first.answers, again.answers) == (3, 1)


@listed("wrong", ["a file in the way", -1, 1.5, "x", True])
def test_where_evaluations_cannot_be_counted_none_is_answered(wrong: Any, tmp_path: Path) -> None:
    """Nor where the limit is no number."""
    (tmp_path / "evaluations").write_text("a file where the folder should be")
    attacker = Bisecting(grid(max_evaluations=4, state_dir=str(tmp_path)) if wrong == "a file in the way" else grid(max_evaluations=wrong))
    attacker.bisect(1, "accuracy", (1.0,))
    assert attacker.answers == 0
    assert ("count its evaluations" if wrong == "a file in the way" else "node config/max-evaluations") in attacker.refusals[0]


# samples behind a number


def test_numbers_of_few_samples_are_withheld() -> None:
    attacker = Bisecting(grid(min_samples=4))
    (reply,) = attacker.grid.send_and_receive([attacker.message(1, 0.5)])
    told = reply.content.metric_records["fl-bn/metrics"]
    assert np.isnan(told["accuracy-class-0"])  # of 3 samples
    assert not np.isnan(told["accuracy-class-1"])  # of 9
    assert (told["fewest"], told["samples"]) == (9, 12)
    assert attacker.bisect(1, "accuracy-class-0", (1.0,)) == [(0.0, 1.0)]


@pytest.mark.parametrize("door", ["application", "own app with a gate"])
def test_an_evaluation_of_few_samples_does_not_leave(door: str) -> None:
    """Without a gate around an app of one's own, nothing sees what its handler replies."""
    attacker = Bisecting(DOORS[door](min_samples=13))
    attacker.bisect(1, "accuracy", (1.0,))
    assert attacker.answers == 0
    assert "min-samples = 13" in attacker.refusals[0]


# kinds


def app_with(handler_kind: str, reply: RecordDict, kinds: dict[str, Kind] | None = None) -> WatchedGrid:
    app = ClientApp(mods=[Gate() if kinds is None else Gate({**KINDS, **kinds})])
    category, _, action = handler_kind.partition(".")
    register = getattr(app, category)

    @register(*([action] if action else []))
    def handle(message: Message, context: Context) -> Message:
        return Message(reply, reply_to=message)

    return WatchedGrid(app, 1)


def ask(asked: WatchedGrid, kind: str) -> Message:
    (reply,) = asked.send_and_receive([Message(RecordDict(), 1, kind, ttl=600.0, group_id="1")])
    return reply


def test_a_handler_that_the_gate_does_not_know_is_refused_until_it_is_declared() -> None:
    secret = RecordDict({"found": MetricRecord({"mean": 1.0})})
    assert "query.mean" in str(ask(app_with("query.mean", secret), "query.mean").error.reason)
    declared = app_with("query.mean", secret, {"query.mean": Kind(frozenset({"found"}))})
    assert ask(declared, "query.mean").content.metric_records["found"]["mean"] == 1.0
    with_node_config(declared, secure_aggregation=True)
    assert "secure-aggregation" in str(ask(declared, "query.mean").error.reason)


def test_a_reply_holds_what_its_kind_may_and_nothing_else() -> None:
    more = RecordDict({"metrics": MetricRecord({"samples": 9}), "data": ConfigRecord({"first": b"sample"})})
    arrays = RecordDict({"metrics": MetricRecord({"samples": 9}), "data": ArrayRecord([np.ones(3)])})
    for reply, word in ((more, "['data']"), (arrays, "arrays")):
        assert word in str(ask(app_with("evaluate", reply), "evaluate").error.reason)
    assert not ask(app_with("train", arrays), "train").has_error()  # control


# failures


def test_a_client_that_fails_does_not_say_why_and_fails_three_times_at_most(log: pytest.LogCaptureFixture) -> None:
    """A server could send weights that overflow for samples above a threshold alone, and bisect on who fails."""
    app, secret = ClientApp(mods=[Gate()]), SECRETS[0]
    tried: list[float] = []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        tried.append(secret)
        raise ValueError(f"fc.weight: not finite, since {secret}")

    def reasons(asked: WatchedGrid, stage: str = "collect_masked_vectors") -> list[str]:
        found = []
        for _ in range(6):
            message = Bisecting(asked).message(1, 0.5, "train")
            message.content[RECORD_KEY_CONFIGS] = ConfigRecord({"stage": stage})
            found += [str(reply.error.reason) for reply in asked.send_and_receive([message])]
        return found

    said = reasons(with_node_config(WatchedGrid(app, 1), secure_aggregation=True))
    assert len(tried) == 3
    assert not any(str(secret) in why or "fc.weight" in why for why in said)
    assert len(set(said[:3])) == len(set(said[3:])) == 1
    assert str(secret) in log.text
    assert all(str(secret) in why for why in reasons(WatchedGrid(app, 1)))  # control: a client that does not require secure aggregation
    before = reasons(with_node_config(WatchedGrid(app, 1), secure_aggregation=True), "setup")  # its data may be of another form
    assert not any(str(secret) in why for why in before)


# evaluations in a secure sum


def secure_run(node_config: dict[int, dict[str, Any]] | None = None, clients: int = 5, rounds: int = 2, **options: Any) -> Any:
    people = [samples(12 + i, seed=i, of_class_0=6) for i in range(clients)]
    asked = WatchedGrid(client_app(METHODS["fedbn"](), people, model=seeded_for(), **options.pop("app", {})), clients)
    for node, config in (node_config or {}).items():
        asked._contexts[node].node_config.update(config)
    secure = options.pop("secure", SecureAggregation())
    return run(METHODS["fedbn"](), people, rounds, grid=asked, model=seeded_for(), secure=secure, policy={"evaluate_every": 1}, **options)


def seeded_for() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return network()


def test_secure_evaluations_are_the_mean_of_the_plain_ones() -> None:
    plain, secure = secure_run(secure=None), secure_run(dict.fromkeys(range(1, 6), {"secure-aggregation": True}))
    for one, other in zip(plain.records, secure.records, strict=True):
        assert other.evaluation.keys() == {"accuracy", "loss"}
        assert abs(one.evaluation["accuracy"] - other.evaluation["accuracy"]) < 1e-5
        assert abs(one.evaluation["loss"] - other.evaluation["loss"]) < 1e-3
        assert not other.client_evaluation
    assert len(plain.records[0].client_evaluation) == 5  # control


def test_no_message_of_a_secure_run_holds_one_client_s_evaluation() -> None:
    ran = secure_run()
    numbers = {float(v) for m in ran.grid.received if m.has_content() for r in m.content.metric_records.values() for v in r.values()}
    plain = secure_run(secure=None)
    own = {value for record in plain.records for m in record.client_evaluation.values() for value in m.values()}
    assert not (numbers & own) - {0.0, 1.0}
    assert not any(m.metadata.message_type == "evaluate" for m in ran.grid.sent)
    told = [d for record in ran.records for d in record.disclosures]
    assert {d.section for d in told} == {"masked"}
    assert sum(d.what.startswith("a masked evaluation") for d in told) == 2 * 5


@pytest.mark.parametrize("why", [{"max-evaluations": 1}, {"min-samples": 13}])
@pytest.mark.parametrize("clients", [slow(5), 3])
def test_a_client_whose_evaluations_are_spent_or_too_small_has_no_part_in_the_mean(clients: int, why: dict[str, int]) -> None:
    """With too few clients left there is no evaluation, and the run goes on."""
    ran = secure_run({1: {"secure-aggregation": True, **why}}, clients=clients, rounds=3)
    first = "max-evaluations" in why
    assert [bool(record.evaluation) for record in ran.records] == ([True] * 3 if clients > 3 else [first, False, False])
    assert all(record.aggregated for record in ran.records)
    parts = [sum(d.what.startswith("a masked evaluation") for d in record.disclosures) for record in ran.records]
    assert parts == ([clients if first else clients - 1, clients - 1, clients - 1] if clients > 3 else [3 * first, 0, 0])


def test_a_client_of_few_test_samples_requires_eight_unless_its_policy_says_otherwise() -> None:
    small = [samples(n, seed=n, of_class_0=3) for n in (7, 12, 12, 12)]
    for config, parts in (({}, 3), ({"min-samples": 5}, 4)):
        asked = with_node_config(WatchedGrid(client_app(METHODS["fedbn"](), small, model=network()), 4), secure_aggregation=True)
        asked._contexts[1].node_config.update(config)
        ran = run(METHODS["fedbn"](), small, 1, grid=asked, model=network(), secure=SecureAggregation())
        assert ran.records[0].evaluation
        sums = [d for d in ran.records[0].disclosures if d.section == "masked"]
        assert len(sums) == 4 + parts  # of training, and of the evaluation
