"""Carry the layer-wise exchange at the server. A carrier (transport) sends a round's train messages and returns the replies."""

from __future__ import annotations

import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fl_bn.exchange import local
from fl_bn.exchange.call import Answer, ExchangeFailed, Join, Key, Layer, Local
from fl_bn.exchange.grpc.service import ExchangeService
from fl_bn.exchange.replay import size
from fl_bn.exchange.session import NOT_JOINED, Session
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.flower.compat import federation_config, log, pinned
from fl_bn.flower.layerwise.transcript import attach, read_request
from fl_bn.flower.population import Client, RunFailed
from fl_bn.flower.wire.codec import header_of
from fl_bn.flower.wire.fields import RENDEZVOUS, add_to_config
from fl_bn.flower.wire.messaging import copy_of, pulled
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.support.wire import WireError, reason

POLL = 0.1  # seconds between two checks for replies
SAME = 1e-3  # by what share a repetition of a round may come to other values: a GPU adds up in another order each time
NOT_REPEATED = (
    "its repetition of the round computed other values than before. With exchange='replay' a round is computed again for each answer, so "
    "the loop must draw the same numbers again: seed every generator of your own (np.random.default_rng(seed)) by the round, and draw "
    "batches inside the block of training(...). Or choose exchange='grpc'"
)


class Carrier(ABC):
    """Send a round's train messages, let the clients exchange vectors meanwhile, and return the replies. Abstract.

    Attributes:
        messages: the number of Flower messages that one client got in the last round.
    """

    name: str

    def __init__(self) -> None:
        self.messages = 1
        self._late: dict[str, tuple[int, Message]] = {}  # dropped clients whose replies are still missing, by the message's id

    @abstractmethod
    def carry(self, grid: Grid, messages: Mapping[int, Message], session: Session, timeout: float, longest: float = 0.0) -> list[Message]:
        """Send the messages, run the session, and return the replies.

        Args:
            grid: Flower's grid.
            messages: the train messages, by client.
            session: the round's exchange.
            timeout: seconds for the whole round; if ``longest`` is above 0, seconds from one exchange to the next.
            longest: seconds for the whole round. 0: ``timeout`` limits the whole round.
        """

    def late_clients(self, grid: Grid) -> set[int]:
        """Return the clients that an earlier round dropped, and whose reply to that round's message has not come yet."""
        for reply in pulled(grid, {identity: message for identity, (_, message) in self._late.items()}):
            self._late.pop(reply.metadata.reply_to_message_id, None)
        return {client for client, _ in self._late.values()}

    def _replies(
        self, grid: Grid, messages: Mapping[int, Message], session: Session, timeout: float, longest: float = 0.0
    ) -> list[Message]:
        """Send the messages, and return the replies, without waiting for clients that the session has dropped.

        If a client answers with an error, it is dropped at once. So the others need not wait for it until the
        deadline. The arguments are those of ``carry``.
        """
        pushed, begin, seen = set(grid.push_messages(messages.values())), time.monotonic(), session.exchanges
        end = begin + timeout
        sent = {message.metadata.message_id: message for message in messages.values()}
        waiting = {message.metadata.message_id: client for client, message in messages.items() if message.metadata.message_id in pushed}
        for client in messages.keys() - set(waiting.values()):
            session.leave(client, "its message could not be sent")
        replies: list[Message] = []
        while set(waiting.values()) - session.dropped.keys() and time.monotonic() < end:
            if session.exchanges > seen:
                seen, end = session.exchanges, max(end, min(begin + longest, time.monotonic() + timeout))
            new = list(pulled(grid, {identity: sent[identity] for identity in waiting}))
            replies += new
            for reply in new:
                client = waiting.pop(reply.metadata.reply_to_message_id, -1)  # -1: answered twice
                if client >= 0 and reply.has_error():
                    session.leave(client, f"code {reply.error.code}: {reason(reply.error.reason)}")
            if not new:
                time.sleep(POLL)
        self._late |= {identity: (client, sent[identity]) for identity, client in waiting.items()}
        return replies

    def stop(self) -> None:
        """Close the carrier's sockets and end its threads. Only ``GrpcCarrier`` has some."""
        return


class LocalCarrier(Carrier):
    """Carry the layer-wise exchange between clients that all run in this process (``InProcessGrid``).

    The clients take turns. Each computes until it has to wait for the others' values.
    """

    name = "local"

    def carry(self, grid: Grid, messages: Mapping[int, Message], session: Session, timeout: float, longest: float = 0.0) -> list[Message]:
        """Send the messages to clients in this process, and return the replies."""
        tokens = local.admit(session)
        try:
            for client, message in messages.items():
                configure(message, {"exchange": "local", "exchange-token": tokens[client]})
            return list(grid.send_and_receive(messages.values(), timeout=timeout))
        finally:
            local.dismiss(tokens)


class GrpcCarrier(Carrier):
    """Carry the exchange by a gRPC service in this process.

    The service's address, the authority's certificate and the clients' tokens travel in the train messages,
    over Flower's own connections.

    Args:
        settings: the address to listen on, and the certificates.
        layers: the layers that may be exchanged, by name. They limit the size of a request.
        called: the clients' names in the log.

    Raises:
        OSError: the service cannot listen on the address, or a file of the certificates is missing.
        ValueError: the certificates are wrong.
    """

    name = "grpc"

    def __init__(self, settings: ExchangeSettings, layers: Mapping[str, Layer], called: ClientNames = UNNAMED) -> None:
        super().__init__()
        self.settings, self.called = settings, called
        largest = max((2 * layer.channels * layer.dtype.itemsize for layer in layers.values()), default=0)
        self.service = ExchangeService(settings.listen_on, settings.port, largest, settings.certificates).start()
        how = "TLS" if settings.certificates else "plaintext"
        log(logging.INFO, "exchange: listening on %s:%s (%s)", settings.listen_on, self.service.port, how)

    @property
    def address(self) -> str:
        """Return the address by which clients reach the service, as HOST:PORT."""
        host = self.settings.host
        return f"{f'[{host}]' if ':' in host else host}:{self.service.port}"

    def carry(self, grid: Grid, messages: Mapping[int, Message], session: Session, timeout: float, longest: float = 0.0) -> list[Message]:
        """Send the messages, serve the clients' requests until they have finished, and return the replies."""
        tokens, certificates = self.service.open(session), self.settings.certificates
        common: dict[str, str | float | bytes] = {
            "exchange": "grpc",
            "exchange-address": self.address,
            "exchange-authority": certificates.authority.read_bytes() if certificates else b"",
            "exchange-timeout": longest or timeout,
            "exchange-patience": 2 * self.settings.deadline,
        }
        try:
            for client, message in messages.items():
                configure(message, common | {"exchange-token": tokens[client]})
            return self._replies(grid, messages, session, timeout, longest)
        finally:
            self.service.close(session)

    def meet(self, grid: Grid, cohort: Sequence[Client], timeout: float) -> str:
        """Test, before training, whether all clients of a cohort can join the exchange at the same time.

        Args:
            grid: Flower's grid.
            cohort: the clients.
            timeout: seconds for the test.

        Returns:
            What to change if they cannot. Empty if they can.

        Raises:
            RunFailed: a client cannot reach the service, or does not trust its certificate. With the policy ``shrink``,
                rounds go on without such a client. The error is then raised only if no client could join, or if others were late.
        """
        messages = {c.index: Message(RecordDict(), c.node, RENDEZVOUS, ttl=timeout, group_id="0") for c in cohort}
        settings = self.settings
        session = Session(messages, {}, policy=settings.policy, join_deadline=settings.join_deadline, called=self.called)
        self.carry(grid, messages, session, timeout)
        unable = {client: why for client, why in session.dropped.items() if NOT_JOINED not in why}
        if session.batches and len(unable) == len(session.dropped):  # with the policy shrink, rounds go on without these clients
            for client, why in sorted(unable.items()):
                log(logging.WARNING, "%s cannot use the exchange at %s: %s", self.called.client(client), self.address, why)
            return ""
        if unable:
            reason = session.failure or next(iter(unable.values()))
            raise RunFailed(
                f"the exchange at {self.address} cannot be used: {reason}. Check exchange-host (the name by which clients reach this "
                "machine, and for which the certificate is valid), exchange-port and the certificates. The clients' own logs say more: "
                "their node configs must allow the address (exchange-addresses). Or set exchange='replay'"
            )
        return (
            f"the exchange needs all {len(cohort)} clients of a cohort to run at once, but {session.failure or 'none joined'}. "
            f"{_simulation_hint(len(cohort), os.cpu_count() or 1)}; or set exchange='replay', which works with any number, but slowly"
        )

    def stop(self) -> None:
        """Stop the service."""
        self.service.stop()


class ReplayCarrier(Carrier):
    """Carry the exchange in Flower messages: for each vector exchanged, one message to every client.

    Each message holds all answers so far. The client computes its round again from the start, until it needs
    the next answer.
    """

    name = "replay"

    def carry(self, grid: Grid, messages: Mapping[int, Message], session: Session, timeout: float, longest: float = 0.0) -> list[Message]:
        """Send the messages again with each new answer until all clients have finished. Return the last replies."""
        transcript: list[tuple[Key, Answer]] = []
        final: dict[int, Message] = {}
        sizes = dict.fromkeys(messages, 0.0)
        down = dict.fromkeys(messages, 0)
        self.messages, pending = 0, list(messages)
        while pending:
            sent = {client: copy_of(messages[client]) for client in pending}
            for client in pending:
                down[client] += attach(sent[client].content, transcript)
            requests = self._requests(grid, sent, session, timeout, final, sizes)
            if self.messages == 0:
                for client in sent:
                    batch = requests[client][0] if client in requests else 0
                    session.submit(client, Join(batch), lambda answer: None)
            self.messages += 1
            answers: dict[int, Answer] = {}
            for client, (_, request) in requests.items():
                session.submit(client, request, partial(_keep, answers, client))
            if pending := sorted(answers):
                transcript.append((requests[pending[0]][1].key, answers[pending[0]]))
        for client, nbytes in down.items():
            session.traffic[client] = replace(session.traffic[client], down=nbytes)
        return list(final.values())

    def _requests(
        self,
        grid: Grid,
        sent: Mapping[int, Message],
        session: Session,
        timeout: float,
        final: dict[int, Message],
        sizes: dict[int, float],
    ) -> dict[int, tuple[int, Local]]:
        """Send the messages, and return client -> its batch size and request, for each client that needs an answer.

        If a client needs no further answer, its reply is added to ``final``, and the client leaves the session. ``sizes`` has
        client -> the size of its requests so far. A client also leaves if its repetition computed other values.
        """
        requests: dict[int, tuple[int, Local]] = {}
        replies: dict[int, Message] = {}
        for answer in self._replies(grid, sent, session, timeout):
            replies.setdefault(answer.metadata.src_node_id, answer)  # if a client answers twice, the first reply counts
        for client, message in sent.items():
            reply = replies.get(message.metadata.dst_node_id)
            if reply is None:
                session.leave(client, "no reply before the deadline")
                continue
            try:
                request = read_request(reply, header_of(message.content))
            except WireError as error:
                session.leave(client, str(error))
                continue
            if request is None:
                final[client] = reply
                if client in session.batches:
                    session.leave(client)
            elif not abs(request[2] - sizes[client]) <= SAME * sizes[client]:
                session.leave(client, NOT_REPEATED)
            else:
                requests[client] = request[:2]
                sizes[client] += size(request[1].values)
        return requests


def _simulation_hint(clients: int, cpus: int) -> str:
    """Return advice on how to get ``clients`` workers in Flower's simulation.

    Flower 1.25 can give each worker a part of a CPU. Later versions give whole CPUs only, so the advice is to tell Ray of
    more CPUs than there are. All versions run at most 32 workers at a time, and at most 4 more than there are CPUs.
    """
    if clients > (most := min(32, cpus + 4)):
        return f"In simulation it needs {clients} workers, but Flower runs at most {most} at a time on {cpus} CPUs: use `fl-bn run`"
    per_client, ray_cpus = "backend.client-resources.num-cpus", "backend.init-args.num-cpus"
    if not pinned():
        return f"In simulation it needs {clients} workers: {federation_config({ray_cpus: clients, per_client: 1})}"
    share = math.floor(100 * cpus / clients) / 100
    return (
        f"In simulation it needs {clients} workers: {federation_config({per_client: f'{share:g}'})} "
        f'(flower-simulation: --backend-config \'{{"client_resources": {{"num_cpus": {share:g}}}}}\')'
    )


def _keep(answers: dict[int, Answer], client: int, answer: Answer | ExchangeFailed) -> None:
    if isinstance(answer, Answer):
        answers[client] = answer


def configure(message: Message, values: Mapping[str, str | float | bytes]) -> None:
    """Add ``values`` to the message's config."""
    add_to_config(message.content, values)
