"""Who is there: Flower's nodes by the client index they serve, waited for, and sampled in an order that the seed alone decides."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fl_bn.flower.client_app import HELLO
from fl_bn.flower.posting import PASSING, send_and_receive


class RunFailed(Exception):
    """The run cannot go on; the message says what to do.

    No RuntimeError: Flower 1.25 takes these for its own, says that the run was rejected, and leaves it running.
    """


@dataclass(frozen=True)
class Client:
    """One client as it introduced itself. ``index``: its partition; ``node``: Flower's random id."""

    index: int
    node: int
    samples: int
    label_counts: tuple[int, ...] = ()


def sample_cohort(population: Sequence[int], size: int, rng: random.Random) -> list[int]:
    """``size`` of the population's indices, sorted."""
    return sorted(rng.sample(sorted(population), size))


class Population:
    """All clients of a run. Flower's node ids are random: only the client's own index makes a run reproducible."""

    def __init__(self, grid: Grid, expected: int, signature: str, wait: float, timeout: float) -> None:
        self.grid, self.expected, self.signature, self.wait, self.timeout = grid, expected, signature, wait, timeout
        self.clients: dict[int, Client] = {}
        self._refused: set[int] = set()
        self._gone: set[int] = set()
        self._doubles: dict[int, int] = {}  # refused node -> the index it claims, which another node serves

    def gather(self) -> None:
        """Wait until all expected clients have introduced themselves.

        Raises:
            RunFailed: fewer came within ``wait`` seconds, or a client belongs to another experiment.
        """
        end, told = time.monotonic() + self.wait, -1
        while True:
            self.greet(strict=True)
            if len(self.clients) >= self.expected:
                return
            if len(self.clients) != told:
                told = len(self.clients)
                log(logging.INFO, "waiting for clients: %d of %d are here", told, self.expected)
            if time.monotonic() > end:
                missing = sorted(set(range(self.expected)) - set(self.clients))
                raise RunFailed(
                    f"only {len(self.clients)} of {self.expected} clients came within {self.wait:.0f} s (missing: {missing}). Start the "
                    "others, or lower `clients`, or raise `wait-timeout` (in simulation: --federation-config 'options.num-supernodes=...')"
                )
            time.sleep(0.2)

    def wait_for(self, least: int) -> None:
        """Give ``least`` clients ``wait`` seconds to come (back)."""
        self.greet()
        end = time.monotonic() + self.wait
        if len(self.clients) < least:
            log(logging.WARNING, "%d clients are here, but a round needs %d: waiting for up to %.0f s", len(self.clients), least, self.wait)
        while len(self.clients) < least and time.monotonic() < end:
            time.sleep(1.0)
            self.greet()

    def greet(self, strict: bool = False) -> None:
        """Ask every node not seen before who it is; forget clients whose node is gone.

        Raises:
            RunFailed: with ``strict``, where a node answers with an error (its data cannot be read, say).
        """
        online = set(self.grid.get_node_ids())
        if gone := sorted(i for i, c in self.clients.items() if c.node not in online):
            log(logging.WARNING, "clients %s are offline", gone)
            self._gone |= set(gone)
        self.clients = {i: c for i, c in self.clients.items() if c.node in online}
        self._refused &= online
        self._refused -= {node for node, index in self._doubles.items() if index not in self.clients}
        new = online - {c.node for c in self.clients.values()} - self._refused
        messages = [Message(RecordDict(), node, HELLO, ttl=self.timeout, group_id="0") for node in sorted(new)]
        patience, silent = min(self.timeout, max(self.wait, 1.0)), set(new)
        for reply in send_and_receive(self.grid, messages, patience):
            node = reply.metadata.src_node_id
            silent -= {node} if node in new else new  # Flower's own errors do not say whose they are
            if reply.has_error():
                if reply.error.code in PASSING:
                    log(
                        logging.WARNING,
                        "a node did not introduce itself, and is asked again: code %s: %s",
                        reply.error.code,
                        reply.error.reason,
                    )
                elif strict:
                    raise RunFailed(f"node {node} cannot take part: {reply.error.reason}")
                else:
                    self._refuse(node, str(reply.error.reason))
            else:
                self._admit(node, reply)
        for node in () if strict else silent:
            self._refuse(node, f"it did not say within {patience:.0f} s who it is; it is asked again when it was offline")

    def _admit(self, node: int, reply: Message) -> None:
        hello: Mapping[str, Any] = reply.content.config_records.get("hello", {})
        try:
            index, clients, samples = int(hello["client"]), int(hello["clients"]), int(hello["samples"])
            counts = tuple(int(n) for n in json.loads(str(hello["label-counts"])))
            signature = str(hello["signature"])
        except (KeyError, TypeError, ValueError) as error:
            self._refuse(node, f"its introduction cannot be read ({error!r})")
            return
        if clients != self.expected:
            raise RunFailed(
                f"the run is for {self.expected} clients, but node {node} counts {clients}: set `clients` and the number of SuperNodes "
                f'alike, e.g. --run-config "clients={clients}" or --federation-config "options.num-supernodes={self.expected}"'
            )
        if not 0 <= index < self.expected or samples < 0:
            self._refuse(node, f"it calls itself client {index} of {clients} with {samples} samples")
        elif signature != self.signature:
            self._refuse(
                node,
                f"client {index} has another model, method or version of fl-bn ({signature}, here {self.signature}; a strategy takes the "
                "model as it is, a client convert(model, method))",
            )
        elif index in self.clients:
            self._doubles[node] = index  # a restarted client, say: asked again once the other node is gone
            self._refuse(node, f"client {index} is already served by node {self.clients[index].node}")
        else:
            self.clients[index] = Client(index, node, samples, counts)
            if index in self._gone:
                self._gone.discard(index)
                log(logging.INFO, "client %s is back", index)

    def _refuse(self, node: int, reason: str) -> None:
        self._refused.add(node)
        log(logging.WARNING, "node %s refused: %s", node, reason)

    def cohort(self, fraction: float, seed: int, round: int, least: int = 1) -> list[Client]:
        """The clients of ``round``, by index, ``least`` or more if there are: the same for the same seed, whatever the node ids."""
        size = min(len(self.clients), max(least, round_half_up(fraction * len(self.clients))))
        chosen = sample_cohort(list(self.clients), size, random.Random(f"{seed}/{round}"))
        return [self.clients[index] for index in chosen]

    def everyone(self) -> list[Client]:
        return [self.clients[index] for index in sorted(self.clients)]


def round_half_up(x: float) -> int:
    return int(x + 0.5)
