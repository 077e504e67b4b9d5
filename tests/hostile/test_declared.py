"""Every field that is read is declared: in the code, in every message of honest runs, and in every form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fl_bn.federation import replies
from fl_bn.federation.fields import Form
from fl_bn.flower.wire import codec, messages
from fl_bn.flower.wire.codec import array_from
from fl_bn.task import CLASSIFICATION, TASKS, Regression
from tests.hostile.liars import WireError
from tests.hostile.recorded import SCENARIOS, recorded
from tests.listed import listed
from tests.refusals import refused
from tools.hostile.mutations import changed_array, npy

FORMS = {name: value for part in (replies, codec, messages) for name, value in vars(part).items() if isinstance(value, Form)}
FORMS |= {f"evaluated, {name}": messages.evaluated(task()) for name, task in TASKS.items()}

EITHER = messages.TO_TRAIN.and_also(messages.TO_MEASURE, messages.TO_EVALUATE, messages.COMBINED_HISTORY)  # a secure sum
HEADER, METRICS = {"fl-bn/header": codec.HEADER}, "fl-bn/metrics"
TOLD = {**HEADER, "fl-bn/config": EITHER}  # in each stage of a secure sum
SUM = "secaggplus_configs"
EXPECTED: dict[str, tuple[dict[str, Form], dict[str, Form]]] = {  # what a message asks for -> its records, and those of the reply
    "query.hello": ({}, {"fl-bn/hello": messages.HELLO}),
    "train": (
        {**HEADER, "fl-bn/config": messages.TO_TRAIN},
        {**HEADER, METRICS: replies.TRAINED.and_also(messages.REQUESTED)},
    ),
    "query.statistics": ({**HEADER, "fl-bn/config": messages.TO_MEASURE}, {**HEADER, METRICS: replies.REPLIED}),
    "evaluate": ({**HEADER, "fl-bn/config": messages.TO_EVALUATE}, {**HEADER, METRICS: messages.evaluated(CLASSIFICATION)}),
    "query.kept": ({**HEADER, "fl-bn/config": messages.TO_TELL}, {**HEADER, METRICS: replies.REPLIED}),
    "train setup": (
        {**TOLD, SUM: messages.SET_UP},
        {SUM: messages.KEYS, "fl-bn/plan": messages.PLAN, "fl-bn/told": messages.OWN_HISTORY},
    ),
    "train share_keys": ({**TOLD, SUM: messages.SHARE_KEYS}, {SUM: messages.SHARES_OUT}),
    "train collect_masked_vectors": ({**TOLD, SUM: messages.COLLECT}, {SUM: messages.MASKED, "fitres.metrics": messages.RESULT}),
    "train unmask": ({**TOLD, SUM: messages.UNMASK}, {SUM: messages.SHARES_BACK}),
}


def undeclared(asked: str, is_reply: bool, content: RecordDict) -> list[str]:
    """Records and fields of a message that no form has."""
    forms, found = EXPECTED[asked][is_reply], []
    for name, record in [*content.config_records.items(), *content.metric_records.items()]:
        if name == "config" and not is_reply and set(record) == {"server-round"}:
            continue  # the user's
        if name in ("fitres.status", "fitres.num_examples"):
            continue  # Flower's, which nobody reads
        if name not in forms:
            found.append(name)
            continue
        for key in record:
            if asked == "train share_keys" and not is_reply and key.isdigit():
                continue  # keys by node
            if forms[name].declared(key) is None:
                found.append(f"{name}/{key}")
    return found


@pytest.mark.slow
def test_every_field_of_every_honest_message_is_declared() -> None:
    """The scenarios have every kind of message."""
    exchanges = [(name, *exchange) for name in SCENARIOS for exchange in recorded(name).exchanges]
    for name, asked, instruction, reply in exchanges:
        assert (name, undeclared(asked, False, instruction) + undeclared(asked, True, reply)) == (name, [])
    assert {asked for _, asked, _, _ in exchanges} == EXPECTED.keys()
    content = RecordDict({"fl-bn/metrics": MetricRecord({"samples": 3, "height": 2.0}), "more": ConfigRecord({"a": 1})})
    assert undeclared("query.statistics", True, content) == ["more", "fl-bn/metrics/height"]  # control


def test_an_undeclared_field_is_dropped() -> None:
    values = messages.HELLO.read({"client": 1, "clients": 2, "samples": 3, "signature": "a", "label-counts": "[1, 2]", "height": 180})
    assert values["label-counts"] == (1, 2)
    assert "height" not in values
    trained = replies.TRAINED.read({"samples": 3, "steps": 1, "loss": 0.5})
    assert ("kept" in trained, trained["waited"]) == (False, 0.0)


BAD = [None, True, math.nan, math.inf, -math.inf, -1, 2**80, 10**5000, 0.5, "", "x" * 10**6, "[" * 10**5, b"x" * 10**6, [], [[]], {}, ()]


def refusal(form: Form, came: dict[str, object]) -> str:
    """Empty: it was taken."""
    try:
        form.read(came)
    except WireError as error:
        return str(error)
    return ""


@listed("name", FORMS)
def test_whatever_comes_is_a_value_or_a_sentence(name: str) -> None:
    form = FORMS[name]
    said = [sentence for field in form.fields for bad in BAD if (sentence := refusal(form, {field: bad}))]
    assert len(said) > len(BAD) * len(form.fields) / 3
    assert all("expected" in sentence and len(sentence) < 500 for sentence in said)
    with refused(form.record) as caught:
        form.read({str(i): i for i in range(20_000)})
    assert "20000" in caught.value.problem


def test_a_metric_out_of_its_range_is_refused_and_one_that_the_task_does_not_declare_is_dropped() -> None:
    form, honest = messages.evaluated(Regression()), {"samples": 3, "loss": 0.5, "r2": -7.5, "mse": 0.5}
    assert form.read({**honest, "accuracy": 1.0}) == honest
    for wrong, field in (({**honest, "r2": 1.5}, "r2"), ({**honest, "mse": -0.5}, "mse"), ({"samples": 3, "loss": 0.5}, "r2")):
        with refused(form.record, field):  # without r2 there is nothing to show
            form.read(wrong)
    assert refusal(form, {**honest, "r2": math.nan}) == ""


# What an array's head says of itself: whatever it is, it is an array of plain numbers, or an error that names the array

HEAD = "{{'descr': {}, 'fortran_order': False, 'shape': {}, }}"
HONEST = [npy(HEAD.format("'<f4'", (2, 3)), bytes(24)), npy(HEAD.format("'<i8'", (3,)), bytes(24))]
ODD = [HEAD.format(*of) for of in (("('<f4',(2,))", (3,)), ("'<f4'", (True,)), ("'O'", (1,)), ("'<f4'", "(2**3,)"))] + ["[" * 3000, ""]


def read_well(data: bytes) -> str:
    try:
        array = array_from(data, "weights", "w")
    except WireError as error:
        return "refused" if len(str(error)) < 1000 and (error.section, error.tensor) == ("weights", "w") else str(error)
    assert (type(array), array.dtype.kind in "biuf", array.dtype.isnative) == (np.ndarray, True, True)
    assert array.nbytes <= len(data)
    return "read"


def test_bytes_are_an_array_of_numbers_or_an_error_of_the_wire() -> None:
    """Control: both come, and what is honest is read."""
    rng = np.random.default_rng(0)
    assert {read_well(data) for data in HONEST} == {"read"}
    assert {read_well(npy(head, bytes(24))) for head in ODD} == {"refused"}
    assert {read_well(changed_array(HONEST[number % 2], rng)) for number in range(600)} == {"read", "refused"}
    assert {read_well(rng.bytes(number)) for number in range(100)} == {"refused"}
