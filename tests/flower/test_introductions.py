"""How many clients an app of one's own has: what nodes say is compared while they come, and none of them decides alone."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from fl_bn import convert
from fl_bn.flower import RunFailed, ServerPolicy
from fl_bn.flower import population as introductions
from fl_bn.flower.population import Population
from fl_bn.methods import METHODS
from fl_bn.support.client_names import UNNAMED, ClientNames
from tests.flower.inside import signature
from tests.hostile.liars import sets
from tests.hostile.own_app import CLIENTS, LyingGrid, Spoil, net, own_app
from tests.listed import listed

METHOD = METHODS["fbn"]()
RIGHT = signature(convert(net(), METHOD), METHOD)


def nothing(message: Message, asked: str, content: RecordDict) -> None:
    """Nobody lies."""


class Elsewhere(Grid):
    """Nodes on other machines: node ``n`` comes after ``after[n]`` seconds, else at once; ``silent`` ones never answer."""

    def __init__(
        self, after: dict[int, float] | None = None, silent: Iterable[int] = (), liars: Iterable[int] = (), spoil: Spoil = nothing
    ) -> None:
        self._inner, self._begin = LyingGrid(own_app("fbn"), set(liars), spoil), time.monotonic()
        self.after, self.silent = after or {}, set(silent)

    def set_run(self, run_id: Any) -> None:
        self._inner.set_run(run_id)

    @property
    def run(self) -> Any:
        return self._inner.run

    def create_message(self, *args: Any, **named: Any) -> Message:
        return self._inner.create_message(*args, **named)

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self._inner.get_node_ids() if time.monotonic() - self._begin >= self.after.get(node, 0.0)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._sent(message) for message in messages]

    def _sent(self, message: Message) -> str:
        node = message.metadata.dst_node_id
        return f"to {node}" if node in self.silent else next(iter(self._inner.push_messages([message])))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._inner.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introductions, "POLL", 0.02)


def meet(grid: Grid, clients: int, least: int, timeout: float, called: ClientNames = UNNAMED) -> Population:
    policy = ServerPolicy(clients=clients or 100_000, timeout=timeout, wait=1.0)
    population = Population(grid, policy, RIGHT, called, clients, least)
    population.gather()
    return population


def nodes(grid: Grid, least: int = 2, clients: int = 0) -> tuple[int, list[int]]:
    population = meet(grid, clients, least, 5.0)
    return population.number, [client.node for client in population.everyone()]


@pytest.mark.parametrize(
    ("late", "there"),
    [({"after": {4: 0.3, 5: 0.6}}, [1, 2, 3, 4, 5]), ({"after": {5: 60.0}}, [1, 2, 3, 4]), ({"silent": [1]}, [2, 3, 4, 5])],
    ids=["late", "too late", "never"],
)
def test_all_clients_are_waited_for_but_not_for_ever_where_enough_are_there(late: dict[str, Any], there: list[int]) -> None:
    begin = time.monotonic()
    assert nodes(Elsewhere(**late)) == (CLIENTS, there)
    assert len(there) == CLIENTS or 1.0 <= time.monotonic() - begin < 4.0


@pytest.mark.parametrize("fields", [{"signature": "0" * 16}, {"clients": 2}, {"clients": 3}, {"samples": -1}], ids=str)
def test_those_who_come_first_decide_nothing(fields: dict[str, Any]) -> None:
    """Two liars are there before anybody else: with what they say the run would fail, or begin without the others."""
    grid = Elsewhere({3: 0.3, 4: 0.3, 5: 0.3}, liars=[1, 2], spoil=sets("query.hello", "hello", **fields))
    number, there = nodes(grid, 3)
    assert (number, set(there) >= {3, 4, 5}) == (CLIENTS, True)


# Where the sites of the run are known

REFUSAL = "<class 'fl_bn_site.policy.NotAllowed'>:<'this site's policy has allow-code = installed'>"
FIVE = ClientNames(("a", "b", "c", "d", "e"), (1, 2, 3, 4, 5))


class Refusing(Elsewhere):
    """``refusing`` nodes answer with the ``error`` of a site."""

    def __init__(self, refusing: Iterable[int], error: str = REFUSAL, **of: Any) -> None:
        super().__init__(**of)
        self.refusing, self.error, self._asked = set(refusing), error, dict[str, Message]()

    def _sent(self, message: Message) -> str:
        if message.metadata.dst_node_id not in self.refusing:
            return super()._sent(message)
        self._asked[identity := f"refused by {message.metadata.dst_node_id}"] = message
        return identity

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        names = list(message_ids)
        errors = []
        for name in names:
            if message := self._asked.pop(name, None):
                error = Message(Error(6, self.error), reply_to=message)
                error.metadata.__dict__["_reply_to_message_id"] = name
                errors.append(error)
        return [*errors, *super().pull_messages([name for name in names if not name.startswith("refused by")])]


@listed(("refusing", "after", "least"), [([2], {}, 2), ([2, 3], {4: 0.4, 5: 0.4}, 3)], ids=["they are there", "they come later"])
def test_enough_sites_go_on_without_those_that_refuse(refusing: list[int], after: dict[int, float], least: int) -> None:
    population = meet(Refusing(refusing, after=after), 0, least, 5.0, FIVE)
    assert (population.number, len(population.everyone())) == (CLIENTS, CLIENTS - len(refusing))


@listed(("called", "who"), [(FIVE, "site b "), (UNNAMED, "node 2 ")], ids=["sites", "nodes"])
def test_where_too_few_may_take_part_the_run_fails_by_name(called: ClientNames, who: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RunFailed) as told:
        meet(Refusing([2, 3, 4, 5]), 0, 2, 60.0, called)
    assert time.monotonic() - begin < 10.0
    assert str(told.value).startswith(who)
    assert "allow-code" in str(told.value)
