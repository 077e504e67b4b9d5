"""Rounds with a layer-wise exchange, seen from the strategy: who counts and how much, who is lost, and which carrier serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from threading import Thread
from types import MappingProxyType
from typing import Any

import pytest
from flwr.app import Error, Message

from fl_bn.flower import RunFailed
from fl_bn.methods import METHODS
from tests.flower.inside import Clients, ExchangeSettings, LocalTraining, Samples
from tests.hostile.recorded import Liar
from tests.in_process import Run, WatchedGrid, client_app, identical, run
from tests.networks import seeded_network
from tools.hostile.transport import ByteGrid

FEDTAN = METHODS["fedtan"]()
TWO_STEPS = LocalTraining(batch_size=4, steps=2)
MEETS = "query.rendezvous"


def exchanged(clients: list[Samples], exchange: ExchangeSettings, grid: Any = None, rounds: int = 2) -> Run:
    policy = {"exchange": exchange, "min_replies": 0.5}
    return run(FEDTAN, clients, rounds, settings=TWO_STEPS, grid=grid, policy=policy, model=seeded_network("plain"))


@pytest.mark.parametrize("carrier", ["local", "replay"])
def test_under_shrink_the_others_go_on_as_if_it_had_not_been_there(carrier: str, tiny_clients: Clients) -> None:
    """As they do without a client that is too small for a batch."""
    clients = tiny_clients((4, 5, 1, 6))

    def disturb(client: int, what: str) -> None:
        if (client, what) == (3, "exchange 1"):
            raise RuntimeError("the disk is full")

    grid = WatchedGrid(client_app(FEDTAN, clients, TWO_STEPS, model=seeded_network("plain"), disturb=disturb), len(clients))
    ran, abort = exchanged(clients, ExchangeSettings(carrier, "shrink"), grid, 1), ExchangeSettings(carrier, "abort")
    (record,) = ran.records
    assert [c.client for c in record.accepted] == [0, 1]
    assert [c.exchanges for c in record.clients][:3] == [4, 4, 0]
    assert "no samples" in record.clients[2].refused
    assert "the disk is full" in record.clients[3].refused
    assert identical(ran.trajectory[1], exchanged(clients[:2], abort, rounds=1).trajectory[1])
    assert not identical(ran.trajectory[1], exchanged(clients, abort, rounds=1).trajectory[1])  # control


class Nodes(ByteGrid):
    """Clients that compute at the same time, as on machines of their own.

    ``fails``: of a client and a type of message, the error that it answers, or None, where it hangs.
    """

    def __init__(self, clients: list[Samples], fails: Mapping[tuple[int, str], str | None] = MappingProxyType({})) -> None:
        app = client_app(FEDTAN, clients, TWO_STEPS, model=seeded_network("plain"))  # no dropout: threads have one generator
        super().__init__(WatchedGrid(app, len(clients)), Liar())
        self.fails, self.asked = fails, list[tuple[int, str]]()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = self.inner._addressed(messages)
        for message in messages:
            Thread(target=self._work, args=(message,), daemon=True).start()
        return [message.metadata.message_id for message in messages]

    def _work(self, message: Message) -> None:
        asked = (message.metadata.dst_node_id - 1, message.metadata.message_type)
        self.asked.append(asked)
        error = self.fails.get(asked, "")
        if error is not None:
            answer = Message(Error(2, error), reply_to=message) if error else self.inner._answer(message)
            self.inner._answers[message.metadata.message_id] = answer


@pytest.mark.parametrize(("fails", "carrier"), [({}, "grpc"), ({(1, MEETS): None}, "replay")])
def test_auto_takes_grpc_and_where_not_all_clients_can_run_at_once_replay(fails: Any, carrier: str, tiny_clients: Clients) -> None:
    """As in a simulation with too few workers. Both give the bits of clients that take turns in one process."""
    clients = tiny_clients((4, 5, 6))
    ran = exchanged(clients, ExchangeSettings(join_deadline=1.0 if fails else 60.0), Nodes(clients, fails))
    assert [record.carrier for record in ran.records] == [carrier] * 2
    assert identical(ran.trajectory[2], exchanged(clients, ExchangeSettings("local")).trajectory[2])


@pytest.mark.parametrize("policy", ["abort", "shrink"])
def test_one_client_that_cannot_meet_ends_the_run_under_abort_alone(policy: str, tiny_clients: Clients) -> None:
    """Such as one that does not trust the service's certificate."""
    clients = tiny_clients((4, 5, 6))
    grid, exchange = Nodes(clients, {(0, MEETS): "ExchangeFailed: CERTIFICATE_VERIFY_FAILED"}), ExchangeSettings(policy=policy)
    if policy == "abort":
        with pytest.raises(RunFailed, match="client 0: .*VERIFY_FAILED"):
            exchanged(clients, exchange, grid)
    else:
        assert [record.carrier for record in exchanged(clients, exchange, grid).records] == ["grpc"] * 2


def test_no_round_waits_for_a_client_that_has_not_answered_an_earlier_one(tiny_clients: Clients) -> None:
    """It died or hangs, and Flower has not noticed yet."""
    clients = tiny_clients((4, 5, 6))
    grid = Nodes(clients, {(0, "train"): None})
    ran = exchanged(clients, ExchangeSettings(policy="shrink", join_deadline=3.0), grid)
    assert [[client.client for client in record.accepted] for record in ran.records] == [[1, 2]] * 2
    assert grid.asked.count((0, "train")) == 1


def test_a_carrier_that_does_not_fit_the_grid_is_refused_before_round_1(tiny_clients: Clients) -> None:
    clients = tiny_clients((4, 5))
    grid = WatchedGrid(client_app(FEDTAN, clients, TWO_STEPS), len(clients))
    with pytest.raises(RunFailed):
        exchanged(clients, ExchangeSettings("grpc"), grid)
    assert not grid.sent
