"""Who is there: clients are waited for, known by their own index, and sampled in an order that the seed alone decides."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable

import pytest
from flwr.app import Message

from fl_bn.federation.local import Samples
from fl_bn.federation.rounds import Rounds
from fl_bn.flower import BatchNormClient, RunFailed
from fl_bn.flower.population import round_half_up, sample_cohort
from fl_bn.methods import METHODS
from tests.in_process import Run, WatchedGrid, client_app, identical, run

Clients = Callable[..., list[Samples]]
FBN = METHODS["fbn"]()


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((6, 4, 5))


@pytest.fixture
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_bn.flower.population.time.sleep", lambda seconds: None)


def test_node_ids_and_the_order_of_replies_change_no_bit(tiny_clients: Clients) -> None:
    clients = tiny_clients((6, 4, 5, 3, 7, 4))

    def sampled(shuffle: int, seed: int = 0) -> Run:
        grid = WatchedGrid(client_app(FBN, clients), 6, shuffle)
        return run(FBN, clients, 6, grid=grid, policy={"fraction": 0.5, "seed": seed})

    a, b, other = sampled(1), sampled(2), sampled(1, seed=3)
    assert list(a.grid.get_node_ids()) != list(b.grid.get_node_ids())
    cohorts = [[c.client for c in record.clients] for record in a.records]
    assert cohorts == [[c.client for c in record.clients] for record in b.records]
    assert all(cohort == sorted(cohort) and len(cohort) == 3 for cohort in cohorts)
    assert len({tuple(cohort) for cohort in cohorts}) > 1
    assert all(identical(a.trajectory[r], b.trajectory[r]) for r in range(1, 7))
    assert cohorts != [[c.client for c in record.clients] for record in other.records]  # control: another seed
    assert not identical(a.trajectory[6], other.trajectory[6])


def test_sampling_ignores_the_order_of_the_population() -> None:
    assert sample_cohort([3, 1, 2, 0], 2, random.Random("0/1")) == sample_cohort([0, 1, 2, 3], 2, random.Random("0/1"))
    assert [round_half_up(x) for x in (0.5, 1.4, 1.5, 2.5)] == [1, 1, 2, 3]


class LateGrid(WatchedGrid):
    """Node ``k`` (from 0) appears at the ``k``-th question who is there; at most ``most`` ever do."""

    asked, most = 0, 99

    def get_node_ids(self) -> Iterable[int]:
        self.asked += 1
        return list(super().get_node_ids())[: min(self.asked, self.most)]


@pytest.mark.usefixtures("no_sleep")
def test_the_run_waits_for_clients_that_appear_one_after_another(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    grid = LateGrid(client_app(FBN, clients), 3)
    ran = run(FBN, clients, 1, grid=grid, policy={"wait": 60.0})
    assert [c.client for c in ran.records[0].accepted] == [0, 1, 2]
    assert "waiting for clients: 1 of 3 are here" in log.text
    assert "waiting for clients: 2 of 3 are here" in log.text
    assert grid.kinds()[0] == "query.hello 0"


@pytest.mark.usefixtures("no_sleep")
def test_missing_clients_are_named_when_the_wait_is_over(clients: list[Samples]) -> None:
    grid = LateGrid(client_app(FBN, clients), 3)
    grid.most = 1
    with pytest.raises(
        RunFailed,
        match=r"only 1 of 3 clients came within 0 s \(missing: clients 1, 2\)\. Start the others, or lower `clients` .*wait-timeout=600",
    ):
        run(FBN, clients, 1, grid=grid, policy={"wait": 0.01})


def test_a_client_of_a_larger_run_is_refused_with_what_to_do(clients: list[Samples]) -> None:
    grid = WatchedGrid(client_app(FBN, clients, counted=4), 3)
    with pytest.raises(RunFailed, match=r"the run is for 3 clients, but node 1 says that there are 4 .*\"clients=4\".*num-supernodes=3"):
        run(FBN, clients, 1, grid=grid)


@pytest.mark.usefixtures("no_sleep")
def test_a_client_of_another_method_is_refused(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    grid = WatchedGrid(client_app(METHODS["fedavg"](), clients), 3)
    with pytest.raises(RunFailed, match="only 0 of 3"):
        run(FBN, clients, 1, grid=grid, policy={"wait": 0.01})
    assert "client 0 has another model, method or version of fl-bn" in log.text


def test_what_a_node_says_first_counts(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    class Twice(WatchedGrid):
        """Node 2 answers as client 1, and then as client 2."""

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(message_ids))
            for reply in [r for r in replies if "fl-bn/hello" in r.content.config_records and r.metadata.src_node_id == 2]:
                second = copy.deepcopy(reply)
                second.content.config_records["fl-bn/hello"]["client"] = 2
                replies.append(second)
            return replies

    ran = run(FBN, clients, 1, grid=Twice(client_app(FBN, clients), 3))
    assert [c.client for c in ran.records[0].accepted] == [0, 1, 2]
    assert log.text.count("node 2 introduced itself twice: its first introduction counts") == 1


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
    assert log.text.count("node 77 is refused: client 1 is already served by node 2") == 1
    assert all([c.client for c in record.accepted] == [0, 1, 2] for record in ran.records)
    assert identical(ran.trajectory[2], run(FBN, clients, 2).trajectory[2])
    assert not any(message.metadata.dst_node_id == 77 for message in ran.grid.sent if message.metadata.message_type == "train")


def test_a_restarted_client_takes_its_place_again_once_the_old_node_is_gone(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    grid = TwinGrid(clients)
    grid.then = {1: set(), 2: {2}}
    ran = run(FBN, clients, 3, grid=grid, evaluate=None, policy={"rate": grid.rate})
    assert [[c.client for c in record.accepted] for record in ran.records] == [[0, 1, 2]] * 3
    assert grid.trained() == {"1": 2, "2": 77, "3": 77}  # at once: who is there is asked before every round
    assert log.text.count("client 1 is now served by node 77 instead of node 2: if this is not the same client after a restart, stop") == 1


def test_the_node_that_served_a_client_first_gets_its_place_back(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    grid = TwinGrid(clients)
    grid.then = {2: {2}, 3: set(), 5: {2}, 6: set()}
    run(FBN, clients, 6, grid=grid, evaluate=None, policy={"rate": grid.rate})
    assert grid.trained() == {"1": 2, "2": 77, "3": 2, "4": 2, "5": 77, "6": 2}
    assert log.text.count("node 77 is refused: client 1 is already served by node 2") == 2
    assert log.text.count("client 1 is now served by node 77") == 2


def test_of_two_nodes_that_claim_one_client_before_the_start_neither_is_preferred(clients: list[Samples]) -> None:
    grid = TwinGrid(clients)
    grid.gone = set()
    with pytest.raises(RunFailed, match="nodes 2 and 77 call themselves client 1, so none of them takes part: give every SuperNode"):
        run(FBN, clients, 1, grid=grid)


@pytest.mark.usefixtures("no_sleep")
def test_nor_is_the_one_that_was_there_earlier(clients: list[Samples]) -> None:
    class Later(TwinGrid):
        """Node 77 comes second, and node 3 would be the last."""

        asked = 0

        def get_node_ids(self) -> Iterable[int]:
            self.asked += 1
            self.gone = {77, 3} if self.asked < 3 else {3}
            return super().get_node_ids()

    with pytest.raises(RunFailed, match="nodes 2 and 77 call themselves client 1"):
        run(FBN, clients, 1, grid=Later(clients), policy={"wait": 60.0})


def test_a_run_that_can_start_without_them_names_both_and_takes_the_one_that_stays(
    clients: list[Samples], log: pytest.LogCaptureFixture
) -> None:
    grid = TwinGrid(clients)
    grid.gone, grid.then = set(), {3: {77}}
    ran = run(FBN, clients, 4, grid=grid, policy={"at_start": 2, "rate": grid.rate})
    assert accepted(ran) == [[0, 2], [0, 2], [0, 1, 2], [0, 1, 2]]
    assert log.text.count("nodes 2 and 77 call themselves client 1, so none of them takes part") == 1
    assert grid.trained() == {"3": 2, "4": 2}


def test_of_two_newcomers_in_the_place_of_one_that_is_gone_neither_is_preferred(
    clients: list[Samples], log: pytest.LogCaptureFixture
) -> None:
    grid = TwinGrid(clients, (77, 78))
    grid.then = {2: {2}, 4: set()}
    ran = run(FBN, clients, 4, grid=grid, policy={"rate": grid.rate})
    assert accepted(ran) == [[0, 1, 2], [0, 2], [0, 2], [0, 1, 2]]
    assert grid.trained() == {"1": 2, "4": 2}
    assert "nodes 77 and 78 call themselves client 1" in log.text


def test_where_the_operator_names_the_nodes_no_other_is_believed(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    """Present from the start, before the true one, or alone: the stranger never takes part."""
    for gone, rounds in ((set[int](), [[0, 1, 2]] * 3), ({2}, [[0, 2]] * 3)):
        grid = TwinGrid(clients)
        grid.gone = gone
        ran = run(FBN, clients, 3, grid=grid, policy={"at_start": 2, "nodes": (1, 2, 3)})
        assert accepted(ran) == rounds
        assert 77 not in grid.trained().values()
    assert "node 77 is refused: it calls itself client 1, but its key belongs to no client: correct its partition-id" in log.text
    swapped = {"at_start": 1, "nodes": (2, 1, 3)}
    assert accepted(run(FBN, clients, 2, policy=swapped)) == [[2]] * 2
    assert "node 1 is refused: it calls itself client 0, but its key belongs to client 1" in log.text
    with pytest.raises(RunFailed, match="node 1 cannot take part: it calls itself client 0, but its key belongs to client 1"):
        run(FBN, clients, 2, policy={**swapped, "at_start": 0})


@pytest.mark.parametrize("nodes", [(1, 2), (1, 2, 2), (1, 2, 3, 4)])
def test_nodes_are_named_for_all_clients_or_none(nodes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="nodes must name one node for each of 3 clients, no node twice"):
        Rounds(3, nodes=nodes)


def test_a_run_whose_clients_all_leave_stops_with_a_sentence(clients: list[Samples]) -> None:
    grid = TwinGrid(clients)

    def leave(round: int) -> None:
        grid.gone = {1, 2, 3, 77}

    with pytest.raises(RunFailed, match="2 rounds in a row had too few usable replies"):
        run(FBN, clients, 9, grid=grid, policy={"max_failed": 2, "rate": lambda round, rounds: leave(round) or 0.1})


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


def accepted(ran: Run) -> list[list[int]]:
    return [[c.client for c in record.accepted] for record in ran.records]


def test_a_round_waits_until_enough_clients_are_back(
    clients: list[Samples], monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    grid = ComingAndGoing(clients, monkeypatch)
    rate = grid.leave(2, {1, 2}, {30.0: {1}})
    ran = run(FBN, clients, 3, grid=grid, policy={"min_cohort": 2, "wait": 60.0, "rate": rate})
    assert accepted(ran) == [[0, 1, 2], [1, 2], [1, 2]]
    assert all(record.aggregated for record in ran.records)
    assert 30 <= grid.now <= 32
    assert "offline: clients 0, 1" in log.text
    assert "1 clients are here, but a round needs 2: waiting for up to 60 s" in log.text


def test_a_round_without_enough_clients_fails_by_name_and_the_next_may_have_them(
    clients: list[Samples], monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    grid = ComingAndGoing(clients, monkeypatch)
    rate = grid.leave(2, {1, 2}, {70.0: set()})
    ran = run(FBN, clients, 4, grid=grid, policy={"min_cohort": 2, "wait": 60.0, "rate": rate})
    assert [record.aggregated for record in ran.records] == [True, False, True, True]
    assert identical(ran.trajectory[1], ran.trajectory[2])
    assert "round 2: only 1 of 1 replies could be used, but 2 are needed (min-replies, min-cohort): nothing changes" in log.text
    assert 70 <= grid.now <= 72


def test_without_a_minimum_a_round_goes_on_with_who_is_there(clients: list[Samples], monkeypatch: pytest.MonkeyPatch) -> None:
    grid = ComingAndGoing(clients, monkeypatch)
    ran = run(FBN, clients, 3, grid=grid, policy={"wait": 60.0, "rate": grid.leave(2, {1, 2}, {})})
    assert accepted(ran) == [[0, 1, 2], [2], [2]]
    assert grid.now == 0


def test_too_few_usable_replies_fail_a_round_though_all_are_there(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    def disturb(client: int, what: str) -> None:
        if client and what == "train 2":
            raise OSError("no")

    ran = run(FBN, clients, 3, grid=WatchedGrid(client_app(FBN, clients, disturb=disturb), 3), policy={"min_cohort": 2, "min_replies": 0.0})
    assert [record.aggregated for record in ran.records] == [True, False, True]
    assert "round 2: only 1 of 3 replies could be used, but 2 are needed (min-replies, min-cohort): nothing changes" in log.text


def test_a_minimum_that_is_there_makes_a_round_whatever_the_fraction(tiny_clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of four clients is the minimum of two; two that are left are still two, not half of two."""
    clients = tiny_clients((6, 4, 5, 3))
    grid = ComingAndGoing(clients, monkeypatch)
    policy = {"min_cohort": 2, "fraction": 0.5, "wait": 60.0, "rate": grid.leave(2, {1, 2}, {})}
    ran = run(FBN, clients, 3, grid=grid, policy=policy)
    assert [len(record.accepted) for record in ran.records] == [2, 2, 2]


def test_who_goes_and_who_comes_back_is_said(
    clients: list[Samples], monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    grid = ComingAndGoing(clients, monkeypatch)

    def rate(round: int, rounds: int) -> float:
        grid.gone = {3: {2}, 5: set()}.get(round, grid.gone)
        return 0.1

    ran = run(FBN, clients, 6, grid=grid, policy={"rate": rate})
    assert accepted(ran) == [[0, 1, 2], [0, 1, 2], [0, 2], [0, 2], [0, 1, 2], [0, 1, 2]]
    assert log.text.count("offline: client 1") == 1
    back = log.text.partition("offline: client 1")[2]
    assert any("1" in line and "back" in line for line in back.splitlines())


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
    assert log.text.count("node 2 is refused: FileNotFoundError: no such data") == 1  # and not in every round
