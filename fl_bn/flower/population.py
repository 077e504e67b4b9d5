"""Keep track of the clients of a run: meet them, find their number by a vote, match Flower's nodes to clients, draw each round's cohort."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from flwr.app import Message
from flwr.serverapp import Grid

from fl_bn.federation.rounds import Rounds
from fl_bn.federation.schema import COMPARE
from fl_bn.flower.compat import federation_config, log, simulates
from fl_bn.flower.in_process import InProcessGrid
from fl_bn.flower.mods import named_in
from fl_bn.flower.wire.fields import ASK_HELLO
from fl_bn.flower.wire.messaging import PASSING, receive, send_and_receive
from fl_bn.flower.wire.versions import client_differs, greeting, introduction_of
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.support.wire import WireError, printable, reason

POLICY = "NotAllowed: "  # begins the error of a site whose policy refuses the run


class RunFailed(Exception):
    """Report that the run cannot go on; the message advises what to do.

    It is not derived from RuntimeError. Flower 1.25 would mistake such an error for one of its own, report that the run
    was rejected, and not end it.
    """


@dataclass(frozen=True)
class Client:
    """Describe one client as it introduced itself.

    Attributes:
        index: the number of the client's data partition, from 0.
        node: Flower's random id of the client's node.
        samples: the number of the client's training samples.
        label_counts: the number of samples per label, if the client reports it.
    """

    index: int
    node: int
    samples: int
    label_counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Introductions:
    """Hold the nodes' introductions, until a ``Population`` is made of them.

    Attributes:
        nodes: the ids of the nodes that were asked to introduce themselves.
        replies: the replies that came in time: introductions or errors.
    """

    nodes: frozenset[int] = frozenset()
    replies: tuple[Message, ...] = ()


NOBODY = Introductions()


def sample_cohort(population: Sequence[int], size: int, rng: random.Random) -> list[int]:
    """Draw ``size`` different indices from ``population``, and return them sorted."""
    return sorted(rng.sample(sorted(population), size))


class Population:
    """Track all clients of a run, by index. Flower's node ids are random, so only an index is reproducible.

    ``clients`` holds the clients that have introduced themselves. ``everyone()`` returns the connected clients that may
    already train (``rounds.joining``).

    Each node says itself which index its client has. If the operator lists the node of each client (``rounds.nodes``),
    an index belongs to the listed node only. Without this list, the first node that served an index keeps it. While
    that node is offline, another node may serve the index. If several nodes claim an index that no node has served
    yet, none of these nodes gets it. With ``clients_are_nodes``, these nodes get different indices (see ``seats.py``).

    Args:
        grid: Flower's grid.
        rounds: the server's settings for rounds.
        signature: the signature of the server's model and method. Clients must have the same.
        round: the next round, with which the run starts or goes on.
        introductions: the introductions of the nodes that were asked already.
        clients_are_nodes: whether nodes that claim one index get an index each.
    """

    def __init__(
        self,
        grid: Grid,
        rounds: Rounds,
        signature: str,
        round: int = 1,
        introductions: Introductions = NOBODY,
        clients_are_nodes: bool = False,
    ) -> None:
        self.grid, self.rounds, self.signature, self.round, self.called = grid, rounds, signature, round, rounds.called
        self.clients: dict[int, Client] = {}
        self._claims: dict[int, Client] = {}  # node -> the client that it claims to be, whether or not it serves that index
        self._first: dict[int, int] = {}  # index -> the node that served it first, since the start
        self._last: dict[int, int] = {}  # index -> the node that served it last
        self._rivals: dict[int, list[int]] = {}  # index -> the other nodes that claim it, as last logged
        self._order: list[Client] = []  # the connected clients, by index
        self._online: frozenset[int] = frozenset()  # connected nodes at the last look; ``_problem``: what was wrong with them
        self._problem, self._introductions = "", introductions
        self._clients_are_nodes = clients_are_nodes
        self._given: dict[int, tuple[int, int]] = {}  # node -> an index that was given to it, and the one that it claims
        self._refused: set[int] = set()
        self.absent: dict[int, str] = {}  # client whose site refuses the run by its policy -> the reason
        self._strangers: set[int] = set()  # refused nodes that belong to no client, as far as is known
        self._gone: set[int] = set()
        self._joined: set[int] = set()  # clients that took part in a round, or were asked to

    def gather(self) -> None:
        """Wait for all clients that may take part in the next round, or for as many as are enough for a start.

        Raises:
            RunFailed: too few clients came within ``rounds.wait`` seconds; or too few are connected, and one node cannot
                take part.
        """
        wait, starting = self.rounds.wait, self.rounds.starting(self.round)
        end, logged = time.monotonic() + wait, -1
        while True:
            problem = self.greet()
            refusing: set[int] = set() if problem else starting & self.absent.keys()
            needed = self.rounds.at_start or len(starting - refusing)
            if (here := len(self.everyone())) >= needed:
                break
            if problem:
                raise RunFailed(problem)
            if here != logged:
                logged = here
                log(logging.INFO, "waiting for clients: %d of %d are here", here, needed)
            if time.monotonic() > end:
                missing = self.called.clients(sorted(starting - set(self.clients)))
                keys = "`clients-at-start`" if self.rounds.at_start else "`clients`"
                raise RunFailed(
                    f"only {here} of {needed} clients came within {wait:.0f} s (missing: {missing}). Start the others, or lower {keys} "
                    f"(in simulation: {federation_config({'num-supernodes': '...'})}). If they are slow to start, as Ray's processes "
                    f'are on a busy machine, wait longer: --run-config "wait-timeout={max(600.0, 5 * wait):.0f}"'
                )
            time.sleep(0.2)
        self._joined = {client.index for client in self.everyone()}
        self._first = {client.index: client.node for client in self.clients.values()}
        if self.absent:
            log(
                logging.WARNING,
                "the run goes on without %s, since the site's policy refuses the run",
                self.called.clients(sorted(self.absent)),
            )
        if later := sorted(set(range(self.rounds.clients)) - self._joined - self.absent.keys()):
            log(logging.INFO, "starting with %d clients; %s may join later", here, self.called.clients(later))

    def wait_for(self, least: int, round: int) -> None:
        """Wait up to ``rounds.wait`` seconds for ``least`` clients before ``round``, and log which clients join in this round."""
        self.round, wait = round, self.rounds.wait
        self.greet()
        end = time.monotonic() + wait
        if (here := len(self.everyone())) < least:
            log(logging.WARNING, "%d clients are here, but a round needs %d: waiting for up to %.0f s", here, least, wait)
        while len(self.everyone()) < least and time.monotonic() < end:
            time.sleep(1.0)
            self.greet()
        for client in self.everyone():
            if client.index not in self._joined:
                self._joined.add(client.index)
                log(logging.INFO, "%s joins in round %s", self.called.client(client.index), round)

    def greet(self) -> str:
        """Ask every new node to introduce itself, and remove clients whose node is offline.

        Returns:
            A problem that keeps a node from taking part, with advice; empty if there is none. For example, the
                node's data cannot be read, or two nodes claim one index.
        """
        online = frozenset(self.grid.get_node_ids())
        self._ask_known_strangers()
        if online == self._online and len(self._claims) + len(self._refused) == len(online):
            return self._problem  # all nodes are known already; the cost of a round must not grow with the population
        self._online = online
        if gone := sorted(i for i, c in self.clients.items() if c.node not in online):
            log(logging.WARNING, "offline: %s", self.called.clients(gone))
            self._gone |= set(gone)
        self._claims = {node: client for node, client in self._claims.items() if node in online}
        self._refused &= online
        new = online - set(self._claims) - self._refused
        known, self._introductions = self._introductions, NOBODY
        addressees = sorted(new - known.nodes)
        messages = [Message(greeting(), node, ASK_HELLO, ttl=self.rounds.timeout, group_id="0") for node in addressees]
        patience, silent, problem = min(self.rounds.timeout, max(self.rounds.wait, 1.0)), set(new), ""
        for reply in [*known.replies, *send_and_receive(self.grid, messages, patience, called=self.called)]:
            node = reply.metadata.src_node_id
            silent -= {node} if node in new else new  # Flower's own errors do not name their node
            if node in self._claims:
                log(logging.WARNING, "%s introduced itself twice: its first introduction counts", self.called.node(node))
            elif reply.has_error():
                if reply.error.code in PASSING:
                    who = self.called.node(node) if node in new else "a node"
                    why = reason(reply.error.reason)
                    log(logging.WARNING, "%s did not introduce itself, and is asked again: code %s: %s", who, reply.error.code, why)
                else:
                    problem = problem or self._refusal(node, reason(reply.error.reason))
                    self._strangers |= {node} if self.rounds.nodes and self.called.client_of(node) is None else set()
                    self._refuse(node, reason(reply.error.reason))
            else:
                wrong = self._admit(node, reply)
                problem = problem or wrong
        for node in silent if self._joined else ():  # before the start, the run waits for them
            self._refuse(node, f"it did not introduce itself within {patience:.0f} s; it is asked again after it has reconnected")
        self._problem = self._assign()
        self._order = [self.clients[index] for index in sorted(self.clients)]
        return self._problem or problem

    def _refusal(self, node: int, why: str) -> str:
        """Return why the run cannot go on, now that a node refuses to take part. Empty: it goes on without the node's client.

        Args:
            node: The node.
            why: The node's error.
        """
        who, client = self.called.node(node), self.called.client_of(node)
        if client is None or not why.startswith(POLICY):
            return f"{who} cannot take part: {why}"
        self.absent[client] = why.removeprefix(POLICY)
        least, remaining = self.rounds.min_sites, len(self.rounds.starting(self.round) - self.absent.keys())
        if 0 < least <= remaining:
            return ""
        fewer = f" (the {remaining} other sites are fewer than min-sites={least})" if least else ""
        return (
            f"{who} refuses the run{fewer}: {self.absent[client]}. Its owner may change policy.toml on that machine. On this one, change "
            f"the run config, or go on without the site: min-sites={remaining}"
        )

    def _ask_known_strangers(self) -> None:
        """Allow refused nodes to be asked again if they now belong to a client. This happens when a site's key was renewed."""
        known = {node for node in self._strangers if self.called.client_of(node) is not None}
        self._refused -= known
        self._strangers -= known

    def _assign(self) -> str:
        """Choose, for each client index, one of the nodes that claim it.

        The node that first served the index since the start comes first. Next is the node that serves it now. If neither
        claims the index, and only one other node does, that node gets it. If several others claim it, none gets it.

        Returns:
            A problem if several nodes claim an index and none of them was chosen; else empty.
        """
        claims: dict[int, list[int]] = {}
        seats = self._seats()
        for node, client in sorted(seats.items()):
            claims.setdefault(client.index, []).append(node)
        before, self.clients, problem = self.clients, {}, ""
        for index, nodes in claims.items():
            known = [self._first.get(index), before[index].node if self._joined and index in before else None]
            preferred = [node for node in nodes if node == known[0]] or [node for node in nodes if node == known[1] or len(nodes) == 1]
            holder = preferred[0] if preferred else None
            if holder is None:
                problem = (
                    f"nodes {' and '.join(map(str, nodes))} call themselves {self.called.client(index)}, so none of them takes part: "
                    "give every SuperNode a partition-id of its own, and stop those that are not that client"
                )
            else:
                self._serve(seats[holder])
            rivals = [node for node in nodes if node != holder]
            if rivals != self._rivals.get(index, []):
                for rival in rivals if holder is not None else ():
                    who = self.called.client(index)
                    log(logging.WARNING, "%s is refused: %s is already served by node %s", self.called.node(rival), who, holder)
                if holder is None:
                    log(logging.WARNING, "%s", problem)
            self._rivals[index] = rivals
        return problem

    def _seats(self) -> dict[int, Client]:
        """Return node -> client. The client has the index that its node claims, or the one that the server gave it instead."""
        claims = {node: client.index for node, client in self._claims.items()}
        if not self._clients_are_nodes:
            return self._claims
        before = dict(self._given)
        if not self._joined:
            self._given = {node: (index, claims[node]) for node, index in seated(claims, self.rounds.clients).items()}
        for node in sorted(claims.keys() - self._given.keys() - set(self._last.values())) if self._joined else ():
            online = {client.index for client in self.clients.values() if client.node in claims}
            other = seat_of_newcomer(claims[node], online, self.rounds.clients, self._given, self._first)
            self._given |= {node: (other, claims[node])} if other != claims[node] else {}
        for node, (index, claimed) in self._given.items():
            if node in claims and before.get(node) != (index, claimed):
                who, has = self.called.client(claimed), self.called.client(index)
                log(logging.WARNING, "node %s calls itself %s, as another node does: it takes part as %s", node, who, has)
        return {n: replace(client, index=self._given[n][0]) if n in self._given else client for n, client in self._claims.items()}

    def _serve(self, client: Client) -> None:
        index, last = client.index, self._last.get(client.index, client.node)
        self.clients[index] = client
        if self._joined:
            self._first.setdefault(index, client.node)
            if client.node not in (last, self._first[index]) and self.called.client_of(client.node) == index:
                log(logging.INFO, "%s has a new key", self.called.client(index))
            elif client.node not in (last, self._first[index]):
                log(
                    logging.WARNING,
                    "%s is now served by node %s instead of node %s: if this is not the same client after a restart, stop the run",
                    self.called.client(index),
                    client.node,
                    last,
                )
        self._last[index] = client.node
        self.absent.pop(index, None)
        if index in self._gone:
            self._gone.discard(index)
            log(logging.INFO, "%s is back", self.called.client(index))

    def _admit(self, node: int, reply: Message) -> str:
        """Check a node's introduction. Store which client the node claims to be, or refuse the node.

        Args:
            node: The node.
            reply: The reply with its introduction.

        Returns:
            The problem, with advice, if the whole run may have been set up wrongly; else empty.
        """
        try:
            introduction = introduction_of(reply.content)
        except WireError as error:
            self._refuse(node, f"its introduction cannot be read ({error})")
            return ""
        index, clients, expected = introduction["client"], introduction["clients"], self.rounds.clients
        if other := client_differs(introduction["version"]):
            self._refuse(node, other)
            return f"{self.called.node(node)} cannot take part: {other}"
        if clients != expected:
            other = f"the run is for {expected} clients, but {self.called.node(node)} says that there are {clients} (num-partitions)"
            self._refuse(node, other)
            return (
                f"{other}: set `clients` and the number of SuperNodes to the same number, e.g. "
                f'--run-config "clients={clients}" or {federation_config({"num-supernodes": expected})}'
            )
        if index >= expected:
            self._refuse(node, f"it calls itself client {index}, but the {clients} clients are 0..{clients - 1}: correct its partition-id")
        elif introduction["signature"] != self.signature:
            self._refuse(
                node,
                f"{self.called.client(index)} has another model, method or version of fl-bn, or another option of the method "
                f"({printable(introduction['signature'])}, here {self.signature}; give the strategy the unconverted model, and the client "
                f"convert(model, method)). {COMPARE}",
            )
        elif self.rounds.nodes and (owner := self.called.client_of(node)) != index:
            theirs = "no client" if owner is None else self.called.client(owner)
            self._strangers |= {node} if owner is None else set()
            other = f"it calls itself {self.called.client(index)}, but its key belongs to {theirs}: correct its partition-id"
            self._refuse(node, other)
            return f"{self.called.node(node)} cannot take part: {other}"
        else:
            self._claims[node] = Client(index, node, introduction["samples"], introduction["label-counts"])
        return ""

    def _refuse(self, node: int, reason: str) -> None:
        self._refused.add(node)
        log(logging.WARNING, "%s is refused: %s", self.called.node(node), reason)

    def cohort(self, fraction: float, seed: int, round: int, least: int = 1) -> list[Client]:
        """Draw the clients of ``round``, sorted by index. The same seed draws the same clients, whatever the node ids.

        Args:
            fraction: the share of the connected clients, 0..1.
            seed: the run's seed.
            round: the round's number.
            least: the smallest number of clients, if that many are connected.
        """
        here = [client.index for client in self.everyone()]
        size = min(len(here), max(least, round_half_up(fraction * len(here))))
        chosen = sample_cohort(here, size, random.Random(f"{seed}/{round}"))
        return [self.clients[index] for index in chosen]

    def everyone(self) -> list[Client]:
        """Return the connected clients that may already train (``rounds.joining``), sorted by index."""
        joining = self.rounds.joining
        return [client for client in self._order if joining.get(client.index, 1) <= self.round] if joining else list(self._order)


def round_half_up(x: float) -> int:
    """Round to the nearest whole number; round halves up: 2.5 to 3."""
    return int(x + 0.5)


def seated(claims: Mapping[int, int], clients: int) -> dict[int, int]:
    """Return node -> new number, for each node whose claimed number belongs to another node.

    Of several nodes that claim one number, the node with the smallest id gets it, since Flower draws these ids at
    random. The others, in the order of their ids, get the smallest numbers that nobody claims. The result is empty if
    there are more nodes than numbers.

    Args:
        claims: the claimed number of each node.
        clients: how many numbers there are.
    """
    if len(claims) > clients:
        return {}
    first: dict[int, int] = {}
    for node in sorted(claims):
        first.setdefault(claims[node], node)
    free = iter(sorted(set(range(clients)) - set(claims.values())))
    return {node: next(free) for node in sorted(claims) if first[claims[node]] != node}


def seat_of_newcomer(
    number: int, online: Collection[int], clients: int, given: Mapping[int, tuple[int, int]], served: Collection[int]
) -> int:
    """Return the number of a node that connects after the start and claims ``number``.

    The first case that applies decides:

    * No online node has ``number``: the new node gets it.
    * The server gave another number to a node that claimed ``number`` and is offline now: the new node gets that other
      number, since it may be the same client after a restart.
    * The server gave ``number`` to a node that claimed another one: the new node gets the smallest number that no node
      has had since the start. If there is none, it gets ``number``.
    * Otherwise it gets ``number``, and two nodes claim this number.

    Args:
        number: the number that the node claims.
        online: the numbers of the nodes that are online.
        clients: how many numbers there are.
        given: node -> the number that the server gave it, and the number that it claimed.
        served: the numbers that some node has had since the start.
    """
    if number not in online:
        return number
    if offline := sorted(seat for seat, claim in given.values() if claim == number and seat not in online):
        return offline[0]
    if number not in {seat for seat, _ in given.values()}:
        return number
    return min(set(range(clients)) - set(online) - set(served), default=number)


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
