"""Who is there: clients are waited for, known by their own index, sampled by the seed alone; they join late, leave, come back, refuse."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import Context, Message

from fl_bn.flower import RunFailed
from fl_bn.methods import METHODS
from tests.flower.inside import Clients, Samples
from tests.in_process import Run, WatchedGrid, client_app, identical, run
from tests.listed import listed
from tests.refusals import naming

FBN, FEDAVG = METHODS["fbn"](), METHODS["fedavg"]()
NAMED: dict[str, Any] = {"nodes": (1, 2, 3), "names": ("east", "west", "north")}


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


def test_the_run_waits_for_clients_that_appear_one_after_another_and_not_for_ever(clients: list[Samples]) -> None:
    grid = LateGrid(client_app(FBN, clients), 3)
    assert accepted(run(FBN, clients, 1, grid=grid, policy={"wait": 60.0})) == [[0, 1, 2]]
    few = LateGrid(client_app(FBN, clients), 3)
    few.most = 2
    assert accepted(run(FBN, clients, 1, grid=few, policy={"wait": 0.5, "min_sites": 2})) == [[0, 1]]
    with pytest.raises(RunFailed) as told:
        run(FBN, clients, 1, grid=few, policy={"wait": 0.01})
    assert "client 2" in str(told.value)


class NotAllowed(Exception):
    """As a site's policy raises it."""


REFUSAL = NotAllowed("this site's policy has allow-methods = fedbn, but the run's method is 'fedavg'")


@listed("error", [REFUSAL, ValueError("NaN in x_train")])
def test_a_run_starts_without_sites_that_cannot_take_part_where_enough_are_left(error: Exception, clients: list[Samples]) -> None:
    app = client_app(FEDAVG, clients)

    def ran(least: int, *nodes: int) -> Run:
        def work(message: Message, context: Context) -> Message:
            if message.metadata.dst_node_id in nodes:
                raise error
            return app(message, context)

        return run(FEDAVG, clients, 2, grid=WatchedGrid(work, 3), policy={**NAMED, "min_sites": least})  # type: ignore[arg-type]

    assert accepted(found := ran(2, 2)) == [[0, 2]] * 2
    assert found.strategy.transport.population is not None
    assert str(error) in found.strategy.transport.population.absent[1]
    for least, *nodes in ((0, 2), (2, 2, 3)):
        with naming("site ", RunFailed):
            ran(least, *nodes)


# Several nodes of one client, and nodes that go


class Nodes(WatchedGrid):
    """Node 77 serves the partition of node 2, too. ``gone`` are offline, from round ``r`` on ``then[r]``, and seconds later ``later``'s."""

    def __init__(self, clients: list[Samples]) -> None:
        super().__init__(client_app(FBN, clients), len(clients))
        twin = list(WatchedGrid(client_app(FBN, clients), len(clients))._contexts.values())[1]
        twin.node_id, self._contexts[77] = 77, twin
        self.gone, self.then, self.later = {77}, dict[int, set[int]](), dict[float, set[int]]()
        self.begin = 0.0

    def get_node_ids(self) -> Iterable[int]:
        for seconds in [seconds for seconds in self.later if self.begin and time.monotonic() > self.begin + seconds]:
            self.gone = self.later.pop(seconds)
        return [node for node in super().get_node_ids() if node not in self.gone]

    def rate(self, round: int, rounds: int) -> float:
        if round in self.then:
            self.gone, self.begin = self.then[round], time.monotonic()
        return 0.1

    def trained(self) -> dict[str, int]:
        """The node that served client 1, by round."""
        sent = (m.metadata for m in self.sent if m.metadata.message_type == "train")
        return {about.group_id: about.dst_node_id for about in sent if about.dst_node_id not in (1, 3)}


def test_a_second_node_of_a_client_has_its_place_while_the_first_is_away(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    """At once: who is there is asked before every round. Where both are there, the second is refused."""
    grid = Nodes(clients)
    grid.then = {1: set(), 2: {2}, 3: set()}
    ran = run(FBN, clients, 4, grid=grid, policy={"rate": grid.rate})
    assert accepted(ran) == [[0, 1, 2]] * 4
    assert grid.trained() == {"1": 2, "2": 77, "3": 2, "4": 2}
    assert "node 77 is refused" in log.text


def test_of_two_nodes_that_claim_one_client_before_the_start_neither_is_preferred(clients: list[Samples]) -> None:
    grid = Nodes(clients)
    grid.gone = set()
    with pytest.raises(RunFailed, match="nodes 2 and 77"):
        run(FBN, clients, 1, grid=grid, policy={"wait": 60.0})


def test_a_client_that_comes_later_joins_in_its_round(clients: list[Samples]) -> None:
    grid = Nodes(clients)
    grid.gone, grid.then = {2, 77}, {3: {77}}
    assert accepted(run(FBN, clients, 4, grid=grid, policy={"at_start": 2, "rate": grid.rate})) == [[0, 2]] * 2 + [[0, 1, 2]] * 2


def test_where_the_operator_names_the_nodes_no_other_is_believed(clients: list[Samples]) -> None:
    """Present from the start, before the true one, or alone: the stranger never takes part."""
    for gone, rounds in ((set[int](), [[0, 1, 2]] * 3), ({2}, [[0, 2]] * 3)):
        grid = Nodes(clients)
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
    nodes: dict[str, Any] = {**NAMED, "nodes": (1, 77, 3)}
    with pytest.raises(RunFailed) as told:
        run(FBN, clients, 1, policy=nodes)
    assert "site west" in str(told.value)
    ran = run(FBN, clients, 2, policy={**nodes, "registered": lambda: {1: "east", 2: "west", 3: "north"}})
    assert accepted(ran) == [[0, 1, 2]] * 2


@listed(
    ("later", "least", "cohorts"),
    [
        pytest.param({0.2: {1, 77}}, 2, [[0, 1, 2], [1, 2], [1, 2]], id="enough are back"),
        pytest.param({1.5: {77}}, 2, [[0, 1, 2], [2], [0, 1, 2]], id="too late"),
        pytest.param({}, 1, [[0, 1, 2], [2], [2]], id="no minimum"),
    ],
)
def test_a_round_waits_until_enough_clients_are_back(
    later: dict[float, set[int]], least: int, cohorts: list[list[int]], clients: list[Samples]
) -> None:
    grid = Nodes(clients)
    grid.then, grid.later = {2: {1, 2, 77}}, dict(later)
    ran = run(FBN, clients, 3, grid=grid, policy={"min_cohort": least, "wait": 1.0, "rate": grid.rate})
    assert accepted(ran) == cohorts
    assert [record.aggregated for record in ran.records] == [len(cohort) >= least for cohort in cohorts]
    assert identical(ran.trajectory[1], ran.trajectory[2]) == (len(cohorts[1]) < least)


# Who evaluates


def test_at_most_so_many_clients_evaluate_in_a_round(tiny_clients: Clients) -> None:
    four = tiny_clients((6, 4, 5, 7))
    ran = run(METHODS["fedbn"](), four, 4, policy={"evaluate_clients": 2})
    told = [frozenset(record.client_evaluation) for record in ran.records]
    assert [len(clients) for clients in told] == [2] * 4
    assert len(set(told)) > 1  # drawn anew in every round
    assert identical(ran.trajectory[4], run(METHODS["fedbn"](), four, 4).trajectory[4])  # training is as without
