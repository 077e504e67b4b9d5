"""How many clients an app of one's own has: what nodes say is compared while they come, and none of them decides alone."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from flwr.app import Context, Message

from fl_bn import convert
from fl_bn.flower import ServerPolicy
from fl_bn.flower.population import Population
from fl_bn.methods import METHODS
from fl_bn.support.client_names import UNNAMED, ClientNames
from tests.flower.inside import signature
from tests.flower.own_apps import net, own_app
from tests.hostile.liars import LyingGrid, sets
from tests.hostile.recorded import Liar
from tests.listed import listed
from tools.hostile.transport import ByteGrid

METHOD, CLIENTS = METHODS["fbn"](), 5
SITES = ClientNames(("a", "b", "c", "d", "e"), (1, 2, 3, 4, 5))


class Elsewhere(ByteGrid):
    """Nodes on other machines: node ``n`` comes after ``after[n]`` seconds, else at once.

    ``silent`` ones never answer, ``refusing`` ones answer with the error of a site's policy, and ``liars``, which are clients, say ``lie``.
    """

    def __init__(
        self,
        after: Mapping[int, float] = MappingProxyType({}),
        silent: Collection[int] = (),
        refusing: Collection[int] = (),
        liars: Collection[int] = (),
        **lie: Any,
    ) -> None:
        app = own_app("fbn")

        def answered(message: Message, context: Context) -> Message:
            if message.metadata.dst_node_id in refusing:
                raise PermissionError("this site's policy has allow-code = installed")
            return app(message, context)

        spoil = sets("query.hello", "hello", **lie)
        super().__init__(LyingGrid(answered, CLIENTS, dict.fromkeys(liars, spoil)), Liar())  # type: ignore[arg-type]
        self.after, self.silent, self.begin = after, silent, time.monotonic()

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in super().get_node_ids() if time.monotonic() - self.begin >= self.after.get(node, 0.0)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = super().push_messages(messages)
        return ["never" if m.metadata.dst_node_id in self.silent else identity for m, identity in zip(messages, ids, strict=True)]


def met(grid: Elsewhere, least: int = 2, called: ClientNames = UNNAMED) -> tuple[int, list[int]]:
    """Return the number of clients, and the nodes with which the run starts."""
    policy = ServerPolicy(clients=100_000, timeout=5.0, wait=1.0)
    population = Population(grid, policy, signature(convert(net(), METHOD), METHOD), called, 0, least)
    population.gather()
    return population.number, [client.node for client in population.everyone()]


@listed(
    ("nodes", "there"),
    [
        pytest.param({"after": {4: 0.3, 5: 0.6}}, [1, 2, 3, 4, 5], id="late"),
        pytest.param({"after": {5: 60.0}}, [1, 2, 3, 4], id="too late"),
        pytest.param({"silent": [1]}, [2, 3, 4, 5], id="never"),
        pytest.param({"refusing": [2, 3], "after": {4: 0.3, 5: 0.3}}, [1, 4, 5], id="without those that refuse"),
    ],
)
def test_all_clients_are_waited_for_but_not_for_ever_where_enough_are_there(nodes: dict[str, Any], there: list[int]) -> None:
    begin = time.monotonic()
    assert met(Elsewhere(**nodes), 3, SITES) == (CLIENTS, there)
    assert time.monotonic() - begin < 4.0


@listed("lie", [{"signature": "0" * 16}, {"clients": 2}])
def test_those_who_come_first_decide_nothing(lie: dict[str, Any]) -> None:
    """Two liars are there before anybody else: with what they say the run would fail, or begin without the others."""
    number, there = met(Elsewhere({3: 0.3, 4: 0.3, 5: 0.3}, liars=[0, 1], **lie), 3)
    assert (number, set(there) >= {3, 4, 5}) == (CLIENTS, True)
