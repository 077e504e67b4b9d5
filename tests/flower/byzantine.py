"""Train one round once, and give its replies to any number of servers: honest, attacked, changed, or with clients left out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict

from fl_bn.flower import BatchNormStrategy, Rounds
from fl_bn.flower.grid_transport import GridTransport
from fl_bn.methods import METHODS, attacked
from fl_bn.robust.attacks import Attack
from tests.federation import random_samples
from tests.flower.inside import Defence, RoundRecord, Samples, arrays_record, to_numpy
from tests.flower.malformed import Reply, taken_apart
from tests.in_process import WatchedGrid, client_app
from tests.networks import seeded_network

Tensors = dict[str, np.ndarray]
RULES = ("mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "centered-clipping", "nnm+median", "nnm+trimmed-mean")
ROBUST = tuple(rule for rule in RULES if rule != "mean")
CLIENTS = 7
HONEST = Defence()


def both(f: int, rule: str) -> Defence:
    """Return a defence with the same rule for statistics and updates."""
    return Defence(f, rule, rule)


def equal_clients(n: int = CLIENTS, samples: int = 6) -> list[Samples]:
    return [random_samples(samples, brightness=0.1 * i, seed=i) for i in range(n)]


def lie(mean: Callable[[np.ndarray], np.ndarray], var: Callable[[np.ndarray], np.ndarray]) -> Attack:
    """Return an attack on statistics. ``mean`` and ``var`` compute the lie from the averages of the honest means and variances."""

    def attack(honest: np.ndarray, f: int) -> np.ndarray:
        means, variances = np.split(honest.mean(0), 2)
        return np.repeat(np.concatenate([mean(means), var(variances)])[None], f, 0)

    return attack


no_variance = lie(lambda m: m, lambda v: 0 * v)


class OneRound:
    """Hold the honest replies to round 1 of the method ``name``, to be aggregated by several servers."""

    def __init__(self, name: str, clients: list[Samples], **options: Any) -> None:
        self.method, self.clients = METHODS[name](**options), clients
        self.grid = WatchedGrid(client_app(self.method, clients), len(clients))
        first = self._server(HONEST)
        first.meet(self.grid)
        self.arrays = arrays_record(first.shared.tensors())
        self.messages = first.ask_to_train(1, self.arrays, {})
        self.population = first.population
        self.replies = list(self.grid.send_and_receive(self.messages))

    def _server(
        self, defence: Defence, attack: str | Attack = "", f: int = 0, on: str = "both", strength: float = 0.0, max_steps: int = 0
    ) -> GridTransport:
        method = attacked(self.method, attack, f, on, strength) if f else self.method
        rounds = Rounds(len(self.clients), min_replies=0.2, wait=0.0, max_steps=max_steps)
        return BatchNormStrategy(seeded_network("cnn"), method, rounds, defence=defence).transport

    def served(
        self,
        defence: Defence = HONEST,
        attack: str | Attack = "",
        f: int = 0,
        on: str = "both",
        strength: float = 0.0,
        *,
        silent: Collection[int] = (),
        introduced: Mapping[int, int] | None = None,
        spoil: Callable[[int, Reply], None] | None = None,
        max_steps: int = 0,
    ) -> Served:
        """Let a new server aggregate the replies; return its state.

        Args:
            defence: The robust rule of the server.
            attack: The attack of the Byzantine clients.
            f: The number of Byzantine clients.
            on: The target of the attack: statistics, updates or both.
            strength: The strength of the attack.
            silent: The clients that do not reply.
            introduced: Client -> the number of samples that it reported before round 1; other clients reported the true number.
            spoil: Called with a client and its reply, which it may change. The attack sees the changed replies.
            max_steps: The largest number of local steps that the server accepts; 0: any.
        """
        server = self._server(defence, attack, f, on, strength, max_steps)
        server.grid, server.population = self.grid, copy(self.population)
        population = server.population
        assert population is not None
        said = introduced or {}
        population.clients = {i: replace(client, samples=said.get(i, client.samples)) for i, client in population.clients.items()}
        population._claims = {client.node: client for client in population.clients.values()}
        server.ask_to_train(1, self.arrays, {})
        replies = []
        for client, (message, reply) in enumerate(zip(self.messages, self.replies, strict=True)):
            if client not in silent:
                content = reply.content
                if spoil is not None:
                    spoil(client, apart := taken_apart(reply))
                    content = apart.content()
                replies.append(Message(RecordDict(dict(content.items())), reply_to=message))
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
        self.variances = {k: a for k, a in self.statistics.items() if k.endswith("var")}
