"""A server that departs from the protocol of a secure sum: a client refuses each false message, and then answers the honest one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, RECORD_KEY_STATE
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes

from fl_bn.flower.wire.messages import WEIGHED
from fl_bn.methods import METHODS
from tests.hostile.liars import OURS, Privacy, SecureAggregation, people, what
from tests.in_process import TWO_STEPS, WatchedGrid, client_app, run
from tests.listed import listed

VICTIM = 2  # node; the others are 1, 3, 4, 5
Record = dict[str, Any]
Change = Callable[[Record], Record]  # of the record of SecAgg+ in a message


def with_fields(**fields: Any) -> Change:
    return lambda record: {**record, **fields}


def without(node: int, **more: Any) -> Change:
    return lambda record: {name: value for name, value in {**record, **more}.items() if name != str(node)}


SET_UP: dict[str, tuple[Change, str]] = {  # and a word of the refusal
    "fewer than 3 clients": (with_fields(sample_num=2, share_num=2, threshold=2), "shares"),
    "more shares than clients": (with_fields(share_num=7, threshold=4), "shares"),
    "a threshold of half": (with_fields(threshold=2), "threshold"),
    "another modulus": (with_fields(mod_range=2**31), "2147483648"),
    "levels that overflow": (with_fields(target_range=2**30), "1073741824"),
    "a range that hides the others": (with_fields(clipping_range=1e6), "clipping_range"),
    "a cohort without this client": (with_fields(cohort=[1, 3, 4, 5, 6]), "cohort"),
    "a cohort of another size": (with_fields(cohort=[1, 2, 3]), "cohort"),
    "another weight": (with_fields(max_weight=1000.0), "1000.0"),
    "a vector without keys": (with_fields(stage="collect_masked_vectors"), "stage"),
}
SHARE_KEYS: dict[str, tuple[Change, str]] = {
    "other keys for this client": (
        lambda r: {**r, str(VICTIM): [public_key_to_bytes(generate_key_pairs()[1]), r[str(VICTIM)][1]]},
        "false keys",
    ),
    "without this client's keys": (without(VICTIM), "keys of 5"),
    "keys of fewer clients": (without(3), "keys of 5"),
    "keys of a node outside the cohort": (lambda r: without(3)({**r, "9": r["3"]}), "cohort"),
    "one key twice": (lambda r: {**r, "3": r["4"]}, "two keys"),
    "a key that is too long": (lambda r: {**r, "3": [bytes(2000), b"x"]}, "two keys"),
    "shares without a vector": (with_fields(stage="unmask"), "stage"),
}
COLLECT: dict[str, tuple[Change, str]] = {
    "shares of fewer clients": (lambda r: {**r, "srcs": r["srcs"][1:], "ctxts": r["ctxts"][1:]}, "[1, 3, 4, 5]"),
    "shares of one client twice": (lambda r: {**r, "srcs": [r["srcs"][0], *r["srcs"][:-1]]}, "[1, 3, 4, 5]"),
    "no shares": (with_fields(srcs=[], ctxts=[]), "[1, 3, 4, 5]"),
    "shares under another's name": (lambda r: {**r, "srcs": [r["srcs"][1], r["srcs"][0], *r["srcs"][2:]]}, ""),  # they cannot be read
}
UNMASK: dict[str, tuple[Change, str]] = {
    "both secrets of a client": (with_fields(active_nids=[1, 2, 3, 4, 5], dead_nids=[3]), "[3]"),
    "one client again and again": (with_fields(active_nids=[2, 3, 3], dead_nids=[1, 4, 5]), "one share"),
    "the client itself among the lost": (with_fields(active_nids=[1, 3, 4, 5], dead_nids=[2]), "lost"),
    "fewer clients than sent shares": (with_fields(active_nids=[1, 2, 3, 4], dead_nids=[]), "one share"),
    "a client that sent no share": (with_fields(active_nids=[1, 2, 3, 4, 5], dead_nids=[9]), "one share"),
    "most of them lost": (with_fields(active_nids=[2, 3], dead_nids=[1, 4, 5]), "2"),
    "node ids of another type": (with_fields(active_nids=["2"]), "active_nids"),
    "keys after a vector": (with_fields(stage="share_keys"), "stage"),
}
STAGES = {"setup": SET_UP, "share_keys": SHARE_KEYS, "collect_masked_vectors": COLLECT, "unmask": UNMASK}
FALSE = {case: word for cases in STAGES.values() for case, (_, word) in cases.items()}
ELSEWHERE = ("query.statistics", "query.kept")  # Flower's mod masks replies to train messages alone
LACKING = (*WEIGHED, "dp-clip", "dp-statistics-clip")  # fields of the config by which a vector is made


class Spy(WatchedGrid):
    """Before each honest message of a sum the victim gets all false ones of ``stages``, and afterwards the honest one again.

    ``answers`` has its answers to all but the honest ones, by case.
    """

    def __init__(self, stages: Mapping[str, Mapping[str, tuple[Change, str]]] = STAGES) -> None:
        super().__init__(client_app(METHODS["fbn"](), people(), TWO_STEPS), len(people()))
        self.stages, self.answers = stages, dict[str, Message]()

    def _answer(self, message: Message) -> Message:
        stage = what(message).removeprefix("train ")
        if message.metadata.dst_node_id != VICTIM or stage not in STAGES:
            return super()._answer(message)
        for case, (change, _) in self.stages.get(stage, {}).items():
            self.answers[case] = super()._answer(copied(message, change))
        if stage == "collect_masked_vectors":
            for kind in ELSEWHERE:
                self.answers[kind] = super()._answer(copied(message, kind=kind))
            for field in LACKING if "dp-clip" in message.content.config_records[OURS + "config"] else ():
                self.answers[field] = super()._answer(copied(message, lacking=field))
        answer = super()._answer(copied(message))
        if stage != "setup":  # a sum may begin anew
            self.answers[f"{stage} again"] = super()._answer(copied(message))
        return answer


def copied(message: Message, change: Change = dict, kind: str = "train", lacking: str = "") -> Message:
    """Return an equal message, whose record of SecAgg+ is changed, or whose config lacks a field."""
    content = RecordDict({name: record for name, record in message.content.items() if name != "metrics"})
    content[RECORD_KEY_CONFIGS] = ConfigRecord(change(dict(message.content.config_records[RECORD_KEY_CONFIGS])))
    config = message.content.config_records[OURS + "config"]
    content[OURS + "config"] = ConfigRecord({name: value for name, value in config.items() if name != lacking})
    made = Message(content, message.metadata.dst_node_id, kind, ttl=600.0, group_id=message.metadata.group_id)
    made.metadata.__dict__.update(_run_id=1, _src_node_id=1, _message_id=message.metadata.message_id)
    return made


def summed(spy: Spy, privacy: Privacy | None = None) -> Any:
    policy = {"min_replies": 0.2, "client_weights": "samples" if privacy is None else "uniform"}
    return run(METHODS["fbn"](), people(), 1, grid=spy, secure=SecureAggregation(privacy=privacy), policy=policy)


@cache
def lied_to() -> tuple[Spy, Any]:
    spy = Spy()
    return spy, summed(spy)


@listed("case", FALSE)
def test_a_client_refuses_what_departs_from_the_protocol(case: str) -> None:
    assert FALSE[case] in str(lied_to()[0].answers[case].error.reason)


def test_stages_come_once_and_in_train_messages() -> None:
    """Asked for the shares twice, with others lost, a client would give both of its secrets."""
    answers = lied_to()[0].answers
    assert all("stage" in answers[f"{stage} again"].error.reason for stage in [*STAGES][1:])
    assert all(kind in answers[kind].error.reason for kind in ELSEWHERE)


def test_after_all_refusals_the_honest_messages_are_answered() -> None:
    """A server that erred can go on; the shares are kept until they are given, and deleted then. Control: nobody else was asked."""
    spy, ran = lied_to()
    assert [client.refused for client in ran.records[0].clients] == [""] * 5
    assert not any(RECORD_KEY_STATE in state.config_records for state in spy.states())
    told = ran.trajectory[1]
    assert all((told[name] == array).all() for name, array in summed(Spy({})).trajectory[1].items())


def test_a_sum_whose_instruction_lacks_a_number_is_refused_by_its_name() -> None:
    spy = Spy()
    summed(spy, Privacy(1.0, 1.0, 0.01))
    for field in LACKING:
        assert spy.answers[field].error.reason.startswith(f"WireError: config/{field}: ")
