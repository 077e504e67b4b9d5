"""Combine the metrics that clients compute on their own test data. The metrics arrive as plain numbers, or as a secure sum."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from flwr.app import Message, MetricRecord
from flwr.serverapp import Grid

from fl_bn.federation.metrics import fits, over_clients
from fl_bn.flower.app.client_app import SAVE
from fl_bn.flower.log import log
from fl_bn.flower.population import Client
from fl_bn.flower.wire.fields import add_to_config, config_of
from fl_bn.flower.wire.messaging import copy_of
from fl_bn.flower.wire.replies import Decoded, Reading, read_replies
from fl_bn.support.client_names import ClientNames
from fl_bn.support.wire import reason
from fl_bn.task import Task

if TYPE_CHECKING:
    from fl_bn.flower.secagg.rounds import SecureRounds

Send = Callable[[list[Message]], list[Message]]


class LogOnce:
    """Log a warning about each refused client, once in a run for each client and reason.

    Args:
        line: the log line, with ``%s`` for the client's name and ``%s`` for the reason.
        called: the clients' names.
    """

    def __init__(self, line: str, called: ClientNames) -> None:
        self._line, self._called, self._logged = line, called, set[tuple[int, str]]()

    def __call__(self, refused: Mapping[int, str]) -> None:
        """Log a warning for each client index and reason in ``refused`` that was not logged before."""
        for index, why in sorted(refused.items()):
            if (index, why) not in self._logged:
                self._logged.add((index, why))
                log(logging.WARNING, self._line, self._called.client(index), why)


class EvaluationsAtClients:
    """Combine the clients' evaluations in one run.

    Args:
        task: the run's task, which declares the metrics.
        called: the clients' names in the log.
    """

    def __init__(self, task: Task, called: ClientNames) -> None:
        self.task, self._called, self._say = task, called, LogOnce("%s did not evaluate: %s", called)

    def in_the_clear(self, replies: Iterable[Decoded], reading: Reading) -> tuple[MetricRecord | None, dict[int, dict[str, float]]]:
        """Combine the replies of an evaluation without secure aggregation.

        Args:
            replies: the clients' replies.
            reading: checks the replies.

        Returns:
            First, the metrics over all clients (``over_clients``); None if no client has a valid metric. Second, each
                client's own loss and task metric, by client index.
        """
        checked, refused, _ = read_replies(replies, reading)
        self._say(refused)
        metric = self.task.metric
        metrics = {reply.client: reply.metrics for reply in checked if fits(self.task, metric, reply.metrics[metric])}  # NaN: no label
        if not metrics:
            return None, {}
        own = {index: {k: m[k] for k in ("loss", metric)} for index, m in metrics.items()}
        return MetricRecord({**over_clients(self.task, [dict(m) for m in metrics.values()])}), own

    def save_models(self, messages: list[Message], send: Send) -> None:
        """Ask clients to save their own models.

        Args:
            messages: one message per client, of Flower's message type ``SAVE``.
            send: sends messages, and returns the replies.
        """
        for reply in send(messages):
            if reply.has_error():
                who = self._called.node(reply.metadata.src_node_id)
                log(logging.WARNING, "%s did not save its model: %s", who, reason(reply.error.reason))

    def as_a_sum(
        self, secure: SecureRounds, grid: Grid, instructions: Sequence[Message], clients: Sequence[Client], timeout: float, send: Send
    ) -> MetricRecord | None:
        """Return the mean metrics over ``clients`` from a secure sum, which hides single clients.

        If clients are to save their models, separate messages ask for this. So clients outside the sum save their
        models, too.

        Args:
            secure: makes the sum.
            grid: Flower's grid.
            instructions: the evaluate messages.
            clients: the clients that evaluate.
            timeout: how many seconds to wait for the replies.
            send: sends messages, and returns the replies.

        Returns:
            The means by name. None: there are no messages, or the secure sum failed.
        """
        if not instructions:
            return None
        if any(config_of(message.content).get("save") for message in instructions):
            self.save_models([copy_of(message, kind=SAVE) for message in instructions], send)
        nodes = {client.node for client in clients}
        messages = [copy_of(message, kind="train") for message in instructions if message.metadata.dst_node_id in nodes]
        for message in messages:
            add_to_config(message.content, {"save": ""})
        means, refused = secure.evaluate(grid, messages, clients, timeout, self.task)
        self._say(refused)
        return MetricRecord({**means}) if means else None
