"""Rounds with a layer-wise exchange, seen from the strategy: who counts and how much, who is lost, what is recorded."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext, suppress
from threading import Thread
from typing import Any

import pytest
from flwr.app import Error, Message, RecordDict

from fl_bn.exchange.call import ExchangeFailed
from fl_bn.exchange.grpc.client import GrpcExchange
from fl_bn.flower import InProcessGrid, RunFailed
from fl_bn.flower.layerwise.exchanges import Exchanges
from fl_bn.methods import METHODS
from tests.flower.inside import Client, Clients, ExchangeSettings, LocalTraining, Samples
from tests.in_process import Run, WatchedGrid, client_app, identical, run
from tests.networks import seeded_network

FEDTAN = METHODS["fedtan"]()
CARRIERS = ("local", "replay")
TWO_STEPS = LocalTraining(batch_size=4, steps=2)
carriers = pytest.mark.parametrize("carrier", CARRIERS)


def exchanged(clients: list[Samples], carrier: str, policy: str = "abort", *, losing: tuple[int, int] | None = None, **options: Any) -> Run:
    """``losing``: client and round in which its training raises."""

    def disturb(client: int, what: str) -> None:
        if losing is not None and (client, what) == (losing[0], f"exchange {losing[1]}"):
            raise RuntimeError("the disk is full")

    settings = options.pop("settings", TWO_STEPS)
    grid = WatchedGrid(client_app(FEDTAN, clients, settings, disturb=disturb), len(clients))
    return run(FEDTAN, clients, settings=settings, grid=grid, policy={"exchange": ExchangeSettings(carrier, policy)}, **options)


@carriers
def test_under_shrink_the_others_go_on_as_if_it_had_not_been_there(carrier: str, tiny_clients: Clients) -> None:
    """As they do without a client that is too small for a batch."""
    clients = tiny_clients((4, 5, 1, 6))
    ran = exchanged(clients, carrier, "shrink", losing=(3, 1), rounds=1)
    (record,) = ran.records
    assert [c.client for c in record.accepted] == [0, 1]
    assert [c.exchanges for c in record.clients][:3] == [4, 4, 0]
    assert "no samples" in record.clients[2].refused
    assert "the disk is full" in record.clients[3].refused
    assert identical(ran.trajectory[1], exchanged(clients[:2], carrier, rounds=1).trajectory[1])
    assert not identical(ran.trajectory[1], exchanged(clients, carrier, rounds=1).trajectory[1])  # control


def test_carriers_that_do_not_fit_the_grid_are_refused_before_round_1(tiny_clients: Clients) -> None:
    clients = tiny_clients((4, 5))
    grid = WatchedGrid(client_app(FEDTAN, clients, TWO_STEPS), len(clients))
    with pytest.raises(RunFailed):
        run(FEDTAN, clients, settings=TWO_STEPS, grid=grid, policy={"exchange": ExchangeSettings("grpc"), "calibrate": 1})
    assert not grid.sent


class Away(InProcessGrid):
    """Clients that answer a rendezvous with an error, or, without a ``reason``, not at all."""

    def __init__(self, reason: str) -> None:
        super().__init__(client_app(FEDTAN, []), 2, {})
        self.reason = reason

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in messages:
            message.metadata.__dict__.update(_run_id=1, _src_node_id=1, _message_id=f"to {message.metadata.dst_node_id}")
            if self.reason:
                self._answers[message.metadata.message_id] = Message(Error(2, self.reason), reply_to=message)
            yield message.metadata.message_id


@pytest.mark.parametrize("reason", ["ExchangeFailed: CERTIFICATE_VERIFY_FAILED", ""])
def test_auto_falls_back_for_want_of_workers_only(reason: str) -> None:
    """A service that clients do not trust is an error, whatever the carrier asked for."""
    carrier = Exchanges(ExchangeSettings(join_deadline=0.2), seeded_network("cnn"), {})
    cohort = [Client(index, index + 1, 4) for index in range(2)]
    try:
        if reason:
            with pytest.raises(RunFailed, match="client 0: .*VERIFY_FAILED"):
                carrier._meet(Away(reason), cohort, 5.0)
        else:
            assert "clients 0, 1: " in carrier._meet(Away(reason), cohort, 5.0)
    finally:
        carrier.stop()


class PartlyAway(Away):
    """Client 0 answers a rendezvous with an error, and the others join."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message, identity in zip(messages := list(messages), super().push_messages(messages), strict=True):
            if message.metadata.dst_node_id > 1:
                self._answers.pop(identity, None)
                Thread(target=self._join, args=(message, identity), daemon=True).start()
            yield identity

    def _join(self, message: Message, identity: str) -> None:
        config = message.content.config_records["fl-bn/config"]
        with suppress(ExchangeFailed):
            GrpcExchange(str(config["exchange-address"]), str(config["exchange-token"]), 1).close()
        self._answers[identity] = Message(RecordDict(), reply_to=message)


@pytest.mark.parametrize("policy", ["abort", "shrink"])
def test_one_client_that_cannot_meet_ends_the_run_under_abort_alone(policy: str, log: pytest.LogCaptureFixture) -> None:
    """Under shrink, rounds go on without it, whatever it says."""
    carrier = Exchanges(ExchangeSettings(policy=policy, join_deadline=5.0), seeded_network("cnn"), {})
    cohort = [Client(index, index + 1, 4) for index in range(3)]
    try:
        with pytest.raises(RunFailed, match="client 0: .*a lie") if policy == "abort" else nullcontext():
            assert carrier._meet(PartlyAway("a lie"), cohort, 10.0) == ""
            assert "client 0 cannot use the exchange" in log.text
    finally:
        carrier.stop()


def test_no_round_waits_for_a_client_that_has_not_answered_an_earlier_one() -> None:
    """It died or hangs, and Flower has not noticed yet."""
    carrier = Exchanges(ExchangeSettings(policy="shrink", join_deadline=0.3), seeded_network("cnn"), {})
    grid, cohort = PartlyAway(""), [Client(index, index + 1, 4) for index in range(3)]
    carrier.carrier = "grpc"
    try:
        messages = [Message(RecordDict(), client.node, "query.rendezvous", ttl=60.0, group_id="1") for client in cohort]
        assert len(carrier.round(grid, cohort, messages, 10.0)) == 2
        assert carrier.late_clients(grid) == {0}
        grid._answers["to 1"] = Message(Error(8, "it died"), reply_to=messages[0])
        assert carrier.late_clients(grid) == set()
    finally:
        carrier.stop()


class Lossy(WatchedGrid):
    """As Flower's grid does, gives None instead of an id for a message that it could not send: here client 0's, in round 2."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        lost = [m for m in messages if m.metadata.message_type == "train" and (m.metadata.dst_node_id, m.metadata.group_id) == (1, "2")]
        ids = iter(list(super().push_messages([message for message in messages if message not in lost])))
        return [None if message in lost else next(ids) for message in messages]  # type: ignore[misc]


def test_a_message_that_could_not_be_sent_costs_its_own_client_and_no_other(tiny_clients: Clients) -> None:
    clients = tiny_clients((4, 5, 6))
    grid = Lossy(client_app(FEDTAN, clients, TWO_STEPS), 3)
    exchange = ExchangeSettings("replay", "shrink")
    ran = run(FEDTAN, clients, rounds=3, settings=TWO_STEPS, grid=grid, policy={"exchange": exchange})
    assert [[c.client for c in record.accepted] for record in ran.records] == [[0, 1, 2], [1, 2], [0, 1, 2]]
    assert ran.records[1].clients[0].refused == "its message could not be sent"
