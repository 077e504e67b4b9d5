"""What the keys of masks depend on: every field and array of an instruction, and nothing that honest servers set for one client."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message

from fl_bn.flower.secagg.instruction_digest import SET_UP, instruction_digest
from fl_bn.flower.wire.messages import RECORD_KEY_CONFIGS
from fl_bn.methods import METHODS
from tests.flower.inside import Header, SecureAggregation, to_records
from tests.hostile.liars import people
from tests.in_process import run
from tests.listed import listed

HEADER = Header("fbn", "train", 1, "signature")
CONFIG = {"learning-rate": 0.1, "secagg-update-weight": 6, "dp-clip": 1.0, "counted": 3, "version": "1", "other": [1, 2]}
RUN = {"local-steps": 2, "method": "fbn"}
WEIGHTS = {"a.weight": np.ones((2, 3), "f4"), "b.weight": np.zeros(2, "f4")}


def state(**fields: Any) -> SimpleNamespace:
    values = dict.fromkeys(SET_UP, 5) | {"clipping_range": 8.0, "cohort": [1, 2, 3]}
    return SimpleNamespace(**values | fields)


def digest(header: Header = HEADER, config: Any = CONFIG, arrays: Any = None, run_config: Any = RUN, **set_up: Any) -> bytes:
    content = to_records({"weights": WEIGHTS} if arrays is None else arrays, header)
    content["fl-bn/config"] = ConfigRecord(dict(config))
    content[RECORD_KEY_CONFIGS] = ConfigRecord({"srcs": [1, 2], "ctxts": [b"a", b"b"]})
    return instruction_digest(Message(content, 1, "train"), run_config, state(**set_up))


OTHERS = {
    **{f"set-up {name}": {name: [1, 2, 4] if name == "cohort" else 6} for name in SET_UP},
    **{f"header {name}": {"header": Header(**{**vars(HEADER), name: 2 if name == "round" else "x"})} for name in vars(HEADER)},
    **{f"config {name}": {"config": {**CONFIG, name: 0}} for name in CONFIG if name != "counted"},
    "a field more": {"config": {**CONFIG, "more": 1}},
    "a field less": {"config": {"counted": 3}},
    "a number of another type": {"config": {**CONFIG, "dp-clip": 1}},
    "a text for bytes": {"config": {**CONFIG, "other": "00"}},
    "the run config": {"run_config": {**RUN, "local-steps": 0}},
    "one bit of an array": {"arrays": {"weights": {**WEIGHTS, "b.weight": np.array([0, 1e-45], "f4")}}},
    "another shape": {"arrays": {"weights": {**WEIGHTS, "a.weight": np.ones((3, 2), "f4")}}},
    "another type": {"arrays": {"weights": {**WEIGHTS, "b.weight": np.zeros(2, "i4")}}},
    "another name": {"arrays": {"weights": {"a.weight": WEIGHTS["a.weight"], "c.weight": WEIGHTS["b.weight"]}}},
    "another section": {"arrays": {"statistics": WEIGHTS}},
    "a section more": {"arrays": {"weights": WEIGHTS, "reference": WEIGHTS}},
    "an array less": {"arrays": {"weights": {"a.weight": WEIGHTS["a.weight"]}}},
}


@listed("case", OTHERS)
def test_whatever_is_told_otherwise_changes_it(case: str) -> None:
    assert digest(**OTHERS[case]) != digest()


def test_no_two_of_these_are_alike() -> None:
    """The order of names and what is told to one client alone change nothing. Bytes are no text."""
    assert len({digest(**changed) for changed in OTHERS.values()}) == len(OTHERS)
    assert digest(arrays={"weights": dict(reversed(WEIGHTS.items()))}, config=dict(reversed(CONFIG.items()))) == digest()
    assert digest(config={**CONFIG, "counted": 9}) == digest()
    assert digest(config={"x": b"\0"}) != digest(config={"x": "00"})


@pytest.mark.parametrize("name", ["fedbn", "hbn", "fixbn"])
def test_an_honest_server_tells_all_clients_of_a_sum_the_same(name: str) -> None:
    ran = run(METHODS[name](), people(4), 2, secure=SecureAggregation(), policy={"fraction": 0.75, "min_cohort": 3, "calibrate": 1})
    assert all(record.aggregated for record in ran.records)
    sums: dict[tuple[str, int, int], set[str]] = {}
    for message in ran.grid.received:
        if message.has_content() and (told := message.content.config_records.get("fitres.metrics")) is not None:
            which = str(told["phase"]), int(told["round"]), int(told["steps"])  # type: ignore[arg-type]
            sums.setdefault(which, set()).add(str(told["digest"]))
    assert all(len(digests) == 1 for (phase, _, _), digests in sums.items() if phase != "measure")
    assert len({digest for digests in sums.values() for digest in digests}) >= len(sums)
