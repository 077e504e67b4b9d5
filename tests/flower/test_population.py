"""Who is there: clients are waited for, known by their own index, sampled by the seed alone; they join late, leave, come back, refuse."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from flwr.app import Context, Message

from fl_bn.flower import BatchNormClient, RunFailed
from fl_bn.flower.wire.messages import here
from fl_bn.methods import METHODS
from tests.flower.inside import Clients, Samples
from tests.in_process import Run, WatchedGrid, client_app, identical, run
from tests.listed import listed

FBN, FEDAVG = METHODS["fbn"](), METHODS["fedavg"]()


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


def test_a_client_that_comes_later_joins_in_its_round(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    grid = TwinGrid(clients, ())
    grid.gone, grid.then = {2}, {3: set()}
    ran = run(FBN, clients, 4, grid=grid, policy={"at_start": 2, "rate": grid.rate})
    assert accepted(ran) == [[0, 2]] * 2 + [[0, 1, 2]] * 2
    assert "client 1 joins in round 3" in log.text


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


# Sites are called by their names, and sides of different versions refuse each other by both

NAMED: dict[str, Any] = {"nodes": (1, 2, 3), "names": ("north", "south", "east")}


def refusing(clients: list[Samples]) -> WatchedGrid:
    """Client 1 fails in round 2."""

    def disturb(client: int, what: str) -> None:
        if client == 1 and what == "train 2":
            raise OSError("the disk is gone")

    return WatchedGrid(client_app(FBN, clients, disturb=disturb), 3)


def test_log_and_records_speak_of_sites(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    run(FBN, clients, 2, grid=refusing(clients), policy=NAMED)
    assert "round 2: site south's reply is not used: " in log.text
    said = [line for line in log.messages if "raised:" not in line]  # by the engine that plays the client, too
    assert not [line for line in said if "client 1" in line or "node 2" in line]
    log.clear()
    run(FBN, clients, 2, grid=refusing(clients), policy={"nodes": NAMED["nodes"]})
    assert "round 2: client 1's reply is not used: " in log.text  # control


def test_who_is_missing_goes_and_comes_back_by_name(
    clients: list[Samples], monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    grid = ComingAndGoing(clients, monkeypatch)
    grid.gone = {2, 3}
    with pytest.raises(RunFailed, match="sites south, east"):
        run(FBN, clients, 1, grid=grid, policy={**NAMED, "wait": 1.0})
    grid = ComingAndGoing(clients, monkeypatch)
    run(FBN, clients, 3, grid=grid, policy={**NAMED, "min_cohort": 3, "wait": 60.0, "rate": grid.leave(2, {1, 2}, {30.0: set()})})
    assert "offline: sites north, south" in log.text
    assert "site south is back" in log.text
    swapped = {**NAMED, "nodes": (2, 1, 3)}
    with pytest.raises(RunFailed, match="site south .* site north"):
        run(FBN, clients, 2, policy=swapped)


@listed(
    ("where", "what", "word"),
    [
        ("fl_bn.flower.handlers.here", lambda: "0.0.9", "site north .* fl-bn 0.0.9"),
        ("fl_bn.flower.handlers.here", lambda: "", "site north .* an earlier"),
    ],
)
def test_a_client_of_another_version_is_refused_by_both(
    where: str, what: Any, word: str, clients: list[Samples], log: pytest.LogCaptureFixture
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, what)
        with pytest.raises(RunFailed) as error:
            run(FBN, clients, 1, policy=NAMED)
    assert re.search(word, f"{error.value} {log.text}")
    assert here() in str(error.value)
    assert len(run(FBN, clients, 1, policy=NAMED).records) == 1  # control
