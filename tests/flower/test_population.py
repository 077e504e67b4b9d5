"""Who is there: clients are waited for, known by their own index, sampled by the seed alone; they join late, leave, come back, refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message

from fl_bn import convert
from fl_bn.flower import BatchNormClient, RunFailed
from fl_bn.methods import METHODS, Method, Role
from tests.flower.inside import Header, Samples, roles, signature, to_records
from tests.in_process import Run, WatchedGrid, client_app, identical, run
from tests.listed import listed
from tests.networks import seeded_network

Clients = Callable[..., list[Samples]]
FBN, FEDAVG = METHODS["fbn"](), METHODS["fedavg"]()


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((6, 4, 5))


@pytest.fixture
def four(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((6, 4, 5, 7))


@pytest.fixture
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_bn.flower.population.time.sleep", lambda seconds: None)


def accepted(ran: Run) -> list[list[int]]:
    return [[c.client for c in record.accepted] for record in ran.records]


def test_node_ids_and_the_order_of_replies_change_no_bit(tiny_clients: Clients) -> None:
    clients = tiny_clients((6, 4, 5, 3, 7))

    def sampled(shuffle: int, seed: int = 0) -> Run:
        grid = WatchedGrid(client_app(FBN, clients), 5, shuffle)
        return run(FBN, clients, 6, grid=grid, policy={"fraction": 0.5, "seed": seed})

    a, b, other = sampled(1), sampled(2), sampled(1, seed=3)
    assert list(a.grid.get_node_ids()) != list(b.grid.get_node_ids())
    assert accepted(a) == accepted(b)
    assert all(cohort == sorted(cohort) and len(cohort) == 3 for cohort in accepted(a))  # 2.5 is rounded up
    assert len({tuple(cohort) for cohort in accepted(a)}) > 1
    assert all(identical(a.trajectory[r], b.trajectory[r]) for r in range(1, 7))
    assert accepted(a) != accepted(other)  # control: another seed
    assert not identical(a.trajectory[6], other.trajectory[6])


# Before round 1


class LateGrid(WatchedGrid):
    """Node ``k`` (from 0) appears at the ``k``-th question who is there; at most ``most`` ever do."""

    asked, most = 0, 99

    def get_node_ids(self) -> Iterable[int]:
        self.asked += 1
        return list(super().get_node_ids())[: min(self.asked, self.most)]


@pytest.mark.usefixtures("no_sleep")
def test_the_run_waits_for_clients_that_appear_one_after_another(clients: list[Samples]) -> None:
    grid = LateGrid(client_app(FBN, clients), 3)
    assert accepted(run(FBN, clients, 1, grid=grid, policy={"wait": 60.0})) == [[0, 1, 2]]
    assert grid.kinds()[0] == "query.hello 0"


@pytest.mark.usefixtures("no_sleep")
@listed(
    ("app", "most", "field"),
    [
        pytest.param({}, 1, "clients 1, 2", id="clients that do not come"),
        pytest.param({"counted": 4}, 99, "clients=3", id="a client of a larger run"),
        pytest.param({"method": METHODS["fedavg"]()}, 99, "0 of 3", id="clients of another method"),
    ],
)
def test_who_is_missing_or_does_not_fit_ends_the_run_by_name(app: dict[str, Any], most: int, field: str, clients: list[Samples]) -> None:
    grid = LateGrid(client_app(app.pop("method", FBN), clients, **app), 3)
    grid.asked, grid.most = 3, most
    with pytest.raises(RunFailed) as told:
        run(FBN, clients, 1, grid=grid, policy={"wait": 0.01})
    assert field in str(told.value)


# Two nodes of one client


class TwinGrid(WatchedGrid):
    """More nodes that serve the partition of node 2, at first offline; ``gone`` are offline, from round ``r`` on ``then[r]``."""

    def __init__(self, clients: list[Samples], twins: tuple[int, ...] = (77,)) -> None:
        super().__init__(client_app(FBN, clients), len(clients))
        for node in twins:
            twin = list(WatchedGrid(client_app(FBN, clients), len(clients))._contexts.values())[1]
            twin.node_id, self._contexts[node] = node, twin
        self.gone, self.then = set(twins), dict[int, set[int]]()

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in super().get_node_ids() if node not in self.gone]

    def rate(self, round: int, rounds: int) -> float:
        self.gone = self.then.pop(round, self.gone)
        return 0.1

    def trained(self) -> dict[str, int]:
        """The node that served client 1, by round."""
        sent = (m.metadata for m in self.sent if m.metadata.message_type == "train")
        return {about.group_id: about.dst_node_id for about in sent if about.dst_node_id not in (1, 3)}


def test_a_second_node_of_one_client_is_refused_by_name(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    grid = TwinGrid(clients)
    grid.then = {1: set()}
    ran = run(FBN, clients, 2, grid=grid, policy={"rate": grid.rate})
    assert log.text.count("node 77 is refused") == 1
    assert identical(ran.trajectory[2], run(FBN, clients, 2).trajectory[2])
    assert grid.trained() == {"1": 2, "2": 2}


def test_a_restarted_client_has_its_place_again_and_the_node_that_was_first_gets_it_back(clients: list[Samples]) -> None:
    """At once: who is there is asked before every round."""
    grid = TwinGrid(clients)
    grid.then = {2: {2}, 3: set(), 5: {2}, 6: set()}
    ran = run(FBN, clients, 6, grid=grid, evaluate=None, policy={"rate": grid.rate})
    assert accepted(ran) == [[0, 1, 2]] * 6
    assert grid.trained() == {"1": 2, "2": 77, "3": 2, "4": 2, "5": 77, "6": 2}


@pytest.mark.usefixtures("no_sleep")
@pytest.mark.parametrize("later", [False, True])
def test_of_two_nodes_that_claim_one_client_before_the_start_neither_is_preferred(later: bool, clients: list[Samples]) -> None:
    class Later(TwinGrid):
        """Node 77 comes second, and node 3 would be the last."""

        asked = 0

        def get_node_ids(self) -> Iterable[int]:
            self.asked += 1
            self.gone = {77, 3} if self.asked < 3 else {3}
            return super().get_node_ids()

    grid = Later(clients) if later else TwinGrid(clients)
    grid.gone = set()
    with pytest.raises(RunFailed, match="nodes 2 and 77"):
        run(FBN, clients, 1, grid=grid, policy={"wait": 60.0})


@listed(
    ("twins", "then", "policy", "cohorts", "trained"),
    [
        ((77,), {1: set(), 3: {77}}, {"at_start": 2}, [[0, 2], [0, 2], [0, 1, 2], [0, 1, 2]], {"3": 2, "4": 2}),
        ((77, 78), {2: {2}, 4: set()}, {}, [[0, 1, 2], [0, 2], [0, 2], [0, 1, 2]], {"1": 2, "4": 2}),
    ],
    ids=["at the start", "in the place of one that is gone"],
)
def test_a_run_goes_on_without_both_until_one_is_left(
    twins: tuple[int, ...], then: Any, policy: Any, cohorts: Any, trained: Any, clients: list[Samples]
) -> None:
    grid = TwinGrid(clients, twins)
    grid.gone, grid.then = then.pop(1, set(twins)), then
    assert accepted(run(FBN, clients, 4, grid=grid, policy={"rate": grid.rate, **policy})) == cohorts
    assert grid.trained() == trained


def test_where_the_operator_names_the_nodes_no_other_is_believed(clients: list[Samples]) -> None:
    """Present from the start, before the true one, or alone: the stranger never takes part."""
    for gone, rounds in ((set[int](), [[0, 1, 2]] * 3), ({2}, [[0, 2]] * 3)):
        grid = TwinGrid(clients)
        grid.gone = gone
        ran = run(FBN, clients, 3, grid=grid, policy={"at_start": 2, "nodes": (1, 2, 3)})
        assert accepted(ran) == rounds
        assert 77 not in grid.trained().values()
    swapped = {"at_start": 1, "nodes": (2, 1, 3)}
    assert accepted(run(FBN, clients, 2, policy=swapped)) == [[2]] * 2
    with pytest.raises(RunFailed):
        run(FBN, clients, 2, policy={**swapped, "at_start": 0})


def test_a_node_of_no_client_is_let_in_once_it_has_its_site_s_new_key(clients: list[Samples]) -> None:
    """West had node 77 when the run was submitted, and has node 2 now. The control: nobody says so."""
    nodes: dict[str, Any] = {"names": ("east", "west", "north"), "nodes": (1, 77, 3), "wait": 0.0}
    with pytest.raises(RunFailed) as told:
        run(FBN, clients, 1, policy=nodes)
    assert "site west" in str(told.value)
    ran = run(FBN, clients, 2, policy={**nodes, "registered": lambda: {1: "east", 2: "west", 3: "north"}})
    assert accepted(ran) == [[0, 1, 2]] * 2


# Leaving and coming back


class ComingAndGoing(WatchedGrid):
    """``gone``: the nodes that are offline. Time passes when the server sleeps, and what ``then`` says happens at its times."""

    def __init__(self, clients: list[Samples], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(client_app(FBN, clients), len(clients))
        self.gone, self.now, self.then = set[int](), 0.0, dict[float, set[int]]()
        monkeypatch.setattr("fl_bn.flower.population.time.sleep", self.sleep)
        monkeypatch.setattr("fl_bn.flower.population.time.monotonic", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in [at for at in self.then if at <= self.now]:
            self.gone = self.then.pop(at)

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in super().get_node_ids() if node not in self.gone]

    def leave(self, at: int, nodes: set[int], back: dict[float, set[int]]) -> Callable[[int, int], float]:
        """A learning rate by whose way, before round ``at``, ``nodes`` go; seconds later others are ``back``'s."""

        def rate(round: int, rounds: int) -> float:
            if round == at:
                self.gone, self.then = nodes, {self.now + seconds: gone for seconds, gone in back.items()}
            return 0.1

        return rate


@pytest.mark.parametrize(
    ("back", "least", "cohorts", "waited"),
    [
        ({30.0: {1}}, 2, [[0, 1, 2], [1, 2], [1, 2]], 30),
        ({70.0: set()}, 2, [[0, 1, 2], [2], [0, 1, 2]], 70),
        ({}, 1, [[0, 1, 2], [2], [2]], 0),
    ],
    ids=["enough are back", "too late", "no minimum"],
)
def test_a_round_waits_until_enough_clients_are_back(
    back: dict[float, set[int]], least: int, cohorts: list[list[int]], waited: int, clients: list[Samples], monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = ComingAndGoing(clients, monkeypatch)
    ran = run(FBN, clients, 3, grid=grid, policy={"min_cohort": least, "wait": 60.0, "rate": grid.leave(2, {1, 2}, back)})
    assert accepted(ran) == cohorts
    assert [record.aggregated for record in ran.records] == [len(cohort) >= least for cohort in cohorts]
    assert identical(ran.trajectory[1], ran.trajectory[2]) == (len(cohorts[1]) < least)
    assert waited <= grid.now <= waited + 2


def test_a_minimum_that_is_there_makes_a_round_whatever_the_fraction(four: list[Samples], monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of four clients is the minimum of two; two that are left are still two, not half of two."""
    grid = ComingAndGoing(four, monkeypatch)
    policy = {"min_cohort": 2, "fraction": 0.5, "wait": 60.0, "rate": grid.leave(2, {1, 2}, {})}
    assert [len(cohort) for cohort in accepted(run(FBN, four, 3, grid=grid, policy=policy))] == [2, 2, 2]


def test_a_node_that_could_not_say_who_it_is_is_asked_again_once_it_was_offline(
    clients: list[Samples], monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """Restarted with the wrong path to its data, then with the right one."""
    grid, introduce = ComingAndGoing(clients, monkeypatch), BatchNormClient.introduce
    wrong: list[int] = []

    def hello(self: BatchNormClient) -> dict[str, int | str]:
        if self.site.client in wrong:
            raise FileNotFoundError("no such data")
        return introduce(self)

    def rate(round: int, rounds: int) -> float:
        grid.gone = {2: {2}, 5: {2}}.get(round, set())
        wrong[:] = [1] if round in (3, 4) else []
        return 0.1

    monkeypatch.setattr(BatchNormClient, "introduce", hello)
    ran = run(FBN, clients, 7, grid=grid, policy={"rate": rate})
    assert accepted(ran) == [[0, 1, 2], [0, 2], [0, 2], [0, 2], [0, 2], [0, 1, 2], [0, 1, 2]]
    assert log.text.count("node 2 is refused: FileNotFoundError") == 1  # and not in every round


# Joining late


def asked(ran: Run, kind: str) -> dict[str, set[int]]:
    """Node ids by round (client + 1), of the messages of ``kind``."""
    found: dict[str, set[int]] = {}
    for message in ran.grid.sent:
        if message.metadata.message_type == kind:
            found.setdefault(message.metadata.group_id, set()).add(message.metadata.dst_node_id)
    return found


class Growing(WatchedGrid):
    """Node ``k`` (from 1) is there once the server has sent the train messages of the round before ``since[k]``."""

    since: Mapping[int, int] = {}

    def get_node_ids(self) -> Iterable[int]:
        rounds = {int(m.metadata.group_id) for m in self.sent if m.metadata.message_type == "train"}
        return [node for node in super().get_node_ids() if max(rounds, default=0) + 1 >= self.since.get(node, 1)]


@pytest.mark.parametrize("name", ["fedbn", "hbn", "fedavg"])
def test_a_client_joins_in_its_round_with_the_shared_tensors_and_its_own_from_scratch(name: str, four: list[Samples]) -> None:
    method = METHODS[name]()
    grid = Growing(client_app(method, four), 4)
    grid.since = {4: 3}
    ran = run(method, four, 4, grid=grid, policy={"at_start": 3})
    assert accepted(ran) == [[0, 1, 2]] * 2 + [[0, 1, 2, 3]] * 2
    for kind in ("query.statistics", "evaluate"):  # nobody asks it before
        assert all(nodes == ({1, 2, 3} if int(group) < 3 else {1, 2, 3, 4}) for group, nodes in asked(ran, kind).items())
    sent = ran.grid.train(3)
    assert all(identical(sent[0][section], sent[3][section]) for section in sent[0])  # the server's
    assert identical(ran.trajectory[2], run(method, four[:3], 2).trajectory[2])  # up to there it is the run of the three
    assert not identical(ran.trajectory[4], run(method, four, 4).trajectory[4])  # control
    kept = ran.grid.states()[3].array_records.get("fl-bn/previous/local")
    if method.keeps(Role.AFFINE) or method.keeps(Role.MIXING):  # its own came from the start, and from nobody
        assert kept is not None
        assert identical({key: array.numpy() for key, array in kept.items()}, first_round_alone(method, four, sent[3]))


def first_round_alone(method: Method, clients: list[Samples], sent: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What client 3 keeps after training once, in round 3, from ``sent``, never having taken part."""
    grid = WatchedGrid(client_app(method, clients), 4)
    model = convert(seeded_network("cnn"), method)
    assert any(method.keeps(role) for role in roles(model).values())
    content = to_records({k: dict(v) for k, v in sent.items()}, Header(method.name, "train", 3, signature(model, method)))
    content["fl-bn/config"] = ConfigRecord({"learning-rate": 0.1})
    (reply,) = grid.send_and_receive([Message(content, 4, "train", ttl=60.0, group_id="3")])
    assert not reply.has_error(), reply.error
    return {key: array.numpy() for key, array in grid.states()[3].array_records["fl-bn/local"].items()}


@pytest.mark.parametrize("name", ["fedbn", "hbn", "fedavg"])
def test_clients_that_come_later_join_when_they_come(name: str, four: list[Samples]) -> None:
    """Without ``at_start`` the run waits for all."""
    method = METHODS[name]()

    def later(**policy: Any) -> Run:
        grid = Growing(client_app(method, four), 4)
        grid.since = {1: 4, 3: 2}
        return run(method, four, 5, grid=grid, policy=policy)

    ran = later(at_start=2)
    assert accepted(ran) == [[1, 3], [1, 2, 3], [1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    with pytest.raises(RunFailed):
        later()


def test_one_that_leaves_and_comes_back_has_joined_already(four: list[Samples], log: pytest.LogCaptureFixture) -> None:
    class Leaving(Growing):
        def get_node_ids(self) -> Iterable[int]:
            trained = len(self.train(2)) > 0 and not self.train(3)
            return [node for node in super().get_node_ids() if not (trained and node == 4)]

    grid = Leaving(client_app(FEDAVG, four), 4)
    grid.since = {4: 2}
    ran = run(FEDAVG, four, 4, grid=grid, policy={"at_start": 3})
    assert accepted(ran) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 3]]
    assert log.text.count("joins in round") == log.text.count("client 3 is back") == 1


# A run that may do without some sites


class NotAllowed(Exception):
    """As a site's policy raises it."""


REFUSAL = NotAllowed("this site's policy has allow-methods = fedbn, but the run's method is 'fedavg'")


@listed(
    ("least", "nodes", "error"),
    [
        pytest.param(2, (2,), REFUSAL, id="a policy, and enough are left"),
        pytest.param(2, (2,), ValueError("NaN in x_train"), id="bad data, and enough are left"),
        pytest.param(0, (2,), REFUSAL, id="all are needed"),
        pytest.param(2, (2, 3), REFUSAL, id="too few are left"),
    ],
)
def test_a_run_starts_without_sites_that_cannot_take_part_where_enough_are_left(
    least: int, nodes: tuple[int, ...], error: Exception, clients: list[Samples], log: pytest.LogCaptureFixture
) -> None:
    app = client_app(FEDAVG, clients)

    def work(message: Message, context: Context) -> Message:
        if message.metadata.dst_node_id in nodes:
            raise error
        return app(message, context)

    policy = {"nodes": (1, 2, 3), "names": ("east", "west", "north"), "min_sites": least}
    if (least, nodes) != (2, (2,)):
        with pytest.raises(RunFailed):
            run(FEDAVG, clients, 2, grid=WatchedGrid(work, 3), policy=policy)  # type: ignore[arg-type]
        return
    ran = run(FEDAVG, clients, 2, grid=WatchedGrid(work, 3), policy=policy)  # type: ignore[arg-type]
    assert accepted(ran) == [[0, 2]] * 2
    assert "without site west" in log.text
    assert ran.strategy.transport.population is not None
    assert str(error) in ran.strategy.transport.population.absent[1]


@pytest.mark.usefixtures("no_sleep")
def test_a_run_starts_without_sites_that_do_not_come_where_enough_are_here(clients: list[Samples]) -> None:
    grid = LateGrid(client_app(FBN, clients), 3)
    grid.asked, grid.most = 3, 2
    assert accepted(run(FBN, clients, 1, grid=grid, policy={"wait": 0.01, "min_sites": 2})) == [[0, 1]]


# Who evaluates


@pytest.mark.parametrize("most", [2, 0])
def test_at_most_so_many_clients_evaluate_in_a_round(most: int, four: list[Samples]) -> None:
    ran = run(METHODS["fedbn"](), four, 4, policy={"evaluate_clients": most})
    told = [set(record.client_evaluation) for record in ran.records]
    assert [len(clients) for clients in told] == [most or 4] * 4
    assert all(asked(ran, "evaluate")[str(i + 1)] == {client + 1 for client in told[i]} for i in range(4))
    assert not most or len(set(map(tuple, told))) > 1  # drawn anew in every round
    assert identical(ran.trajectory[4], run(METHODS["fedbn"](), four, 4).trajectory[4])  # training is as without
