"""Train one round once, and give its replies to any number of servers: honest, attacked, or changed."""

from __future__ import annotations

from copy import copy

import numpy as np
from flwr.app import Message, RecordDict

from fl_bn.flower import BatchNormStrategy, Rounds
from fl_bn.flower.grid_transport import GridTransport
from fl_bn.methods import METHODS, attacked
from fl_bn.robust.attacks import Attack
from tests.flower.inside import Defence, RoundRecord, Samples, arrays_record, to_numpy
from tests.hostile.liars import Spoil, nothing
from tests.in_process import WatchedGrid, client_app
from tests.networks import seeded_network

Tensors = dict[str, np.ndarray]
HONEST = Defence()


class OneRound:
    """Hold the honest replies to round 1, to be aggregated by several servers."""

    def __init__(self, name: str, clients: list[Samples]) -> None:
        self.method, self.clients = METHODS[name](), clients
        self.grid = WatchedGrid(client_app(self.method, clients), len(clients))
        first = self._server(HONEST)
        first.meet(self.grid)
        self.arrays = arrays_record(first.shared.tensors())
        self.messages = first.ask_to_train(1, self.arrays, {})
        self.population = first.population
        self.replies = list(self.grid.send_and_receive(self.messages))

    def _server(self, defence: Defence, attack: str | Attack = "", f: int = 0, on: str = "both") -> GridTransport:
        method = attacked(self.method, attack, f, on) if f else self.method
        rounds = Rounds(len(self.clients), min_replies=0.2, wait=0.0)
        return BatchNormStrategy(seeded_network("cnn"), method, rounds, defence=defence).transport

    def served(self, defence: Defence = HONEST, attack: str | Attack = "", f: int = 0, on: str = "both") -> Served:
        """Let a new server aggregate the replies, ``f`` of which are an attack on statistics, updates or both; return its state."""
        replies = [self.spoilt(client, nothing) for client in range(len(self.clients))]
        return self.combined(replies, self._server(defence, attack, f, on))

    def spoilt(self, client: int, spoil: Spoil) -> Message:
        """Return a client's reply, changed by a function of ``tests.hostile.liars``."""
        message, content = self.messages[client], RecordDict(dict(self.replies[client].content.items()))
        spoil(message, "train", content)
        return Message(content, reply_to=message)

    def combined(self, replies: list[Message], server: GridTransport | None = None) -> Served:
        """Let a server, by default an honest and undefended one, aggregate ``replies``; return its state."""
        server = server or self._server(HONEST)
        server.grid, server.population = self.grid, copy(self.population)
        server.ask_to_train(1, self.arrays, {})
        after, _ = server.combine(1, replies)
        tensors = to_numpy(server.shared.tensors())
        assert after is None or all(np.array_equal(tensors[k], a.numpy(), equal_nan=True) for k, a in after.items())
        return Served(tensors, server.record)


class Served:
    """Hold a server's state after a round: its shared ``statistics``, its ``weights``, and the ``record`` of the round."""

    def __init__(self, tensors: Tensors, record: RoundRecord) -> None:
        self.tensors, self.record = tensors, record
        self.statistics = {k: a for k, a in tensors.items() if "running_" in k}
        self.weights = {k: a for k, a in tensors.items() if "running_" not in k}
        self.refused = {c.client: c.refused for c in record.clients if c.refused}
