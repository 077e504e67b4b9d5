"""Keep track of a run's clients: their nodes, each cohort, and what they keep."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fl_bn.federation.policy import ServerPolicy
from fl_bn.federation.record import RoundRecord
from fl_bn.federation.schema import COMPARE, START
from fl_bn.federation.shared_model import SharedModel
from fl_bn.federation.values import Reply, nbytes, to_numpy
from fl_bn.flower.compat import log, simulates
from fl_bn.flower.in_process import InProcessGrid
from fl_bn.flower.wire.codec import OURS, add_to_config, tensors_of, to_record
from fl_bn.flower.wire.messages import ASK_HELLO, HELLO, client_differs, greeting
from fl_bn.flower.wire.messaging import PASSING, receive
from fl_bn.flower.wire.messaging import RunFailed as RunFailed
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.support.wire import WireError, printable, reason

POLICY = "NotAllowed: "  # begins the error of a site whose policy refuses the run
POLL = 0.2  # seconds between two looks at who is there
WITHOUT = "If the other sites suffice, set min-sites to their number to go on without it"
NO_HANDLER = "the ClientApp has no handler for fl-bn's introduction: add fl_bn.flower.answer(app, Net, method, batches) to client_app.py"


@dataclass(frozen=True)
class Client:
    """Describe one client as it introduced itself.

    Attributes:
        index: the number of the client's data partition, from 0.
        node: Flower's random id of the client's node.
        clients: the number of clients of the run, as the client says it.
    """

    index: int
    node: int
    samples: int
    label_counts: tuple[int, ...] = ()
    clients: int = 0


def sample_cohort(population: Sequence[int], size: int, rng: random.Random) -> list[int]:
    """Draw ``size`` different indices from ``population``, and return them sorted."""
    return sorted(rng.sample(sorted(population), size))


def round_half_up(x: float) -> int:
    """Round to the nearest whole number, and halves up."""
    return int(x + 0.5)


class Population:
    """Track all clients of a run, by index. Flower's node ids are random, so only an index is reproducible.

    Each node says which index its client has. If the operator lists the clients'
    nodes (``called.nodes``), an index belongs to the listed node only. Otherwise
    the first node that served an index keeps it; while it is offline, another one
    may serve the index. An index that several new nodes claim is given to none.

    Args:
        policy: whom the run waits for, and how long.
        signature: the signature of model and method, the same at all clients.
        called: the names of clients and nodes.
        number: the number of clients. 0: the most frequent ``num-partitions`` of
            the nodes, once known.
        least: in a user's own app, the smallest number of nodes; others may be
            unfit, or not come for ``policy.wait`` seconds. 0: all clients are
            needed, or ``policy.at_start``, and an unfit node ends the run.

    Attributes:
        absent: why clients are missing that ``policy.min_sites`` lets the run do
            without.
    """

    def __init__(self, grid: Grid, policy: ServerPolicy, signature: str, called: ClientNames, number: int, least: int = 0) -> None:
        self.grid, self.policy, self.signature, self.called, self.number, self.least = grid, policy, signature, called, number, least
        self.clients, self.absent = dict[int, Client](), dict[int, str]()
        self._claims: dict[int, Client] = {}  # node -> the client that it claims to be, whether or not it serves that index
        self._refused: dict[int, tuple[int | None, str]] = {}  # node -> its client, as far as is known, and why it cannot take part
        self._holders: dict[int, list[int]] = {}  # index -> the node that served it first since the start, and the one that did so last
        self._online, self._problem = frozenset[int](), ""  # connected nodes at the last look, and what was wrong with them
        self._gone, self._joined = set[int](), set[int]()  # clients that are offline, and those that took part in a round, or were asked to

    def gather(self) -> int:
        """Wait for all clients that may take part in the next round, or for enough. Return their number.

        If too few come in time, ``RunFailed`` is raised.
        """
        begin = enough = time.monotonic()
        fixed, logged = self.least > 0 and (isinstance(self.grid, InProcessGrid) or simulates(self.grid)), -1
        while True:
            problem, now = self.greet(), time.monotonic()
            if len(self._online) < self.least and now - begin < self.policy.timeout:
                enough = now
            # all nodes are known by now, and have answered
            answered = fixed and self._claims.keys() | self._refused.keys() >= self._online == {*self.grid.get_node_ids()} > set()
            late = answered or now - enough > self.policy.wait
            if late and 0 < self.policy.min_sites <= len(self.clients):
                for index in set(range(self.policy.clients)) - self.clients.keys() - self.absent.keys():
                    self._do_without(index, f"it did not come within {self.policy.wait:.0f} s")
            here, needed = self._here_and_needed()
            if here >= needed > 0 or (late and 0 < self.least <= here and self._agreed()):
                break
            if late or (problem and not self._may_do_without()):
                raise RunFailed((not self.least and problem) or self._too_few(here, needed))
            if here != logged:
                logged = here
                log(logging.INFO, "waiting for clients: %d of %s are here", here, needed or "an unknown number")
            time.sleep(POLL)
        self._begin()
        return self.number

    def _may_do_without(self) -> bool:
        """Return whether enough others may still come. Each node is asked only once."""
        sites = self.called.nodes
        return self.least > 0 and (not sites or len({*sites, *self._claims} - self._refused.keys()) >= self.least)

    def _agreed(self) -> int:
        """Return the number of clients that is known or has most votes, else 0."""
        (number, count), (_, second) = [*Counter(client.clients for client in self._claims.values()).most_common(2), (0, 0), (0, 0)][:2]
        return self.number or (number if count > second else 0)

    def _here_and_needed(self) -> tuple[int, int]:
        """Return how many clients are here, and with how many the run starts (0: unknown)."""
        if not self.least:
            return len(self.everyone()), self.policy.at_start or self.policy.clients - len(self.absent)
        usable, number = len(self._claims), self._agreed()
        return usable, max(self.least, min(number, usable) if len(self._online) >= number else number) if number else 0

    def _too_few(self, here: int, needed: int) -> str:
        wait = self.policy.wait
        if self.least:
            if here >= self.least:
                votes = sorted(Counter(client.clients for client in self._claims.values()).items())
                return f"nodes do not agree on num-partitions (number, votes): {votes}. Give clients=... to the strategy"
            silent = len(self._online) - here - len(self._refused)
            unknown = f"{silent} nodes did not introduce themselves" if silent else "no other node came"
            _, why = next(iter(self._refused.values()), (None, unknown))
            return f"{why}. {here} nodes may take part, {self.least} are needed: mend the cause, start others, or lower min_available_nodes"
        missing = self.called.clients(sorted(set(range(self.policy.clients)) - self.clients.keys()))
        advice = f"start the others, lower `clients` or `clients-at-start`, set min-sites, or wait-timeout={max(600.0, 5 * wait):.0f}"
        return f"only {here} of {needed} clients came within {wait:.0f} s (missing: {missing}): {advice}"

    def _begin(self) -> None:
        if self.least:
            self.number, claims = self._agreed(), self._claims
            if len(self.called.nodes) != self.number:  # the app counts its clients in a way of its own
                self.called = ClientNames(registered=self.called.registered)
            self._claims = {}
            for node, client in sorted(claims.items()):
                self._enter(node, client)
            self._assign()
        self._joined = {client.index for client in self.everyone()}
        self._holders = {client.index: [client.node] * 2 for client in self.clients.values()}
        if absent := sorted(self.absent):
            log(logging.WARNING, "the run goes on without %s", self.called.clients(absent))
        if later := sorted(set(range(self.number)) - self._joined - self.absent.keys()):
            log(logging.INFO, "starting with %d clients; %s may join later", len(self._joined), self.called.clients(later))

    def wait_for(self, least: int, round: int) -> None:
        """Wait up to ``policy.wait`` seconds for ``least`` clients, and log which join."""
        wait = self.policy.wait
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
        """Ask new nodes to introduce themselves, and remove offline ones. Return a problem."""
        online = frozenset(self.grid.get_node_ids())
        known = {node for node, (client, _) in self._refused.items() if self.called.client_of(node) != client}  # a site's key was renewed
        self._refused = {node: why for node, why in self._refused.items() if node in online - known}
        if online == self._online and online == self._claims.keys() | self._refused.keys():
            return self._problem  # all nodes are known already; the cost of a round must not grow with the population
        return self._greet(online)

    def _greet(self, online: frozenset[int]) -> str:
        self._online, called, problem = online, self.called, ""
        if gone := sorted(i for i, c in self.clients.items() if c.node not in online):
            log(logging.WARNING, "offline: %s", called.clients(gone))
            self._gone |= set(gone)
        self._claims = {node: client for node, client in self._claims.items() if node in online}
        silent = new = online - self._claims.keys() - self._refused.keys()
        messages = [Message(greeting(), node, ASK_HELLO, ttl=self.policy.timeout, group_id="0") for node in sorted(new)]
        patience = min(self.policy.timeout, max(self.policy.wait, 1.0))
        for reply in receive(self.grid, messages, patience, called=called):
            node = reply.metadata.src_node_id
            silent -= {node}
            if reply.has_error() and reply.error.code in PASSING:
                who, why = called.node(node), reason(reply.error.reason)
                log(logging.WARNING, "%s did not introduce itself, and is asked again: code %s: %s", who, reply.error.code, why)
            else:
                wrong = self._admit(node, reply)
                problem = problem or wrong
        for node in silent if self._joined else ():  # before the start, the run waits for them
            why = f"it did not introduce itself within {patience:.0f} s (another run may keep it busy)"
            self._refuse(node, f"{why}; once back, it is asked again")
        self._problem = self._assign() if self._joined or not self.least else ""
        return self._problem or problem

    def _admit(self, node: int, reply: Message) -> str:
        """Enter the client of a node, or refuse it. Return a problem of the whole run."""
        if reply.has_error():
            return self._refused_by(node, reply.error.reason or "")
        try:
            said = HELLO.of(reply.content)
        except WireError as error:
            return self._refuse(node, f"its introduction cannot be read ({error})", fatal=False)
        if other := client_differs(said["version"]):
            return self._refuse(node, other)
        client = Client(said["client"], node, said["samples"], said["label-counts"], said["clients"])
        if said["signature"] != self.signature:
            theirs = f"signature {printable(said['signature'])}, here {self.signature}"
            other = f"{self.called.client(client.index)} has another model, method, option of it, or version of fl-bn ({theirs})"
            return self._refuse(node, f"{other}: name the same unconverted network and method on both sides. {COMPARE}", fatal=False)
        if self.number:
            return self._enter(node, client)
        self._claims[node] = client
        return ""

    def _enter(self, node: int, client: Client) -> str:
        index, number, called = client.index, self.number, self.called
        if client.clients != number:
            return self._refuse(node, f"it says that num-partitions is {client.clients}, but the run has clients={number}")
        if index >= number:
            return self._refuse(node, f"it calls itself client {index} of {number}: correct its partition-id", fatal=False)
        if called.nodes and (owner := called.client_of(node)) != index:
            theirs = "no client" if owner is None else called.client(owner)
            return self._refuse(node, f"it calls itself {called.client(index)}, but its key belongs to {theirs}: correct its partition-id")
        self._claims[node] = client
        return ""

    def _refused_by(self, node: int, error: str) -> str:
        """Refuse a node that answered with an error. Return the problem, if it is fatal."""
        why = reason(error)
        if why.startswith(POLICY):
            return self._refuse(node, f"its policy refuses the run: {why.removeprefix(POLICY)}. Its owner may change policy.toml")
        unknown = any(words in error for words in ("No query function registered", "Invalid message type: query"))
        return self._refuse(node, NO_HANDLER if unknown else why)

    def _refuse(self, node: int, why: str, fatal: bool = True) -> str:
        """Refuse a node. Return the problem, if it is ``fatal`` for a run that needs all clients."""
        client, who = self.called.client_of(node), self.called.node(node)
        if client is not None and self._do_without(client, why):
            fatal = False
        elif client is not None and not self._joined and not self.least:
            why += f". {WITHOUT}"
        problem = f"{who} cannot take part: {why}"
        self._refused[node] = client, problem
        log(logging.WARNING, "%s is refused: %s", who, why)
        return problem if fatal else ""

    def _do_without(self, client: int, why: str) -> bool:
        """Make ``client`` absent, if the run may start without it. Return whether it may."""
        remaining = self.policy.clients - len(self.absent.keys() | {client})
        if self._joined or not 0 < self.policy.min_sites <= remaining:
            return False
        self.absent[client] = why
        return True

    def _assign(self) -> str:
        """Choose a node for each client: the first that served it, else the one that serves or claims it.

        Return the problem if several nodes claim an index.
        """
        claims: dict[int, dict[int, Client]] = {}
        for node, client in sorted(self._claims.items()):
            claims.setdefault(client.index, {})[node] = client
        before, self.clients, problem = self.clients, {}, ""
        for index, nodes in claims.items():
            first, now = self._holders.get(index, [0, 0])[0], before[index].node if self._joined and index in before else 0
            holder = next((node for node in (first, now, *(nodes if len(nodes) == 1 else ())) if node in nodes), None)
            if holder is not None:
                self._serve(nodes[holder])
                for rival in nodes.keys() - {holder}:
                    who = self.called.client(index)
                    log(logging.WARNING, "%s is refused: %s is already served by node %s", self.called.node(rival), who, holder)
                continue
            who = f"nodes {' and '.join(map(str, nodes))} call themselves {self.called.client(index)}"
            problem = f"{who}, so none of them takes part: give every SuperNode a partition-id of its own"
            log(logging.WARNING, "%s", problem)
        return problem

    def _serve(self, client: Client) -> None:
        index, node = client.index, client.node
        self.clients[index] = client
        holders = self._holders.setdefault(index, [node, node]) if self._joined else [node, node]
        if node not in holders:
            level, line = logging.WARNING, f"is now served by node {node}: if it is not the same client after a restart, stop the run"
            if self.called.client_of(node) == index:
                level, line = logging.INFO, "has a new key"
            log(level, "%s %s", self.called.client(index), line)
        holders[1] = node
        self.absent.pop(index, None)
        if index in self._gone:
            self._gone.discard(index)
            log(logging.INFO, "%s is back", self.called.client(index))

    def cohort(self, fraction: float, seed: int, round: int, least: int = 1) -> list[Client]:
        """Draw a share of the clients, at least ``least``, by ``seed`` and ``round`` alone."""
        here = [client.index for client in self.everyone()]
        size = min(len(here), max(least, round_half_up(fraction * len(here))))
        chosen = sample_cohort(here, size, random.Random(f"{seed}/{round}"))
        return [self.clients[index] for index in chosen]

    def everyone(self) -> list[Client]:
        """Return the connected clients, sorted by index."""
        return [self.clients[index] for index in sorted(self.clients)]


class KeptTensors:
    """Remember in which rounds clients kept tensors of their own, and send initial values to the others.

    In a user's own app, a client's new network has other initial weights. In
    fl-bn's application, values are sent only if a run does not start from its model
    (``begin_with``). ``counted`` has the last round in which each client's reply
    changed the model.
    """

    def __init__(self, shared: SharedModel, called: ClientNames = UNNAMED, sends: bool = False) -> None:
        self._shared, self._called, self._sends = shared, called, sends
        self.rounds, self.counted = dict[int, int](), dict[int, int]()
        self._bytes: dict[int, int] = {}  # client -> the bytes of the initial values that it got in this round

    def begin_with(self, arrays: ArrayRecord) -> None:
        """Let the run start from ``arrays``, and send them to clients that have none."""
        own, tensors = self._shared.model.state_dict(), tensors_of(arrays)
        for k in {**tensors, **self._shared.tensors()}:
            given, here = (str(tuple(one[k].shape)) if k in one else "nothing" for one in (tensors, own))
            if given != here:
                raise ValueError(f"initial_arrays: {printable(k)} needs shape {here}, not {given}: give convert(net, method).state_dict()")
        self._shared.load(tensors)
        self._sends = True

    def add(self, messages: Sequence[Message], clients: Sequence[Client], trains: bool = False) -> None:
        """Add initial values for clients that kept no tensors, and ``counted`` if they train."""
        start = self._shared.start() if self._sends else {}
        self._bytes = {client.index: nbytes(start) for client in clients if start and client.index not in self.rounds}
        for message, client in zip(messages, clients, strict=True):
            if client.index in self._bytes:
                message.content[OURS + START] = to_record(to_numpy(start[START]))
            if trains:
                add_to_config(message.content, {"counted": self.counted.get(client.index, 0)})

    def with_bytes(self, record: RoundRecord) -> RoundRecord:
        """Return ``record`` with the bytes of this round's initial values added."""
        if not self._bytes:
            return record
        down = {**record.bytes_down, START: max(self._bytes.values())}
        clients = [replace(c, bytes_down=c.bytes_down + self._bytes.get(c.client, 0)) for c in record.clients]
        return replace(record, bytes_down=down, clients=clients)

    def note(self, round: int, replies: Sequence[Reply], changed: bool) -> None:
        """Store which clients kept tensors, and which ``changed`` the model; warn of older tensors."""
        for part in replies:
            if changed:
                self.counted[part.client] = round
            if "kept" not in part.metrics:
                continue
            kept, known = int(part.metrics["kept"]), self.rounds.get(part.client, 0)
            if kept < known:
                line = "round %s: %s kept tensors in round %s, but started from %s: state-dir in the node config keeps them in files"
                log(logging.WARNING, line, round, self._called.client(part.client), known, f"those of round {kept}" if kept else "none")
            self.rounds[part.client] = round
