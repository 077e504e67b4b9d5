"""Ask the nodes to introduce themselves at the start of a run. The server finds the number of clients by a vote among the nodes."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping

from flwr.app import Message
from flwr.serverapp import Grid

from fl_bn.federation.schema import COMPARE
from fl_bn.flower.app.client_app import HELLO as ASK_HELLO
from fl_bn.flower.compat import simulates
from fl_bn.flower.in_process import InProcessGrid
from fl_bn.flower.log import log
from fl_bn.flower.own.mods import named_in
from fl_bn.flower.population import POLICY, Introductions, RunFailed
from fl_bn.flower.wire.messaging import receive
from fl_bn.flower.wire.versions import client_differs, greeting, introduction_of
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.support.wire import WireError, printable, reason

PATIENCE = 120.0  # seconds to wait for a node's answer, and for further nodes once enough have come
POLL = 1.0


def introduced(
    grid: Grid, least: int, timeout: float, signature: str, clients: int = 0, called: ClientNames = UNNAMED
) -> tuple[int, Introductions]:
    """Ask every node to introduce itself, until all clients have done so.

    Once ``least`` nodes are online, the others have ``PATIENCE`` seconds to come, but no more than ``timeout``. In Flower's
    simulation, they have ``timeout`` seconds. If the run's sites are known, the wait ends with an error as soon as fewer
    than ``least`` of them can still take part.

    Args:
        grid: Flower's grid.
        least: the smallest number of nodes with the right model.
        timeout: seconds for ``least`` nodes to come.
        signature: the signature of the server's model and method. Nodes with another signature do not count.
        clients: the number of clients. 0: the nodes vote on it, each by its ``num-partitions``, and the most frequent value wins.
        called: the names and nodes of the run's sites. Empty: not known.

    Returns:
        The number of clients, and the nodes' introductions.

    Raises:
        RunFailed: too few nodes came, too few of them may take part, or the vote on the number of clients is a tie. The
            message says what to do.
    """
    begin, replies, addressees = time.monotonic(), dict[int, Message](), set[int]()
    complete = isinstance(grid, InProcessGrid)  # no further node will ever come
    patience = timeout if simulates(grid) else min(timeout, PATIENCE)  # Ray may be slow to start
    enough_since, logged = begin, ""
    while True:
        nodes = set(grid.get_node_ids())
        if new := sorted(nodes - addressees):
            addressees |= nodes
            messages = [Message(greeting(), node, ASK_HELLO, ttl=timeout, group_id="0") for node in new]
            for reply in receive(grid, messages, patience, called=called):
                replies.setdefault(reply.metadata.src_node_id, reply)
                if called.nodes and _votes({reply.metadata.src_node_id: reply}, signature, called)[1]:  # else further nodes may still come
                    _check_enough(replies, least, signature, called)
        votes, wrong = _votes({node: replies[node] for node in sorted(nodes) if node in replies}, signature, called)
        agreed, usable, now = clients or _most(votes), votes.total(), time.monotonic()
        if len(nodes) < least:
            enough_since = now
            if complete or now - begin > timeout:
                raise RunFailed(
                    f"only {len(nodes)} of {least} nodes came within {timeout:.0f} s. Start the others, lower min_available_nodes, or wait "
                    f"longer: start(..., timeout={5 * timeout:.0f})"
                )
        elif (agreed and len(nodes) >= agreed) or complete or now - enough_since > patience:
            if usable >= least and agreed:
                return agreed, Introductions(frozenset(addressees), tuple(replies.values()))
            if usable >= least:
                counts = ", ".join(f"{count} say {number}" for number, count in sorted(votes.items()))
                raise RunFailed(f"nodes do not agree on the number of clients (num-partitions): {counts}. Give clients=... to the strategy")
            if complete or now - enough_since > patience:
                if usable == 0 and wrong:
                    raise RunFailed(wrong)
                silent = f"{len(nodes - replies.keys())} nodes did not introduce themselves within {patience:.0f} s"
                raise RunFailed(
                    f"only {usable} of {least} nodes may take part: {wrong or silent}. Start others, or lower min_available_nodes"
                )
        if wrong not in ("", logged):
            log(logging.WARNING, "a node is not admitted: %s", wrong)
            logged = wrong
        time.sleep(POLL)


def _check_enough(replies: Mapping[int, Message], least: int, signature: str, called: ClientNames) -> None:
    """Check that ``least`` sites of the run may still take part.

    Raises:
        RunFailed: too many sites have refused or cannot take part. Each site is asked once, so waiting would not help.
    """
    votes, wrong = _votes({node: replies[node] for node in sorted(replies)}, signature, called)
    unheard = set(called.nodes) - replies.keys()
    if votes.total() + len(unheard) < least:
        rest = f" (and {len(unheard)} did not answer yet)" if unheard else ""
        raise RunFailed(
            f"{wrong}. {votes.total()} of {len(called.nodes)} sites may take part{rest}, but the strategy waits for "
            f"min_available_nodes={least}. To go on without the others, lower min_available_nodes and min_train_nodes of the strategy"
        )


def _votes(replies: Mapping[int, Message], signature: str, called: ClientNames) -> tuple[Counter[int], str]:
    """Count the nodes' votes for the number of clients.

    Returns:
        First, number of clients -> its votes. Second, why the first node without a vote has none; empty if all vote.
    """
    votes, first = Counter[int](), ""
    for node, reply in replies.items():
        try:
            votes[_number(node, reply, signature, called)] += 1
        except RunFailed as error:
            first = first or str(error)
    return votes, first


def _most(votes: Counter[int]) -> int:
    """Return the number of clients that has more votes than any other. 0 if there is no such number."""
    (number, count), (_, next_count) = [*votes.most_common(2), (0, 0), (0, 0)][:2]
    return number if count > next_count else 0


def _number(node: int, reply: Message, signature: str, called: ClientNames) -> int:
    """Return the number of clients that ``node`` votes for.

    Raises:
        RunFailed: the node is not admitted. The message says why.
    """
    if reply.has_error():
        raise RunFailed(_missing(called.node(node) if node in called.nodes else "", reply.error.reason))
    try:
        introduction = introduction_of(reply.content)
    except WireError as error:
        raise RunFailed(f"{called.node(node)} introduced itself in a way that cannot be read: {error}") from error
    if other := client_differs(introduction["version"]):
        raise RunFailed(f"client {introduction['client']} cannot take part: {other}")
    if introduction["signature"] != signature:
        raise RunFailed(
            f"client {introduction['client']} has another model, method or version of fl-bn, or another option of the method (signature "
            f"{printable(introduction['signature'])}, here {signature}): name the same network and method in client_app.py (answer, "
            f"training) and in server_app.py (the strategy). {COMPARE}"
        )
    return int(introduction["clients"])


def _missing(site: str, why: str | None) -> str:
    """Return a sentence on why a node did not introduce itself.

    Args:
        site: the site's name in words; empty: not known.
        why: the error that came in place of the introduction.
    """
    if (said := reason(why)).startswith(POLICY):
        refusal = said.removeprefix(POLICY)
        return f"{site or 'a site'} refuses the run: {refusal}. Its owner may change policy.toml on that machine"
    if "No query function registered" in (why or ""):
        return (
            "the ClientApp has no handler for fl-bn's introduction: add to client_app.py, after app = ClientApp(), the line "
            "fl_bn.flower.answer(app, Net, method, batches)"
        )
    return named_in(why or "") or f"{site or 'a client'} could not say who it is: {said}"
