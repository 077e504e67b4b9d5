"""Train one round once, and give its replies to any number of servers: honest, attacked, changed, or with clients left out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ConfigRecord, Message, MetricRecord, RecordDict

from fl_bn.flower import BatchNormStrategy, Rounds
from fl_bn.flower.grid_transport import GridTransport
from fl_bn.methods import METHODS, attacked
from fl_bn.robust.attacks import Attack
from tests.federation import random_samples
from tests.flower.inside import Defence, Header, Payload, RoundRecord, Samples, arrays_record, from_records, to_numpy, to_records
from tests.in_process import WatchedGrid, client_app
from tests.networks import seeded_network


@dataclass
class Reply:
    """Hold the parts of a reply, so that a test can change them.

    ``raw`` maps a section and a name to an array that is not a NumPy array.
    """

    payload: Payload
    header: dict[str, object]
    metrics: dict[str, object]
    raw: dict[tuple[str, str], Array]

    def content(self) -> RecordDict:
        content = to_records(self.payload, Header("", "", 0, ""))
        content["fl-bn/header"] = ConfigRecord(self.header)  # type: ignore[arg-type]
        for (section, name), array in self.raw.items():
            content[f"fl-bn/{section}"][name] = array  # type: ignore[index]
        if self.metrics:
            content["fl-bn/metrics"] = MetricRecord(self.metrics)  # type: ignore[arg-type]
        return content


def taken_apart(message: Message) -> Reply:
    payload, header = from_records(message.content)
    own = {s: {n: a.copy() for n, a in arrays.items()} for s, arrays in payload.items()}
    return Reply(own, dict(asdict(header)), dict(message.content.metric_records["fl-bn/metrics"]), {})


Tensors = dict[str, np.ndarray]
RULES = ("mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "centered-clipping", "nnm+median", "nnm+trimmed-mean")
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

    def _server(self, defence: Defence, attack: str | Attack = "", f: int = 0, on: str = "both", strength: float = 0.0) -> GridTransport:
        method = attacked(self.method, attack, f, on, strength) if f else self.method
        rounds = Rounds(len(self.clients), min_replies=0.2, wait=0.0)
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
        spoil: Callable[[int, Reply], None] | None = None,
    ) -> Served:
        """Let a new server aggregate the replies; return its state.

        Args:
            on: The target of the attack: statistics, updates or both.
            silent: The clients that do not reply.
            spoil: Called with a client and its reply, which it may change. The attack sees the changed replies.
        """
        replies = []
        for client, (message, reply) in enumerate(zip(self.messages, self.replies, strict=True)):
            if client not in silent:
                content = reply.content
                if spoil is not None:
                    spoil(client, apart := taken_apart(reply))
                    content = apart.content()
                replies.append(Message(RecordDict(dict(content.items())), reply_to=message))
        return self.combined(replies, self._server(defence, attack, f, on, strength))

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
