"""Clients that join during training: by plan (``joining``), or when they come (``at_start``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message

from fl_bn.conversion import convert
from fl_bn.federation.local import Samples
from fl_bn.federation.payload import signature
from fl_bn.federation.rounds import Rounds
from fl_bn.flower import RunFailed
from fl_bn.flower.wire.codec import Header, to_records
from fl_bn.methods import METHODS, Method
from fl_bn.roles import Role, roles
from tests.in_process import Run, WatchedGrid, client_app, identical, run
from tests.networks import seeded_network

Clients = Callable[..., list[Samples]]
NAMES = ("fedbn", "hbn", "fedavg")


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((6, 4, 5, 7))


def accepted(ran: Run) -> list[list[int]]:
    return [[c.client for c in record.accepted] for record in ran.records]


def asked(ran: Run, kind: str) -> dict[str, list[int]]:
    """Node ids by round (client + 1), of the messages of ``kind``."""
    found: dict[str, list[int]] = {}
    for message in ran.grid.sent:
        if message.metadata.message_type == kind:
            found.setdefault(message.metadata.group_id, []).append(message.metadata.dst_node_id)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_client_joins_in_its_round_with_the_shared_tensors_and_its_own_from_scratch(
    name: str, clients: list[Samples], log: pytest.LogCaptureFixture
) -> None:
    method = METHODS[name]()
    ran = run(method, clients, 4, policy={"joining": {3: 3}})
    assert accepted(ran) == [[0, 1, 2]] * 2 + [[0, 1, 2, 3]] * 2
    assert log.text.count("joins in round") == 1
    assert "client 3 joins in round 3" in log.text
    assert "starting with 3 clients; client 3 may join later" in log.text
    for kind in ("query.statistics", "evaluate"):  # nobody asks it before
        for group, nodes in asked(ran, kind).items():
            assert sorted(set(nodes)) == ([1, 2, 3] if int(group) < 3 else [1, 2, 3, 4]), (kind, group)
    sent = ran.grid.train(3)
    assert all(identical(sent[0][section], sent[3][section]) for section in sent[0])  # the server's
    three = run(method, clients[:3], 2)  # up to there it is the run of the three
    assert identical(ran.trajectory[2], three.trajectory[2])
    assert not identical(ran.trajectory[4], run(method, clients, 4).trajectory[4])  # control
    kept = ran.grid.states()[3].array_records.get("fl-bn/previous/local")
    assert kept is None or name != "fedavg"
    if name != "fedavg":  # round 3's own tensors came from the start, not from another client's or the server's
        alone = first_round_alone(method, clients, sent[3])
        assert kept is not None
        assert identical({key: array.numpy() for key, array in kept.items()}, alone)


def first_round_alone(method: Method, clients: list[Samples], sent: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What client 3 keeps after training once, in round 3, from ``sent``, never having taken part."""
    grid = WatchedGrid(client_app(method, clients), 4)
    model = convert(seeded_network("cnn"), method)
    local = [key for key, role in roles(model).items() if role in method.local]
    assert local
    assert {roles(model)[key] for key in local} <= {Role.AFFINE, Role.STATISTIC, Role.COUNTER, Role.MIXING}
    content = to_records({k: dict(v) for k, v in sent.items()}, Header(method.name, "train", 3, signature(model, method)))
    content["fl-bn/config"] = ConfigRecord({"learning-rate": 0.1})
    (reply,) = grid.send_and_receive([Message(content, 4, "train", ttl=60.0, group_id="3")])
    assert not reply.has_error(), reply.error
    return {key: array.numpy() for key, array in grid.states()[3].array_records["fl-bn/local"].items()}


class Growing(WatchedGrid):
    """Node ``k`` (from 1) is there once the server has sent the train messages of the round before ``since[k]``."""

    since: Mapping[int, int] = {}

    def get_node_ids(self) -> Iterable[int]:
        rounds = {int(m.metadata.group_id) for m in self.sent if m.metadata.message_type == "train"}
        return [node for node in super().get_node_ids() if max(rounds, default=0) + 1 >= self.since.get(node, 1)]


@pytest.mark.parametrize("name", NAMES)
def test_clients_that_come_later_join_when_they_come(name: str, clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    """As by plan, bit for bit."""
    method = METHODS[name]()
    grid = Growing(client_app(method, clients), 4)
    grid.since = {1: 4, 3: 2}
    ran = run(method, clients, 5, grid=grid, policy={"at_start": 2})
    assert accepted(ran) == [[1, 3], [1, 2, 3], [1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert "client 2 joins in round 2" in log.text
    assert "client 0 joins in round 4" in log.text
    assert log.text.count("joins in round") == 2
    planned = run(method, clients, 5, policy={"joining": {0: 4, 2: 2}})
    assert all(identical(ran.trajectory[r], planned.trajectory[r]) for r in ran.trajectory)


def test_without_at_start_the_run_waits_for_all(clients: list[Samples]) -> None:
    grid = Growing(client_app(METHODS["fedavg"](), clients), 4)
    grid.since = {1: 4}
    with pytest.raises(RunFailed, match=r"only 3 of 4 clients came within 0 s \(missing: client 0\)\. Start the others, or lower"):
        run(METHODS["fedavg"](), clients, 5, grid=grid)
    with pytest.raises(RunFailed, match=r"only 3 of 4 clients came within 0 s .* or lower `clients-at-start`"):
        run(METHODS["fedavg"](), clients, 5, grid=grid, policy={"at_start": 4})


def test_a_client_with_a_plan_that_is_late_joins_when_it_comes(clients: list[Samples]) -> None:
    grid = Growing(client_app(METHODS["fedavg"](), clients), 4)
    grid.since = {4: 4}
    ran = run(METHODS["fedavg"](), clients, 5, grid=grid, policy={"joining": {3: 2}})
    assert accepted(ran) == [[0, 1, 2]] * 3 + [[0, 1, 2, 3]] * 2


def test_cohorts_are_drawn_from_those_who_joined(clients: list[Samples]) -> None:
    policy = {"joining": {3: 6}, "fraction": 0.5, "seed": 2}
    ran, again = (run(METHODS["fedavg"](), clients, 12, policy=policy) for _ in range(2))
    assert accepted(ran) == accepted(again)
    assert all(3 not in cohort for cohort in accepted(ran)[:5])
    assert any(3 in cohort for cohort in accepted(ran)[5:])
    assert {len(cohort) for cohort in accepted(ran)} == {2}


def test_one_that_leaves_and_comes_back_has_joined_already(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    class Leaving(Growing):
        def get_node_ids(self) -> Iterable[int]:
            trained = len(self.train(2)) > 0 and not self.train(3)
            return [node for node in super().get_node_ids() if not (trained and node == 4)]

    grid = Leaving(client_app(METHODS["fedavg"](), clients), 4)
    grid.since = {4: 2}
    ran = run(METHODS["fedavg"](), clients, 4, grid=grid, policy={"at_start": 3})
    assert accepted(ran) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 3]]
    assert log.text.count("client 3 joins in round 2") == log.text.count("joins in round") == 1
    assert "client 3 is back" in log.text


def test_a_late_client_of_a_larger_run_is_refused_and_the_run_goes_on(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    grid = Growing(client_app(METHODS["fedavg"](), clients), 4)
    stranger = next(iter(WatchedGrid(client_app(METHODS["fedavg"](), clients, counted=9), 1)._contexts.values()))
    grid._contexts[77], stranger.node_id, grid.since = stranger, 77, {77: 2}
    own = grid._app
    other = client_app(METHODS["fedavg"](), clients, counted=9)
    grid._app = lambda message, context: (other if context.node_id == 77 else own)(message=message, context=context)  # type: ignore[assignment]
    ran = run(METHODS["fedavg"](), clients, 3, grid=grid)
    assert accepted(ran) == [[0, 1, 2, 3]] * 3
    assert "node 77 is refused: the run is for 4 clients, but node 77 says that there are 9" in log.text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"joining": {4: 2}}, r"joining \(join-rounds\) must name clients 0\.\.3, but got \[4\]"),
        ({"joining": {3: 2}, "at_start": 4}, r"at_start must be 0\.\.3, the number of clients that may take part in round 1, but got 4"),
        ({"joining": dict.fromkeys(range(4), 2)}, "must leave a client for round 1, but lets all 4 clients join later"),
    ],
)
def test_plans_that_cannot_be(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rounds(4, **values)  # type: ignore[arg-type]
