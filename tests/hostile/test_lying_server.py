"""A server that departs from the protocol, stage by stage: what docs/privacy.md lists, each with the client's refusal.

The client is a real one: its state is as the honest stages before left it. What is changed is one message.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, RECORD_KEY_STATE
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes

from fl_bn.flower.wire.messages import WEIGHED
from fl_bn.methods import METHODS
from tests.hostile.liars import Privacy, SecureAggregation, people, what
from tests.in_process import TWO_STEPS, WatchedGrid, client_app, run
from tests.listed import listed

VICTIM = 2  # node; the others are 1, 3, 4, 5
Change = Callable[[dict, "Spy"], dict]  # type: ignore[type-arg]


class Spy(WatchedGrid):
    """In ``stage`` the victim gets another message: its record of SecAgg+ ``change``d. Its answer is in ``answers``.

    ``kind``: of the message, where it is changed, too; ``again``: the honest message goes before it.
    """

    def __init__(self, stage: str, change: Change, kind: str = "train", again: bool = False) -> None:
        clients = people()
        super().__init__(client_app(METHODS["fbn"](), clients, TWO_STEPS), len(clients))
        self.stage, self.change, self.kind, self.again = f"train {stage}", change, kind, again
        self.answers: list[Message] = []
        self.lists: dict[str, list[int]] = {}

    def _answer(self, message: Message) -> Message:
        if message.metadata.dst_node_id != VICTIM or what(message) != self.stage:
            return super()._answer(message)
        record = dict(message.content.config_records[RECORD_KEY_CONFIGS])
        if self.again:
            super()._answer(self._with(message, record, "train"))
        answer = super()._answer(self._with(message, self.change(record, self), self.kind))
        self.answers.append(answer)
        return answer

    @staticmethod
    def _with(message: Message, record: dict, kind: str) -> Message:  # type: ignore[type-arg]
        content = RecordDict({**dict(message.content.items()), RECORD_KEY_CONFIGS: ConfigRecord(dict(record))})
        changed = Message(content, message.metadata.dst_node_id, kind, ttl=600.0, group_id=message.metadata.group_id)
        changed.metadata.__dict__.update(_run_id=1, _src_node_id=1, _message_id=message.metadata.message_id)
        return changed


def sets(**fields: object) -> Change:
    return lambda record, spy: {**record, **fields}


def another_key() -> bytes:
    return public_key_to_bytes(generate_key_pairs()[1])


def of_victim(key: int, other: Callable[[], bytes]) -> Change:
    def change(record: dict, spy: Spy) -> dict:  # type: ignore[type-arg]
        pair = list(record[str(VICTIM)])
        pair[key] = other()
        return {**record, str(VICTIM): pair}

    return change


def without(node: int) -> Change:
    return lambda record, spy: {name: value for name, value in record.items() if name != str(node)}


def cut_sources(record: dict, spy: Spy) -> dict:  # type: ignore[type-arg]
    return {**record, "srcs": record["srcs"][1:], "ctxts": record["ctxts"][1:]}


def repeat_source(record: dict, spy: Spy) -> dict:  # type: ignore[type-arg]
    return {**record, "srcs": [record["srcs"][0], *record["srcs"][:-1]], "ctxts": [record["ctxts"][0], *record["ctxts"][:-1]]}


def swap_sources(record: dict, spy: Spy) -> dict:  # type: ignore[type-arg]
    return {**record, "srcs": [record["srcs"][1], record["srcs"][0], *record["srcs"][2:]]}


def stranger(record: dict, spy: Spy) -> dict:  # type: ignore[type-arg]
    return {**without(3)(record, spy), "9": record["3"]}


STAGES: dict[str, tuple[str, Change] | tuple[str, Change, str]] = {
    "fewer than 3 clients": ("setup", sets(sample_num=2, share_num=2, threshold=2)),
    "one share": ("setup", sets(share_num=1, threshold=1), "shares"),
    "more shares than clients": ("setup", sets(share_num=7, threshold=4), "shares"),
    "a threshold of half": ("setup", sets(threshold=2)),
    "another modulus": ("setup", sets(mod_range=2**31), "2147483648"),
    "levels that overflow": ("setup", sets(target_range=2**30), "1073741824"),
    "a range that hides the others": ("setup", sets(clipping_range=1e6), "clipping_range"),
    "a cohort without this client": ("setup", sets(cohort=[1, 3, 4, 5, 6]), "cohort"),
    "a cohort of another size": ("setup", sets(cohort=[1, 2, 3]), "cohort"),
    "keys of nodes outside the cohort": ("share_keys", stranger, "cohort"),
    "another weight": ("setup", sets(max_weight=1000.0), "1000.0"),
    "a range that is none": ("setup", sets(clipping_range=float("nan")), "clipping_range"),
    "a range that is a whole number": ("setup", sets(clipping_range=8), "clipping_range"),
    "a parameter of another type": ("setup", sets(threshold="3"), "threshold"),
    "other keys for this client": ("share_keys", of_victim(0, another_key), "false keys"),
    "without this client's keys": ("share_keys", without(VICTIM), "keys of 5"),
    "keys of fewer clients": ("share_keys", without(3), "keys of 5"),
    "keys of more clients": ("share_keys", lambda r, s: {**r, "9": [another_key(), another_key()]}, "keys of 5"),
    "one key twice": ("share_keys", lambda r, s: {**r, "3": r["4"]}, "two keys"),
    "keys of a node that is no number": ("share_keys", lambda r, s: {**without(3)(r, s), "x": r["3"]}, "keys of 5"),
    "a key that is none": ("share_keys", lambda r, s: {**r, "3": [b"none", b"at all"]}),
    "one key of a client": ("share_keys", lambda r, s: {**r, "3": r["3"][:1]}, "two keys"),
    "shares of fewer clients": ("collect_masked_vectors", cut_sources, "[1, 3, 4, 5]"),
    "shares of one client twice": ("collect_masked_vectors", repeat_source, "[1, 3, 4, 5]"),
    "shares under another's name": ("collect_masked_vectors", swap_sources, "unreadable"),
    "no shares": ("collect_masked_vectors", sets(srcs=[], ctxts=[]), "[1, 3, 4, 5]"),
    "both secrets of a client": ("unmask", sets(active_nids=[1, 2, 3, 4, 5], dead_nids=[3]), "[3]"),
    "one client again and again": ("unmask", sets(active_nids=[2, 3, 3], dead_nids=[1, 4, 5])),
    "one lost client twice": ("unmask", sets(active_nids=[1, 2, 3, 4], dead_nids=[5, 5])),
    "the client itself among the lost": ("unmask", sets(active_nids=[1, 3, 4, 5], dead_nids=[2])),
    "fewer clients than sent shares": ("unmask", sets(active_nids=[1, 2, 3, 4], dead_nids=[])),
    "a client that sent no share": ("unmask", sets(active_nids=[1, 2, 3, 4, 5], dead_nids=[9])),
    "most of them lost": ("unmask", sets(active_nids=[2, 3], dead_nids=[1, 4, 5]), "2"),
    "node ids of another type": ("unmask", sets(active_nids=["2"]), "active_nids"),
}


@pytest.mark.slow
@listed("case", STAGES)
def test_a_client_refuses_what_departs_from_the_protocol(case: str) -> None:
    stage, change, *words = STAGES[case]
    spy = Spy(stage, change)
    ran = run(METHODS["fbn"](), people(), 1, grid=spy, secure=SecureAggregation(), policy={"min_replies": 0.2})
    assert ran.records
    (answer, *_) = spy.answers
    if answer.has_error():
        assert all(word in answer.error.reason for word in words), answer.error.reason
    else:
        assert words == ["unreadable"]
        assert "unreadable" in answer.content.config_records[RECORD_KEY_CONFIGS]
        assert not answer.content.array_records
    assert not shown_shares(spy)


def shown_shares(spy: Spy) -> bool:
    """Whether the victim's answers hold a share, or a masked vector."""
    records = [answer.content.config_records.get(RECORD_KEY_CONFIGS, {}) for answer in spy.answers if answer.has_content()]
    return any("shares" in record or "masked_params" in record for record in records)


@pytest.mark.parametrize("stage", ["setup", "share_keys", "collect_masked_vectors", "unmask"])
def test_control_the_honest_message_is_answered(stage: str) -> None:
    spy = Spy(stage, sets())
    assert run(METHODS["fbn"](), people(), 1, grid=spy, secure=SecureAggregation()).records[0].aggregated
    assert not any(answer.has_error() for answer in spy.answers)


class Lacking(Spy):
    """The victim's instruction lacks ``field`` where its vector is asked for."""

    def __init__(self, field: str) -> None:
        super().__init__("collect_masked_vectors", sets())
        self.field = field

    def _answer(self, message: Message) -> Message:
        if message.metadata.dst_node_id == VICTIM and what(message) == self.stage:
            del message.content.config_records["fl-bn/config"][self.field]
        return super()._answer(message)


@pytest.mark.sample(3)
@pytest.mark.parametrize("field", [*WEIGHED, "dp-clip", "dp-statistics-clip"])
def test_a_sum_whose_instruction_lacks_a_number_is_refused_by_its_name(field: str) -> None:
    spy, privacy = Lacking(field), Privacy(1.0, 1.0, 0.01) if field.startswith("dp") else None
    policy = {"min_replies": 0.2, "client_weights": "samples" if privacy is None else "uniform"}
    run(METHODS["fbn"](), people(), 1, grid=spy, secure=SecureAggregation(privacy=privacy), policy=policy)
    assert str(spy.answers[0].error.reason).startswith(f"WireError: config/{field}: ")


OUT_OF_TURN: dict[str, tuple[str, Change, dict[str, Any], str]] = {  # the honest stage, what comes instead, and a word of the refusal
    "a vector without keys": ("setup", sets(stage="collect_masked_vectors"), {}, "stage"),
    "shares without a vector": ("share_keys", sets(stage="unmask"), {}, "stage"),
    "keys after a vector": ("unmask", sets(stage="share_keys"), {}, "stage"),
    "an unknown stage": ("unmask", sets(stage="reveal"), {}, "stage"),
    "keys again": ("share_keys", sets(), {"again": True}, "stage"),
    "a vector again": ("collect_masked_vectors", sets(), {"again": True}, "stage"),
    "shares again": ("unmask", sets(), {"again": True}, "stage"),
    "a vector in query.statistics": ("collect_masked_vectors", sets(), {"kind": "query.statistics"}, "query.statistics"),
    "a vector in query.kept": ("collect_masked_vectors", sets(), {"kind": "query.kept"}, "query.kept"),
}


@listed("case", OUT_OF_TURN)
def test_stages_come_in_order_once_and_in_train_messages(case: str) -> None:
    """Asked for the shares twice, with others lost, it would give both secrets; Flower's mod masks replies to train messages alone."""
    stage, change, how, word = OUT_OF_TURN[case]
    spy = Spy(stage, change, **how)
    run(METHODS["fbn"](), people(), 1, grid=spy, secure=SecureAggregation(), policy={"min_replies": 0.2})
    assert word in str(spy.answers[0].error.reason)


def test_a_refused_unmasking_can_be_asked_for_rightly_and_then_never_again() -> None:
    """The refusal keeps the shares, so that a server that erred can go on; the answer deletes them."""
    spy = Spy("unmask", sets(active_nids=[2, 3, 3], dead_nids=[1, 4, 5]))
    run(METHODS["fbn"](), people(), 1, grid=spy, secure=SecureAggregation(), policy={"min_replies": 0.2})
    states = spy.states()
    assert RECORD_KEY_STATE in states[VICTIM - 1].config_records
    assert not any(RECORD_KEY_STATE in state.config_records for i, state in enumerate(states) if i != VICTIM - 1)


# files


@listed("name", ["..", "../..", "/tmp", "a/b", ".", "a\0b", "~root", "-rf", " ", "2024-05-01 fedbn"])
def test_the_server_s_name_of_a_run_leads_nowhere_but_below_the_site_s_folder(name: str, tmp_path: Path) -> None:
    """Control: an honest name, the last one, is written."""
    folder = tmp_path / "site" / "models"
    folder.mkdir(parents=True)
    clients, method = people(3), METHODS["fedbn"]()
    grid = WatchedGrid(client_app(method, clients, TWO_STEPS, folder=folder), len(clients))
    ran = run(method, clients, 1, grid=grid, save_clients=name)
    refused = [m for m in grid.received if m.has_error()]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert ran.records[0].aggregated
    if name[0] == "2":
        assert {path.parent for path in written} == {folder / name / "clients"}
        assert len(written) == 3
    else:
        assert len(refused) == 3
        assert all("config/save: " in str(m.error.reason) for m in refused)
        assert written == []


# what clients tell of statistics that stay at home


@pytest.mark.parametrize("name", ["fedbn", "silobn"])
def test_nothing_of_local_statistics_is_told_unasked(name: str) -> None:
    clients, method = people(3), METHODS[name]()
    grid = WatchedGrid(client_app(method, clients, TWO_STEPS), len(clients))
    run(method, clients, 2, grid=grid)
    told = {key for m in grid.received for record in m.content.metric_records.values() for key in record}
    assert told == {"samples", "steps", "loss", "waited", "kept", "accuracy", "fewest"} | {f"accuracy-class-{i}" for i in range(4)}
    kept = [record for state in grid.states() for record in state.array_records.values()]
    values = {float(v) for record in kept for name, array in record.items() if "running" in name for v in array.numpy().reshape(-1)}
    numbers = {float(v) for m in grid.received for record in m.content.metric_records.values() for v in record.values()}
    assert not values & (numbers - {0.0, 1.0})
    assert len(values) > 30
