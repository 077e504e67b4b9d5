"""A server that told the others something else in an earlier round, so that what they keep makes their updates vanish: it gets nothing.

In round 1 all but one client get BatchNorm layers under which their networks are dead, and keep them (FedBN). That sum is lost. From round
2 on everybody is told the same. The server is as in ``test_lying_set_up``, and says of round 1 whatever serves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message

from fl_bn.flower.local_client import own_sections
from fl_bn.flower.secagg.instructions import History, history_of, problem, with_history
from fl_bn.flower.secagg.workflow import SecureSum, SumFailed
from fl_bn.flower.wire.messages import HISTORY_HASHES, HISTORY_ROUNDS
from fl_bn.methods import METHODS
from tests.hostile.liars import ClientState, SecureAggregation, people, secure_client, secure_workflow, to_record, what
from tests.hostile.test_lying_set_up import COLLECT, NODES, OTHERS, VICTIM, is_noise, spying
from tests.in_process import TWO_STEPS, WatchedGrid, client_app, run

FEDBN = METHODS["fedbn"]()
LAYERS = {"1": 4, "5": 6}
DEAD = {
    f"{layer}.{key}": np.full(channels, value, np.float32)
    for layer, channels in LAYERS.items()
    for key, value in {"weight": 0.0, "bias": -10.0, "running_mean": 0.0, "running_var": 1.0}.items()
}
COUNTERS = {f"{layer}.num_batches_tracked": np.array(0) for layer in LAYERS}
FEW = 10  # numbers of an evaluation's vector
Says = Callable[[int, dict[int, History]], History]
"""What the server says of earlier rounds to a node, by what the nodes say."""


class Earlier(WatchedGrid):
    """In round 1 the nodes ``told`` are sent dead BatchNorm layers to begin with; then each node hears ``says`` of the rounds before."""

    def __init__(self, told: tuple[int, ...], says: Says | None = None, seen: dict[str, Any] | None = None) -> None:
        super().__init__(client_app(FEDBN, people(), TWO_STEPS), len(people()))
        self.told, self.says, self.seen = told, says, seen or {}

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if what(message) == COLLECT:
            if message.content.config_records["fl-bn/header"]["round"] == 1 and node in self.told:
                message.content["fl-bn/start"] = to_record(DEAD | COUNTERS)
            config = dict(message.content.config_records["fl-bn/config"])
            if self.says is not None and HISTORY_ROUNDS in config:
                history = self.says(node, self.seen["told"])
                config |= {HISTORY_ROUNDS: list(history), HISTORY_HASHES: b"".join(history.values())}
                fields = {k: v for k, v in config.items() if history or k not in (HISTORY_ROUNDS, HISTORY_HASHES)}
                message.content["fl-bn/config"] = ConfigRecord(fields)
        return super()._answer(message)


class Late(Earlier):
    """The victim is there once round 1 has begun."""

    def get_node_ids(self) -> Iterable[int]:
        begun = any(m.metadata.group_id == "1" and "srcs" in m.content.config_records.get("secaggplus_configs", {}) for m in self.sent)
        return [node for node in super().get_node_ids() if begun or node != VICTIM]


def lying(patched: pytest.MonkeyPatch) -> dict[str, Any]:
    """As ``spying``; the sum of round 1 is given up, and nobody is refused for what they were told then."""
    seen, unmask = spying(patched) | {"told": {}}, SecureSum._unmask

    def keep(self: SecureSum, *of: Any) -> np.ndarray:
        mean = unmask(self, *of)
        seen["mean"] = mean if len(mean) > FEW else seen["mean"]
        if self.round == 1:
            raise SumFailed("it is given up", {})
        return mean

    def together(histories: dict[int, History]) -> tuple[History, dict[int, int]]:
        seen["told"] = histories
        return next((history for history in histories.values() if history), {}), {}

    patched.setattr(SecureSum, "_unmask", keep)
    patched.setattr(secure_workflow, "put_together", together)
    return seen


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return lying(monkeypatch)


def ran(grid: Earlier, rounds: int = 2) -> Any:
    return run(FEDBN, people(), rounds, grid=grid, secure=SecureAggregation(), may_fail=True, policy={"max_failed": 3})


def vectors_of_round_2(seen: dict[str, Any]) -> list[np.ndarray]:
    return [vector for vector in seen["plain"] if len(vector) > FEW][5:]


@pytest.fixture(scope="module")
def control() -> float:
    """Return the distance of a sum whose masks have nothing to do with each other, to the victim's vector."""
    fresh = iter(range(1, 100))
    with pytest.MonkeyPatch.context() as patched:
        seen = lying(patched)
        patched.setattr(secure_client, "instruction_digest", lambda *told: next(fresh).to_bytes(32, "big"))
        ran(Earlier(()))
        return float(np.linalg.norm(len(NODES) * seen["mean"] - vectors_of_round_2(seen)[VICTIM - 1]))


SAYS: dict[str, tuple[Says, list[int]]] = {  # and who then refuses
    "the others' history": (lambda node, told: told[OTHERS[0]], [VICTIM]),
    "the victim's history": (lambda node, told: told[VICTIM], [*OTHERS]),
    "no history": (lambda node, told: {}, [*NODES]),
}


@pytest.mark.parametrize("case", SAYS)
def test_whoever_was_told_something_else_than_the_server_says_of_round_1_sends_no_vector(case: str, seen: dict[str, Any]) -> None:
    says, refuse = SAYS[case]
    grid = Earlier(OTHERS, says, seen)
    ran(grid)
    refused = {m.metadata.src_node_id for m in grid.received if m.has_error() and "another instruction in round 1" in m.error.reason}
    assert sorted(refused) == refuse
    assert len(vectors_of_round_2(seen)) == 5 - len(refuse)


@pytest.mark.slow
def test_told_each_what_it_was_told_before_their_masks_do_not_cancel(control: float, seen: dict[str, Any]) -> None:
    ran(Earlier(OTHERS, lambda node, told: told[node], seen))
    assert len(vectors_of_round_2(seen)) == 5
    found = float(np.linalg.norm(len(NODES) * seen["mean"] - vectors_of_round_2(seen)[VICTIM - 1]))
    assert is_noise(found, control, {"plain": vectors_of_round_2(seen)})


def test_control_where_nobody_looks_back_the_sum_is_the_victim_s_vector(seen: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As before: the masks of round 2 are bound to what is told in round 2. Only the last layer's bias learns at the others."""
    monkeypatch.setattr(secure_client, "problem", lambda *of: "")
    ran(Earlier(OTHERS, SAYS["no history"][0], seen))
    vectors, learns = vectors_of_round_2(seen), slice(None, -7)  # without the last bias, loss and flags
    shown, mine = len(NODES) * seen["mean"][learns], vectors[VICTIM - 1][learns]
    assert np.linalg.norm(mine) > 0.01
    assert np.linalg.norm(shown - mine) < 0.02 * np.linalg.norm(mine)


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "part"), [(None, True), (0, False)])
def test_what_others_were_told_without_a_client_it_cannot_know_and_its_site_may_refuse(limit: int | None, part: bool) -> None:
    grid = Late(())
    if limit is not None:
        grid._contexts[VICTIM].node_config["max-unknown-rounds"] = limit
    done = run(FEDBN, people(), 2, grid=grid, secure=SecureAggregation(), policy={"at_start": len(people()) - 1})
    assert [c.client + 1 for c in done.records[0].clients] == [*OTHERS]
    assert (VICTIM - 1 in [c.client for c in done.records[1].accepted]) == part
    assert any("max-unknown-rounds = 0" in m.error.reason for m in grid.received if m.has_error()) != part


def test_an_honest_server_leaves_out_by_name_who_was_told_something_else() -> None:
    done = ran(Earlier((VICTIM,)), 3)
    assert done.records[0].clients[VICTIM - 1].refused  # its masks of round 1 cancelled with nobody's
    for record in done.records[1:]:
        assert record.aggregated
        assert [c.client + 1 for c in record.accepted] == [*OTHERS]
        assert "another instruction" in record.clients[VICTIM - 1].refused


@pytest.mark.sample("[fedbn")
@pytest.mark.parametrize("name", ["fedbn", "hbn"])
def test_control_honest_clients_of_other_rounds_are_all_in_the_sum(name: str) -> None:
    """Half of them take part in a round, so that their histories differ rightly."""
    people_of = people(8)
    done = run(METHODS[name](), people_of, 4, secure=SecureAggregation(), policy={"fraction": 0.5})
    cohorts = {tuple(c.client for c in record.clients) for record in done.records}
    assert len(cohorts) > 2
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
