"""Call a strategy's hooks as Flower does, also those that a subclass overrides, and check what they return."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType

from flwr.app import Message
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Result,
    Strategy,
)

from fl_bn.bn.roles import Role
from fl_bn.federation.record import RoundRecord
from fl_bn.flower.log import log
from fl_bn.flower.own.mods import NOISE, ONE_RECORD
from fl_bn.flower.population import Client, RunFailed
from fl_bn.methods import Method
from fl_bn.support.client_names import ClientNames

WRAPPERS = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
SECURE = ("aggregate_train", "aggregate_evaluate")  # hooks that get clients' replies, which a secure sum hides


@dataclass(repr=False)
class RunResult(Result):
    """Hold Flower's result of a run, and every round's record.

    Attributes:
        records: the records in the order of the rounds. In the last one, ``records[-1].client_metrics`` has each
            client's own training metrics, and ``records[-1].client_evaluation`` each client's evaluation.
    """

    records: list[RoundRecord] = field(default_factory=list)


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


def check_unwrapped(strategy: Strategy, method: Method) -> None:
    """Check that none of Flower's differential privacy strategies wraps ``strategy`` and calls its hooks.

    Such a wrapper clips the arrays of a reply as one list, in the order of the model's arrays. It adds noise to
    all arrays that ``aggregate_train`` returns, including BatchNorm's variances. Moments, which FBN and HBN
    report, have no place in that list.

    Args:
        strategy: the strategy.
        method: its method, for the error message.

    Raises:
        RunFailed: such a strategy wraps ``strategy``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not strategy and isinstance(owner, WRAPPERS):
            kind = next(kind.__name__ for kind in WRAPPERS if isinstance(owner, kind))
            negative = ", and its noise would make BatchNorm's variances negative" if method.shares(Role.STATISTIC) else ""
            raise RunFailed(f"{kind} cannot wrap {type(strategy).__name__}: {ONE_RECORD}{negative}; {NOISE}")
        frame = frame.f_back


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
