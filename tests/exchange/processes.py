"""Run clients in processes of their own on a Flower grid. Tests can kill, stop and continue them in the middle of a round."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Self

import torch
from flwr.app import Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.common.typing import Run
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.server.superlink.linkstate.utils import create_message_error_unavailable_res_message
from flwr.serverapp import Grid
from torch import Tensor, nn

from fl_bn.flower import InProcessGrid
from fl_bn.flower.layerwise import exchange_address
from fl_bn.flower.layerwise.exchange_address import SiteExchange
from tests.exchange.cohorts import Answer, Key, LocalTraining, Quantity, Samples, fedtan
from tests.federation import random_samples
from tests.in_process import client_app
from tests.networks import seeded_network

SIZES = (3, 7, 5, 4, 6)  # samples of the clients, all of them one batch
FIRST_NODE = 101  # 1 is the SuperLink itself, in whose name Flower reports a node that is gone
PROCESSES = multiprocessing.get_context("forkserver")  # a killed client is back in milliseconds, since torch is imported already
PROCESSES.set_forkserver_preload(["torch._dynamo", "fl_bn.flower", __name__])  # the first optimiser imports torch._dynamo: seconds


def network() -> nn.Module:
    """Build a network with five BatchNorm layers in float64, without dropout."""
    model = seeded_network("resnet", dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def federation(sizes: Sequence[int] = SIZES) -> list[Samples]:
    """Make the samples of all clients. The images of each client are brighter than those of the client before."""
    return [random_samples(n, brightness=i / len(sizes), seed=i) for i, n in enumerate(sizes)]


@dataclass(frozen=True)
class Strike:
    """Describe a signal that a client's process sends to itself, and when.

    Attributes:
        signal: The signal, such as SIGKILL.
        where: ``forward`` or ``backward``: before an exchange of that pass; ``step``: at the beginning of a local step.
        number: The number of the exchange or of the step in the round, from 0.
    """

    signal: signal.Signals
    where: str
    number: int = 0


class Agenda:
    """Send this process the signal of the present round's ``Strike`` when it is due."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.strike, self.seen = pipe, None, Counter[str]()

    def begin(self, strike: Strike | None) -> None:
        self.strike, self.seen = strike, Counter()

    def reach(self, where: str) -> None:
        number, self.seen[where] = self.seen[where], self.seen[where] + 1
        if self.strike is not None and (self.strike.where, self.strike.number) == (where, number):
            self.pipe.send(("struck", b""))
            os.kill(os.getpid(), self.strike.signal)


def serve(pipe: Connection, sizes: Sequence[int], settings: LocalTraining) -> None:
    """Run a client: answer messages by the real ClientApp until the pipe is closed, or until a strike ends the process."""
    torch.set_num_threads(1)
    agenda = Agenda(pipe)

    class StruckExchange(SiteExchange):
        def __call__(self, key: Key, local: Tensor, count: int) -> Answer:
            agenda.reach("backward" if key.quantity is Quantity.GRADIENTS else "forward")
            return super().__call__(key, local, count)

    def step_begins(module: nn.Module, inputs: Any) -> None:
        if module.training:
            agenda.reach("step")

    exchange_address.SiteExchange = StruckExchange
    model = network()
    model.register_forward_pre_hook(step_begins)
    here = InProcessGrid(client_app(fedtan(), federation(sizes), settings, model=model), len(sizes), {})
    here._contexts = {FIRST_NODE + int(context.node_config["partition-id"]): context for context in here._contexts.values()}
    while True:
        try:
            written, strike = pipe.recv()
        except EOFError:
            return
        agenda.begin(strike)
        message = message_from_proto(MessageProto.FromString(written))
        pipe.send(("answer", message_to_proto(here._answer(message)).SerializeToString()))


@dataclass
class Node:
    """Describe a client's process, as the grid sees it.

    Attributes:
        process: The process.
        pipe: The pipe to it.
        sent: The messages that it has not answered yet, by id.
        later: The messages that arrived after its death, for the process that replaces it.
        struck: Whether its strike has happened and it was not continued since.
        died: When its death was noticed; 0: it lives.
        gone: Whether its death was reported to the server and no other process replaces it.
    """

    process: BaseProcess
    pipe: Connection
    sent: dict[str, Message] = field(default_factory=dict)
    later: list[tuple[Message, Strike | None]] = field(default_factory=list)
    struck: bool = False
    died: float = 0.0
    gone: bool = False


class ProcessGrid(Grid):
    """Connect the server with one process per client; use it in a ``with`` statement.

    If a process dies, its unanswered messages get an error reply ``notice`` seconds later, as from Flower. Then a new process replaces it,
    if ``restarts`` is True. Otherwise the node is gone.

    Attributes:
        strikes: (client, round) -> the strike.
        meanwhile: Called whenever the server looks for replies.
        log: What happened, as (time, client, what).
        received: All replies of the clients.
    """

    def __init__(self, settings: LocalTraining, sizes: Sequence[int] = SIZES, notice: float = 0.0, restarts: bool = True) -> None:
        self.settings, self.sizes, self.notice, self.restarts = settings, sizes, notice, restarts
        self.strikes: dict[tuple[int, int], Strike] = {}
        self.meanwhile: Callable[[], None] = lambda: None
        self.log: list[tuple[float, int, str]] = []
        self.received: list[Message] = []
        self._run = Run.create_empty(run_id=1)
        self._answers: dict[str, Message] = {}
        self._nodes = {client: self._start(client) for client in range(len(sizes))}

    # What a test does to clients

    def struck(self, client: int) -> bool:
        self._listen(client)
        return self._nodes[client].struck

    def resume(self, client: int) -> None:
        self._nodes[client].struck = False
        self._signal(client, signal.SIGCONT)

    def when(self, client: int, what: str) -> list[float]:
        """Return the times at which ``what`` happened to ``client``."""
        return [at for at, who, came in self.log if who == client and what in came]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for node in self._nodes.values():
            node.process.kill()  # a stopped one, too
            self._bury(node)

    # What the server sees

    def set_run(self, run_id: int) -> None:
        self._run = Run.create_empty(run_id=run_id)

    @property
    def run(self) -> Run:
        return self._run

    def create_message(self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return [FIRST_NODE + client for client, node in self._nodes.items() if not node.gone]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            identity, client = uuid.uuid4().hex, message.metadata.dst_node_id - FIRST_NODE
            message.metadata.__dict__.update(_run_id=self._run.run_id, _src_node_id=self._run.run_id, _message_id=identity)
            works = message.metadata.message_type in ("train", "query.statistics")
            strike = self.strikes.pop((client, int(message.metadata.group_id)), None) if works else None
            self._listen(client)
            self._send(self._nodes[client], message, strike)
            ids.append(identity)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.meanwhile()
        for client in self._nodes:
            self._listen(client)
        return [self._answers.pop(identity) for identity in list(message_ids) if identity in self._answers]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        waiting, end = set(self.push_messages(messages)), time.monotonic() + (timeout or 60.0)
        replies: list[Message] = []
        while waiting and time.monotonic() < end:
            came = list(self.pull_messages(waiting))
            waiting -= {reply.metadata.reply_to_message_id for reply in came}
            replies += came
            if not came:
                time.sleep(0.02)
        return replies

    def _start(self, client: int) -> Node:
        ours, theirs = PROCESSES.Pipe()
        process = PROCESSES.Process(target=serve, args=(theirs, self.sizes, self.settings), name=f"client-{client}", daemon=True)
        process.start()
        theirs.close()
        return Node(process, ours)

    def _bury(self, node: Node) -> None:
        node.process.join()
        node.process.close()
        node.pipe.close()

    def _signal(self, client: int, number: signal.Signals) -> None:
        pid = self._nodes[client].process.pid
        assert pid is not None
        os.kill(pid, number)

    def _send(self, node: Node, message: Message, strike: Strike | None) -> None:
        try:
            if node.died:
                raise BrokenPipeError
            node.pipe.send((message_to_proto(message).SerializeToString(), strike))
            node.sent[message.metadata.message_id] = message
        except ConnectionError:
            node.later.append((message, strike))

    def _listen(self, client: int) -> None:
        """Read what the process of ``client`` has sent. If it has died, report this after ``notice`` seconds, and replace the process."""
        node = self._nodes[client]
        try:
            while not node.died and node.pipe.poll():
                what, written = node.pipe.recv()
                if what == "struck":
                    node.struck = True
                    self._note(client, "struck")
                else:
                    self._take(client, message_from_proto(MessageProto.FromString(written)))
        except (EOFError, ConnectionError):
            node.process.join()
            node.died = time.monotonic()
            self._note(client, f"died with {node.process.exitcode}")
        if node.died and not node.gone and time.monotonic() - node.died >= self.notice:
            self._note(client, "reported")
            for message in [*node.sent.values(), *([] if self.restarts else [message for message, _ in node.later])]:
                identity = message.metadata.message_id
                self._answers[identity] = create_message_error_unavailable_res_message(message.metadata, "node_unavail")
            node.gone = not self.restarts
            if self.restarts:
                self._bury(node)
                self._nodes[client] = self._start(client)
                for message, strike in node.later:
                    self._send(self._nodes[client], message, strike)

    def _take(self, client: int, answer: Message) -> None:
        self._note(client, f"answered: {answer.error.reason if answer.has_error() else 'no error'}")
        del self._nodes[client].sent[answer.metadata.reply_to_message_id]
        self._answers[answer.metadata.reply_to_message_id] = answer
        self.received.append(answer)

    def _note(self, client: int, what: str) -> None:
        self.log.append((time.time(), client, what))
