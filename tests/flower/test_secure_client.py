"""What a client refuses, whatever the server asks; and what masks are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

from fl_bn.flower.secagg.instructions import SET_UP, instruction_digest
from fl_bn.flower.secagg.masks import bound_to, client_half, key_stream
from fl_bn.flower.wire.messages import RECORD_KEY_CONFIGS
from fl_bn.methods import METHODS
from tests.flower.inside import Header, Samples, SecureAggregation, to_records
from tests.hostile.liars import people
from tests.in_process import WatchedGrid, client_app, run
from tests.listed import listed

Clients = Callable[..., list[Samples]]


def test_control_flower_s_own_mod_gives_both_secrets_of_a_client() -> None:
    """A client of ours refuses: tests/hostile/test_lying_server.py."""
    mod = client_half.SecAggPlusState(
        current_stage="collect_masked_vectors", nid=7, threshold=1, rd_seed_share_dict={8: b"b"}, sk1_share_dict={8: b"s"}
    )
    answer = client_half._unmask(mod, ConfigRecord({"active_nids": [8], "dead_nids": [8]}))
    assert answer["shares"] == [b"b", b"s"]


@pytest.mark.parametrize("where", ["run", "node"])
def test_a_client_that_must_be_aggregated_securely_answers_nothing_in_the_clear(
    where: str, tiny_clients: Clients, log: pytest.LogCaptureFixture
) -> None:
    clients = tiny_clients((6, 4, 5))
    grid = WatchedGrid(client_app(METHODS["hbn"](), clients), 3)
    for context in grid._contexts.values():
        (context.run_config if where == "run" else context.node_config)["secure-aggregation"] = True
    plain = run(METHODS["hbn"](), clients, 1, grid=grid, policy={"max_failed": 2}, may_fail=True)
    assert not plain.records[0].aggregated
    assert all(f"answers no {kind} message in the clear" in log.text for kind in ("train", "query.statistics"))
    assert not any(record for m in grid.received if m.has_content() for record in m.content.array_records.values())
    assert run(METHODS["hbn"](), clients, 1, grid=grid, secure=SecureAggregation()).records[0].aggregated  # control


@pytest.fixture
def bound() -> Iterator[None]:
    with bound_to(bytes(32)):
        yield


def test_masks_use_the_whole_seed(bound: None) -> None:
    """Flower's generator folds a seed into 32 bits: two with the same XOR of their words are one to it."""
    one, two = bytes(range(32)), bytes(range(4, 8)) + bytes(range(4)) + bytes(range(8, 32))
    shapes = [(1,), (1000,)]
    assert not np.array_equal(key_stream(one, 2**32, shapes)[1], key_stream(two, 2**32, shapes)[1])
    assert np.array_equal(pseudo_rand_gen(one, 2**32, shapes)[1], pseudo_rand_gen(two, 2**32, shapes)[1])  # control
    assert all(np.array_equal(a, b) for a, b in zip(key_stream(one, 2**32, shapes), key_stream(one, 2**32, shapes), strict=True))


def test_masks_are_bound_to_the_instruction() -> None:
    with pytest.raises(LookupError):
        key_stream(b"seed", 2**32, [(1000,)])
    masks = []
    for digest in (bytes(32), bytes(31) + b"1"):
        with bound_to(digest):
            masks += key_stream(b"seed", 2**32, [(1000,)])
    assert (masks[0] == masks[1]).mean() < 0.01


# What the keys of masks depend on: all of an instruction, and nothing that honest servers set for one client

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
    digests = [str(m.content.config_records["fitres.metrics"]["digest"]) for m in ran.grid.received if "fitres.metrics" in m.content]
    assert set(Counter(digests).values()) <= {3, 4}  # three of four clients train, and all may be measured
