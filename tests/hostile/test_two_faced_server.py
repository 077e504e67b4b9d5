"""A server that tells clients of one secure sum different things, so that one client's vector stands out: it gets noise.

The server is this project's, but for what a liar does otherwise: it compares no instructions, removes each client's private mask by that
client's own instruction, which it knows, and takes the sum whether or not the masks came off. That masks depend on every field of an
instruction is tested in ``tests/flower/test_secure_aggregation.py``; here is what follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS

from fl_bn.flower.local_client import own_sections
from fl_bn.flower.secagg import masks
from fl_bn.flower.secagg.instructions import History, history_of, problem, to_config, with_history
from fl_bn.flower.secagg.sums import Weighting
from fl_bn.flower.secagg.workflow import SecureSum
from fl_bn.flower.wire.messages import HISTORY_HASHES, HISTORY_ROUNDS
from fl_bn.methods import METHODS
from tests.hostile.liars import OURS, ClientState, Privacy, SecureAggregation, people, secure_client, secure_workflow, to_record, what
from tests.in_process import TWO_STEPS, WatchedGrid, client_app, run
from tests.listed import listed

VICTIM, OTHERS, COLLECT = 2, (1, 3, 4, 5), "train collect_masked_vectors"
Tell = Callable[[Message], None]  # changes an instruction, in place


def record(name: str, **fields: Any) -> Tell:
    def tell(message: Message) -> None:
        message.content[name] = ConfigRecord({**message.content.config_records[name], **fields})

    return tell


def weights(size: int) -> Tell:
    return record(OURS + "config", **dict.fromkeys(("secagg-update-weight", "secagg-statistics-weight", "secagg-samples-weight"), size))


def one_bit(message: Message) -> None:
    arrays = {name: one.numpy().copy() for name, one in message.content.array_records[OURS + "weights"].items()}
    first = next(iter(arrays.values()))
    first.flat[0] = np.nextafter(first.flat[0], np.float32(9))
    message.content[OURS + "weights"] = to_record(arrays)


class TwoFaced(WatchedGrid):
    """In a ``stage`` of round 1 the nodes ``told`` get an instruction that ``tell`` changes."""

    def __init__(self, stage: str = "", tell: Tell = one_bit, told: Iterable[int] = (), method: str = "fbn") -> None:
        super().__init__(client_app(METHODS[method](), people(), TWO_STEPS), len(people()))
        self.stage, self.tell, self.told = stage, tell, set(told)

    def _answer(self, message: Message) -> Message:
        if what(message) == self.stage and message.metadata.dst_node_id in self.told and message.metadata.group_id == "1":
            self.tell(message)
        return super()._answer(message)


class Told(NamedTuple):
    """Hold each client's vector before it is masked, in client order, and the mean that the server got, masked still or not."""

    plain: list[np.ndarray]
    mean: np.ndarray

    def apart(self, shown: slice = slice(None)) -> float:
        """Return how far the sum is from the victim's own vector, in units of that vector's length."""
        mine = self.plain[VICTIM - 1][shown]
        return float(np.linalg.norm(len(self.plain) * self.mean[shown] - mine) / np.linalg.norm(mine))


def told(grid: WatchedGrid, digest: Callable[..., bytes] | None = None, privacy: Privacy | None = None) -> Told:
    """Run a round of a dishonest server. ``digest``: what clients' masks are bound to, as a control; None: their instructions."""
    plain, means, digests = list[np.ndarray](), list[np.ndarray](), dict[bytes, bytes]()
    to_vector, masked, unmask = secure_client.to_vector, SecureSum._masked, SecureSum._unmask

    def spied(parts: Any, shapes: Any) -> np.ndarray:
        plain.append(to_vector(parts, shapes))
        return plain[-1]

    def keep(self: SecureSum, *of: Any) -> np.ndarray:
        means.append(unmask(self, *of))
        return means[-1]

    def alike(self: SecureSum, node: int, content: RecordDict) -> Any:
        return replace(masked(self, node, content), digest="00" * 32)

    def masking(seed: bytes, *of: Any) -> list[np.ndarray]:
        digests[seed] = masks._digest.get()
        return masks.key_stream(seed, *of)

    def unmasking(seed: bytes, *of: Any) -> list[np.ndarray]:
        with masks.bound_to(digests[seed]):
            return masks.key_stream(seed, *of)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(masks.client_half, "pseudo_rand_gen", masking)
        patched.setattr(secure_workflow, "key_stream", unmasking)
        patched.setattr(secure_client, "to_vector", spied)
        patched.setattr(SecureSum, "_unmasked", lambda self, whole, clients: True)
        patched.setattr(SecureSum, "_masked", alike)
        patched.setattr(SecureSum, "_unmask", keep)
        if digest is not None:
            patched.setattr(secure_client, "instruction_digest", digest)
            patched.setattr(secure_client, "weight_refusals", lambda *told: iter(()))  # which would bound what else hides the others
        policy = {"max_failed": 1, "client_weights": "samples" if privacy is None else "uniform"}
        run(METHODS["fbn"](), people(), 1, grid=grid, secure=SecureAggregation(privacy=privacy), may_fail=True, policy=policy)
    assert len(plain) == 5, "a client refused what it was told"
    return Told(plain, means[-1])


@cache
def unrelated() -> float:
    """Return the distance of a sum whose masks have nothing to do with each other."""
    fresh = count(1)
    return told(TwoFaced(), lambda *instruction: next(fresh).to_bytes(32, "big")).apart()


HEAVY = 4 * 2**21  # beside which statistics of 4 samples fill one of 2**22 levels, the most that a client accepts
RANGE = record(RECORD_KEY_CONFIGS, clipping_range=1e3)
CASES: dict[str, tuple[str, Tell, Iterable[int]]] = {
    "the threshold, to the victim": ("train setup", record(RECORD_KEY_CONFIGS, threshold=4), [VICTIM]),
    "the clipping range, to the others": ("train setup", RANGE, OTHERS),
    "all weights, to the others": (COLLECT, weights(HEAVY), OTHERS),
    "one bit of the model, to the victim": (COLLECT, one_bit, [VICTIM]),
    "clips and noise, to the others": (COLLECT, record(OURS + "config", **{"dp-clip": 1e-9, "dp-noise": 1e-9}), OTHERS),
}


@listed("case", CASES)
def test_told_otherwise_the_sum_is_noise(case: str) -> None:
    found = told(TwoFaced(*CASES[case]), privacy=Privacy(1.0, 1.0, 0.01) if "noise" in case else None).apart()
    assert 0.8 * unrelated() < found < 1.25 * unrelated()
    assert found > 100


@listed(("stage", "tell"), [(COLLECT, weights(2**53)), ("train setup", RANGE)], ids=["weights", "range"])
def test_control_masks_that_are_bound_to_nothing_show_the_victim(stage: str, tell: Tell) -> None:
    assert told(TwoFaced(stage, tell, OTHERS), lambda *instruction: bytes(32)).apart(slice(None, -3)) < 0.02  # without loss and flags


def test_control_told_the_same_the_sum_is_right() -> None:
    honest = told(TwoFaced())
    assert np.abs(honest.mean - np.mean(honest.plain, axis=0)).max() < 1e-4


def test_an_honest_server_leaves_out_by_name_who_was_told_something_else() -> None:
    """A client with another run config, say: its secrets' shares take its masks out of the sum."""
    grid = TwoFaced()
    grid._contexts[VICTIM].run_config = {"local-steps": 7}
    (record,) = run(METHODS["fbn"](), people(), 1, grid=grid, secure=SecureAggregation()).records
    assert record.aggregated
    assert [c.client for c in record.clients if c.refused] == [VICTIM - 1]
    assert "another instruction" in record.clients[VICTIM - 1].refused


@listed("weights", [(6, 8, 6), (0, 0, 6), (2**53, 8, 6), (6, 2**53, 6), (6, 8, 2**53), (5, 8, 6), (6, 7, 6)], ids=str)
def test_a_client_bounds_the_weights_by_itself(weights: tuple[int, int, int]) -> None:
    """The first two fit the plan: its own counts, or no weight at all."""
    fits = weights in ((6, 8, 6), (0, 0, 6))
    sections, plan = ("weights", "moments", "loss"), secure_client.Plan(6, 8, 2)
    assert bool([*secure_client.weight_refusals(Weighting(*weights), sections, plan, 2**22)]) != fits


# what was told in an earlier round: other BatchNorm layers, say, under which the others' networks are dead, and which they keep (FedBN)

DEAD = {"weight": 0.0, "bias": -10.0, "running_mean": 0.0, "running_var": 1.0}
LAYERS = {f"{layer}.{key}": np.full(size, value, np.float32) for layer, size in ((1, 4), (5, 6)) for key, value in DEAD.items()}
COUNTERS = {f"{layer}.num_batches_tracked": np.array(0) for layer in (1, 5)}
Says = Callable[[int, dict[int, History]], History]  # what the server says of earlier rounds to a node, by what all nodes say


def dead_layers(message: Message) -> None:
    message.content[OURS + "start"] = to_record(LAYERS | COUNTERS)


class Earlier(TwoFaced):
    """In round 1 the nodes ``told`` begin with dead layers; then each node hears what ``says`` has of the rounds before."""

    def __init__(self, told: Iterable[int] = OTHERS, says: Says | None = None) -> None:
        super().__init__(COLLECT, dead_layers, told, "fedbn")
        self.says, self.histories = says, dict[int, History]()

    def _answer(self, message: Message) -> Message:
        config = message.content.config_records.get(OURS + "config", {})
        if what(message) == COLLECT and self.says is not None and HISTORY_ROUNDS in config:
            kept = {key: value for key, value in config.items() if key not in (HISTORY_ROUNDS, HISTORY_HASHES)}
            said = to_config(self.says(message.metadata.dst_node_id, self.histories))
            message.content[OURS + "config"] = ConfigRecord({**kept, **said})
        return super()._answer(message)

    def put_together(self, histories: dict[int, History]) -> tuple[History, dict[int, int]]:
        """Refuse nobody for what it was told before."""
        self.histories = histories
        return next((history for history in histories.values() if history), {}), {}


SAYS: dict[str, tuple[Says, list[int]]] = {  # and who then refuses
    "the others' history": (lambda node, told: told[OTHERS[0]], [VICTIM]),
    "the victim's history": (lambda node, told: told[VICTIM], [*OTHERS]),
    "no history": (lambda node, told: {}, [1, 2, 3, 4, 5]),
    "to each its own": (lambda node, told: told[node], []),
}


@listed("case", SAYS)
def test_told_something_else_than_the_server_says_of_round_1_a_client_sends_no_vector(case: str) -> None:
    """Told each what it was told before, clients have masks that do not cancel."""
    says, refuse = SAYS[case]
    grid = Earlier(OTHERS, says)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(secure_workflow, "put_together", grid.put_together)
        ran = run(METHODS["fedbn"](), people(), 2, grid=grid, secure=SecureAggregation(), may_fail=True, policy={"max_failed": 3})
    refused = {m.metadata.src_node_id for m in grid.received if m.has_error() and "another instruction in round 1" in m.error.reason}
    assert sorted(refused) == refuse
    assert VICTIM - 1 not in [client.client for client in ran.records[1].accepted]


class Late(Earlier):
    """The victim is there once round 1 has begun."""

    def get_node_ids(self) -> Iterable[int]:
        begun = any(m.metadata.group_id == "1" and "srcs" in m.content.config_records.get(RECORD_KEY_CONFIGS, {}) for m in self.sent)
        return [node for node in super().get_node_ids() if begun or node != VICTIM]


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "part"), [(None, True), (0, False)])
def test_what_others_were_told_without_a_client_it_cannot_know_and_its_site_may_refuse(limit: int | None, part: bool) -> None:
    grid = Late(())
    if limit is not None:
        grid._contexts[VICTIM].node_config["max-unknown-rounds"] = limit
    done = run(METHODS["fedbn"](), people(), 2, grid=grid, secure=SecureAggregation(), policy={"at_start": 4})
    assert [c.client + 1 for c in done.records[0].clients] == [*OTHERS]
    assert (VICTIM - 1 in [c.client for c in done.records[1].accepted]) == part
    assert any("max-unknown-rounds = 0" in m.error.reason for m in grid.received if m.has_error()) != part


def test_an_honest_server_leaves_out_by_name_who_was_told_something_else_earlier() -> None:
    """Also in later rounds: its state stays what it is."""
    done = run(METHODS["fedbn"](), people(), 3, grid=Earlier((VICTIM,)), secure=SecureAggregation())
    assert done.records[0].clients[VICTIM - 1].refused  # its masks of round 1 cancelled with nobody's
    for record in done.records[1:]:
        assert [c.client + 1 for c in record.accepted] == [*OTHERS]
        assert "another instruction" in record.clients[VICTIM - 1].refused


def test_control_honest_clients_of_other_rounds_are_all_in_the_sum() -> None:
    """Half of them take part in a round, so that their histories differ rightly."""
    done = run(METHODS["fedbn"](), people(6), 3, secure=SecureAggregation(), policy={"fraction": 0.5})
    assert len({tuple(c.client for c in record.clients) for record in done.records}) > 1
    assert all(record.aggregated and not any(c.refused for c in record.clients) for record in done.records)


def test_a_state_that_came_about_in_the_clear_has_no_part_in_a_sum() -> None:
    """The history goes with the state. A round in the clear ends it, and no server can make one up."""
    local, none = {"local": {"1.weight": torch.ones(4)}}, ClientState()
    assert own_sections(ClientState(1, local), none, 1) == local  # outside a sum
    assert problem(ClientState(1, local), {}) == problem(ClientState(1, local), {1: bytes(32)}) != ""
    first = with_history(b"a" * 32, ClientState(1, local), none, 1)
    assert history_of(ClientState(1, first)) == {1: b"a" * 32}
    assert problem(ClientState(1, first), {1: b"a" * 32}) == ""
    assert own_sections(ClientState(2, local), ClientState(1, first), 2) == local
    assert problem(none, {}) == problem(none, {1: bytes(32)}) == ""
