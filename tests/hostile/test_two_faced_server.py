"""A server, or who is between it and its clients, that tells clients of one secure sum different things: whoever stands apart is not in it.

A client's masks depend on every field of its instruction (``tests/flower/test_secure_aggregation.py``), so masks of clients that were
told different things do not cancel. Here is what follows for clients and for an honest server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS

from fl_bn.flower.secagg.instructions import History, to_config
from fl_bn.flower.wire.messages import HISTORY_HASHES, HISTORY_ROUNDS
from fl_bn.methods import METHODS
from tests.hostile.liars import OURS, SecureAggregation, people, to_record, what
from tests.in_process import TWO_STEPS, Run, WatchedGrid, client_app, run
from tests.listed import listed

VICTIM, OTHERS, COLLECT = 2, (1, 3, 4, 5), "train collect_masked_vectors"
Tell = Callable[[Message], None]  # changes an instruction, in place


def record(name: str, **fields: Any) -> Tell:
    def tell(message: Message) -> None:
        message.content[name] = ConfigRecord({**message.content.config_records[name], **fields})

    return tell


def one_bit(message: Message) -> None:
    arrays = {name: one.numpy().copy() for name, one in message.content.array_records[OURS + "weights"].items()}
    first = next(iter(arrays.values()))
    first.flat[0] = np.nextafter(first.flat[0], np.float32(9))
    message.content[OURS + "weights"] = to_record(arrays)


def history(said: History) -> Tell:
    def tell(message: Message) -> None:
        config = message.content.config_records[OURS + "config"]
        kept = {key: value for key, value in config.items() if key not in (HISTORY_ROUNDS, HISTORY_HASHES)}
        message.content[OURS + "config"] = ConfigRecord({**kept, **to_config(said)})

    return tell


class TwoFaced(WatchedGrid):
    """In a ``stage`` of ``round`` the nodes ``told`` get an instruction that ``tell`` changes."""

    def __init__(self, stage: str, tell: Tell, told: Iterable[int], method: str = "fbn", round: int = 1) -> None:
        super().__init__(client_app(METHODS[method](), people(), TWO_STEPS), len(people()))
        self.method, self.stage, self.tell, self.told, self.round = method, stage, tell, set(told), str(round)

    def _answer(self, message: Message) -> Message:
        if what(message) == self.stage and message.metadata.dst_node_id in self.told and message.metadata.group_id == self.round:
            self.tell(message)
        return super()._answer(message)

    def ran(self, rounds: int = 1, **policy: Any) -> Run:
        return run(METHODS[self.method](), people(), rounds, grid=self, secure=SecureAggregation(), may_fail=True, policy=policy)


CASES: dict[str, tuple[str, Tell, Iterable[int]]] = {
    "the threshold, to the victim": ("train setup", record(RECORD_KEY_CONFIGS, threshold=4), [VICTIM]),
    "the clipping range, to the others": ("train setup", record(RECORD_KEY_CONFIGS, clipping_range=1e3), OTHERS),
    "a weight, to the others": (COLLECT, record(OURS + "config", **{"secagg-statistics-weight": 2**20}), OTHERS),
    "one bit of the model, to the victim": (COLLECT, one_bit, [VICTIM]),
}


@listed("case", CASES)
def test_told_something_else_than_the_others_a_client_is_left_out_by_name(case: str) -> None:
    (record,) = TwoFaced(*CASES[case]).ran().records
    assert VICTIM - 1 not in [c.client for c in record.accepted]
    assert "another instruction" in record.clients[VICTIM - 1].refused


def test_a_client_bounds_its_weight_by_itself() -> None:
    """Beside a huge one, others' statistics would vanish in rounding."""
    grid = TwoFaced(COLLECT, record(OURS + "config", **{"secagg-statistics-weight": 2**53}), [VICTIM])
    grid.ran(max_failed=3)
    assert ["the weight of this client's" in m.error.reason for m in grid.received if m.has_error()] == [True]


def test_so_is_a_client_with_another_run_config() -> None:
    """Its secrets' shares take its masks out of the sum."""
    grid = TwoFaced("", one_bit, ())
    grid._contexts[VICTIM].run_config = {"local-steps": 7}
    (record,) = grid.ran().records
    assert record.aggregated
    assert [c.client for c in record.clients if c.refused] == [VICTIM - 1]
    assert "another instruction" in record.clients[VICTIM - 1].refused


# what was told in an earlier round: other BatchNorm layers, say, under which the others' networks are dead, and which they keep (FedBN)

DEAD = {"weight": 0.0, "bias": -10.0, "running_mean": 0.0, "running_var": 1.0}
LAYERS = {f"{layer}.{key}": np.full(size, value, np.float32) for layer, size in ((1, 4), (5, 6)) for key, value in DEAD.items()}
COUNTERS = {f"{layer}.num_batches_tracked": np.array(0) for layer in (1, 5)}


def dead_layers(message: Message) -> None:
    message.content[OURS + "start"] = to_record(LAYERS | COUNTERS)


@listed("said", [{1: bytes(32)}, {}], ids=["another", "none"])
def test_a_client_sends_no_vector_where_the_server_says_something_else_of_round_1(said: History) -> None:
    grid = TwoFaced(COLLECT, history(said), [VICTIM], "fedbn", 2)
    ran = grid.ran(2, max_failed=3)
    refused = {m.metadata.src_node_id for m in grid.received if m.has_error() and "another instruction in round 1" in m.error.reason}
    assert refused == {VICTIM}
    assert [len(record.accepted) for record in ran.records] == [5, 4]


def test_who_was_told_something_else_earlier_is_left_out_by_name_also_in_later_rounds() -> None:
    """Its state stays what it is."""
    done = TwoFaced(COLLECT, dead_layers, [VICTIM], "fedbn").ran(3)
    assert done.records[0].clients[VICTIM - 1].refused  # its masks of round 1 cancelled with nobody's
    for record in done.records[1:]:
        assert [c.client + 1 for c in record.accepted] == [*OTHERS]
        assert "another instruction" in record.clients[VICTIM - 1].refused


class Late(TwoFaced):
    """The victim is there once round 1 has begun."""

    def get_node_ids(self) -> Iterable[int]:
        begun = any(m.metadata.group_id == "1" and "srcs" in m.content.config_records.get(RECORD_KEY_CONFIGS, {}) for m in self.sent)
        return [node for node in super().get_node_ids() if begun or node != VICTIM]


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "part"), [({}, True), ({"max-unknown-rounds": 0}, False)])
def test_what_others_were_told_without_a_client_it_cannot_know_and_its_site_may_refuse(limit: dict[str, int], part: bool) -> None:
    grid = Late("", one_bit, (), "fedbn")
    grid._contexts[VICTIM].node_config.update(limit)
    done = grid.ran(2, at_start=4)
    assert [c.client + 1 for c in done.records[0].clients] == [*OTHERS]
    assert (VICTIM - 1 in [c.client for c in done.records[1].accepted]) == part
    assert any("max-unknown-rounds = 0" in m.error.reason for m in grid.received if m.has_error()) != part
