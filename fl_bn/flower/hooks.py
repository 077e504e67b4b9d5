"""Check who calls a strategy's hooks, and what the hooks return."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import Strategy

from fl_bn.flower.log import log
from fl_bn.flower.own.mods import NOISE
from fl_bn.flower.population import Client, RunFailed
from fl_bn.support.client_names import ClientNames

SECURE = ("aggregate_train", "aggregate_evaluate")  # hooks that get clients' replies, which a secure sum hides


def outside(strategy: Strategy) -> RunFailed:
    """Return the error for a hook of ``strategy`` that somebody else than its own ``start`` called, such as Flower's noisy wrappers."""
    return RunFailed(
        f"only strategy.start(grid, ...) of {type(strategy).__name__} itself calls its hooks: put your steps into overridden hooks, "
        f"evaluate_fn and callbacks, in place of a loop of your own or of a strategy around it ({NOISE})"
    )


def overrides(strategy: Strategy, hook: str) -> bool:
    """Return whether user code defines the method ``hook`` of ``strategy``: in a class outside fl-bn, or as an instance attribute."""
    if hook in vars(strategy):
        return True
    owner = next(kind for kind in type(strategy).__mro__ if hook in vars(kind))
    return not owner.__module__.startswith("fl_bn.flower.")


def check_secure(strategy: Strategy) -> None:
    """Refuse a strategy that overrides ``aggregate_train`` or ``aggregate_evaluate``, for runs with secure aggregation.

    These two hooks get the clients' replies. A secure sum hides the replies, so it never calls the hooks.

    Raises:
        ValueError: ``strategy`` overrides one of the two hooks.
    """
    if called := [hook for hook in SECURE if overrides(strategy, hook)]:
        raise ValueError(
            f"{type(strategy).__name__} overrides {called[0]}, but with secure aggregation the server sees no client's reply, so this "
            "hook is never called: remove the hook, or switch secure aggregation off"
        )


def addressed(messages: Iterable[Message], clients: Sequence[Client], hook: str, called: ClientNames) -> tuple[list[Message], list[Client]]:
    """Return the messages of a hook as a list, and the clients to which they go.

    A hook may leave out some of the clients that fl-bn chose.

    Args:
        messages: what the hook returned.
        clients: the clients that fl-bn chose.
        hook: the hook's name.
        called: the clients' names.

    Raises:
        RunFailed: the hook returned None, a message is for another node, or a client gets two.
    """
    if messages is None:
        raise RunFailed(f"{hook} returned None: let it return the messages of super().{hook}(...), or some of them")
    sent = list(messages)
    nodes = [message.metadata.dst_node_id for message in sent]
    known = {client.node for client in clients}
    if strangers := sorted(set(nodes) - known):
        raise RunFailed(
            f"{hook} returned a message for {called.node(strangers[0])}, which is none of the {len(clients)} clients of this round: return "
            f"the messages of super().{hook}(...), or some of them"
        )
    if len(set(nodes)) < len(nodes):
        twice = next(node for node in nodes if nodes.count(node) > 1)
        raise RunFailed(f"{hook} returned {nodes.count(twice)} messages for {called.node(twice)}: return one per client")
    if missing := [client.index for client in clients if client.node not in set(nodes)]:
        log(logging.INFO, "%s leaves out %s", hook, called.clients(missing))
    return sent, [client for client in clients if client.node in set(nodes)]


def replies_for(strategy: Strategy, hook: str, replies: Iterable[Message]) -> Iterable[Message]:
    """Return ``replies``. If the user's code overrides ``hook``, they become a list, which that code may read twice."""
    return list(replies) if overrides(strategy, hook) else replies


def listed(messages: Any) -> Any:
    """Return the messages of a hook that is a generator as a list, so that the hook has run before anything else reads what it set."""
    return list(messages) if isinstance(messages, Iterator) else messages


def pair(returned: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
    """Check that ``aggregate_train`` returned a pair of arrays and metrics, and return it.

    Raises:
        RunFailed: It returned something else, such as None without a ``return``.
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        must = "aggregate_train must return a pair, arrays and metrics, as super().aggregate_train(...) does"
        raise RunFailed(f"{must}, but returned {returned!r:.100}")
    for value, kind in zip(returned, (ArrayRecord, MetricRecord), strict=True):
        if not isinstance(value, kind | None):
            raise RunFailed(f"aggregate_train must return an ArrayRecord and a MetricRecord, or None for them, but one is {value!r:.100}")
    return returned
