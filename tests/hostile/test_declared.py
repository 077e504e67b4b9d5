"""Every field that is read is declared: in the code, in every message of honest runs, and in every form."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fl_bn.federation.checkpoint import FORMAT
from fl_bn.federation.fields import Undeclared, Values
from fl_bn.flower.app.checkpoint import Checkpoint
from fl_bn.flower.app.client_state import NOTHING, MemoryState
from fl_bn.flower.wire import messages
from fl_bn.flower.wire.fields import Form
from fl_bn.support import durable
from fl_bn.support.wire import WireError, excerpt, printable
from fl_bn.task import CLASSIFICATION, TASKS, Regression
from tests.hostile.recorded import SCENARIOS, recorded
from tests.listed import listed
from tests.refusals import refused

ROOT = Path(__file__).parents[2]
FORMS = {name: value for name, value in vars(messages).items() if isinstance(value, Form)}
FORMS |= {f"evaluated, {name}": messages.evaluated(task()) for name, task in TASKS.items()}

# who may touch records as they came, and why; every other file of the package gets ``Values``
READERS = {
    "fl_bn/flower/wire/fields.py": "the forms themselves",
    "fl_bn/flower/wire/codec.py": "arrays, and whether there is a header",
    "fl_bn/flower/wire/replies.py": "decodes a reply; the disclosure report counts it before anything is checked",
    "fl_bn/flower/wire/gate.py": "this side's own replies; the kind of a message, before its form is chosen",
    "fl_bn/flower/wire/versions.py": "whether a message is of an earlier fl-bn",
    "fl_bn/flower/in_process.py": "the ServerApp's own state",
    "fl_bn/flower/app/client_state.py": "a client's own state",
    "fl_bn/flower/secagg/stages.py": "messages that this side makes; replies through forms",
    "fl_bn/flower/secagg/client.py": "the stage, before its form is chosen; arrays that are decoded; this side's own state",
    "fl_bn/flower/secagg/instruction_digest.py": "hashes an instruction as it came",
    "fl_bn/flower/own/legacy_client.py": "takes parameters and numbers of a reply that its own client made",
    "fl_bn/flower/own/legacy_server.py": "the user's own metrics of replies that were checked",
    "fl_bn_site/leaving.py": "counts what a reply of this side holds, for the site's audit log",
    "fl_bn_site/policy.py": "this side's own reply, against the site's policy",
}


def reads_records(source: str) -> bool:
    records = {"config_records", "metric_records", "array_records", "records_of", "our_records", "their_records"}
    return any(getattr(node, "attr", getattr(node, "id", "")) in records for node in ast.walk(ast.parse(source)))


def test_records_as_they_came_are_read_in_few_places() -> None:
    files = [path for house in ("fl_bn", "fl_bn_site") for path in (ROOT / house).rglob("*.py")]
    assert {path.relative_to(ROOT).as_posix() for path in files if reads_records(path.read_text())} == set(READERS)
    assert reads_records("x = reply.content.metric_records['metrics']")  # control


EITHER = messages.TO_TRAIN.and_also(messages.TO_MEASURE, messages.TO_EVALUATE, messages.COMBINED_HISTORY)  # a secure sum
EXPECTED: dict[tuple[str, bool], dict[str, Form]] = {  # by what a message asks for, and whether it is the reply
    ("query.hello", False): {"fl-bn/config": messages.TO_GREET},
    ("query.hello", True): {"fl-bn/hello": messages.HELLO},
    ("train", False): {"fl-bn/header": messages.HEADER, "fl-bn/config": messages.TO_TRAIN},
    ("train", True): {"fl-bn/header": messages.HEADER, "fl-bn/metrics": messages.TRAINED.and_also(messages.REQUESTED)},
    ("query.statistics", False): {"fl-bn/header": messages.HEADER, "fl-bn/config": messages.TO_MEASURE},
    ("query.statistics", True): {"fl-bn/header": messages.HEADER, "fl-bn/metrics": messages.REPLIED},
    ("evaluate", False): {"fl-bn/header": messages.HEADER, "fl-bn/config": messages.TO_EVALUATE},
    ("evaluate", True): {"fl-bn/header": messages.HEADER, "fl-bn/metrics": messages.evaluated(CLASSIFICATION)},
    ("query.kept", False): {"fl-bn/header": messages.HEADER, "fl-bn/config": messages.TO_TELL},
    ("query.kept", True): {"fl-bn/header": messages.HEADER, "fl-bn/metrics": messages.REPLIED},
    ("train setup", False): {"secaggplus_configs": messages.SET_UP, "fl-bn/header": messages.HEADER, "fl-bn/config": EITHER},
    ("train setup", True): {"secaggplus_configs": messages.KEYS, "fl-bn/plan": messages.PLAN, "fl-bn/told": messages.OWN_HISTORY},
    ("train share_keys", False): {"secaggplus_configs": messages.SHARE_KEYS, "fl-bn/header": messages.HEADER, "fl-bn/config": EITHER},
    ("train share_keys", True): {"secaggplus_configs": messages.SHARES_OUT},
    ("train collect_masked_vectors", False): {
        "secaggplus_configs": messages.COLLECT,
        "fl-bn/header": messages.HEADER,
        "fl-bn/config": EITHER,
    },
    ("train collect_masked_vectors", True): {
        "secaggplus_configs": messages.MASKED,
        "fitres.metrics": messages.RESULT,
        "fitres.status": messages.STATUS,
        "fitres.num_examples": messages.WEIGHT,
    },
    ("train unmask", False): {"secaggplus_configs": messages.UNMASK, "fl-bn/header": messages.HEADER, "fl-bn/config": EITHER},
    ("train unmask", True): {"secaggplus_configs": messages.SHARES_BACK},
}


def undeclared(asked: str, is_reply: bool, content: RecordDict) -> list[str]:
    """Records and fields of a message that no form has."""
    forms, found = EXPECTED[asked, is_reply], []
    for name, record in [*content.config_records.items(), *content.metric_records.items()]:
        if name == "config" and not is_reply and set(record) == {"server-round"}:
            continue  # the user's
        if name not in forms:
            found.append(name)
            continue
        for key in record:
            if asked == "train share_keys" and not is_reply and key.isdigit():
                continue  # keys by node
            try:
                forms[name].declared(key)
            except Undeclared:
                found.append(f"{name}/{key}")
    return found


@listed("name", SCENARIOS)
def test_every_field_of_every_honest_message_is_declared(name: str) -> None:
    for asked, instruction, reply in recorded(name).exchanges:
        assert undeclared(asked, False, instruction) == []
        assert undeclared(asked, True, reply) == []


def test_the_scenarios_hold_every_kind_of_message() -> None:
    seen = {asked for name in SCENARIOS for asked, _, _ in recorded(name).exchanges}
    assert seen == {asked for asked, _ in EXPECTED}
    content = RecordDict({"fl-bn/metrics": MetricRecord({"samples": 3, "height": 2.0}), "more": ConfigRecord({"a": 1})})
    assert undeclared("query.statistics", True, content) == ["more", "fl-bn/metrics/height"]  # control


def test_to_read_an_undeclared_field_is_an_error() -> None:
    values = messages.HELLO.read({"client": 1, "clients": 2, "samples": 3, "signature": "a", "label-counts": "[1, 2]", "height": 180})
    assert (values["client"], values.get("samples"), values["label-counts"], "signature" in values) == (1, 3, (1, 2), True)
    for read in (lambda: values["height"], lambda: values.get("height"), lambda: "height" in values):
        with pytest.raises(Undeclared, match="hello/height"):
            read()
    trained = messages.TRAINED.read({"samples": 3, "steps": 1, "loss": 0.5})
    assert (trained.get("kept"), trained.get("kept", 7), "kept" in trained, trained["waited"]) == (None, 7, False, 0.0)
    with pytest.raises(KeyError):
        trained["kept"]


BAD = [None, True, math.nan, math.inf, -math.inf, -1, 2**80, 10**5000, 0.5, "", "x" * 10**6, "[" * 10**5, b"x" * 10**6, [], [[]], {}, ()]


def refusal(form: Form, came: dict[str, object]) -> str:
    """Empty: it was taken."""
    try:
        assert isinstance(form.read(came), Values)
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


def test_what_came_is_shown_in_a_few_characters_on_one_line() -> None:
    shown = [
        printable("a\nb\x1b[31m"),
        printable("x" * 10**7),
        excerpt(10**5000),
        excerpt([0] * 10**6),
        str(WireError("a\nb", "c" * 1000, "bad")),
    ]
    assert all(text.isprintable() and len(text) < 1200 for text in shown)


def test_a_checkpoint_whose_state_nests_is_damaged_and_ends_nothing(tmp_path: Path) -> None:
    about = {"format": FORMAT, "state": "[" * 100_000, "run_id": "{}", "generators": ""}
    durable.save_tensors(tmp_path / "checkpoint.safetensors", {"arrays/a": torch.zeros(1)}, about)
    with pytest.raises(durable.Damaged):
        Checkpoint.load(tmp_path / "checkpoint.safetensors")


def test_what_a_client_kept_in_another_form_is_no_state_of_its_own() -> None:
    for kept in ({"signature": "a", "round": 1.5}, {"signature": "a"}, {"round": 1}):
        state = RecordDict({"fl-bn/kept-for": ConfigRecord(kept), "fl-bn/local": ArrayRecord({"a": Array(np.zeros(2))})})
        assert MemoryState(state, "a").read(before=9) == NOTHING
    local = ArrayRecord({"a": Array(np.zeros(2))})
    state = RecordDict({"fl-bn/kept-for": ConfigRecord({"signature": "a", "round": 1}), "fl-bn/local": local})
    assert MemoryState(state, "a").read(before=9).round == 1  # control
