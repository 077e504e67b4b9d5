"""Run the layer-wise exchanges of a run at the server.

Each exchange has a ``Session``, which averages the clients' vectors. A round of
FedTAN needs one. A statistics-only exchange goes layer by layer if all its clients
can take part at the same time, else it takes one pass over the data per layer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid
from torch import nn

from fl_bn.bn.moments import Average, weighted_mean
from fl_bn.exchange import local
from fl_bn.exchange.call import Answer, ExchangeFailed, Join, Key, Layer, Local
from fl_bn.exchange.grpc.service import ExchangeService
from fl_bn.exchange.session import NOT_JOINED, Session
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.policy import MEMORY
from fl_bn.flower.compat import log, simulates
from fl_bn.flower.deployment import exchange_in
from fl_bn.flower.in_process import InProcessGrid
from fl_bn.flower.layerwise.transcript import attach, read_request, size
from fl_bn.flower.population import Client, RunFailed
from fl_bn.flower.wire.codec import add_to_config, header_of
from fl_bn.flower.wire.messages import RENDEZVOUS, greeting
from fl_bn.flower.wire.messaging import copy_of, pulled
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.support.wire import WireError, reason

BY_PASSES = "Statistics are measured by one pass per layer instead"
POLL = 0.1  # seconds between two checks for replies
SAME = 1e-3  # by what share a repetition of a round may differ: a GPU adds up in another order each time
NOT_REPEATED = "its repetition of the round computed other values than before: seed your generators by the round, or use another exchange"


class Exchanges:
    """Run the layer-wise exchanges of one run, with the clients' ``average`` of moments.

    Attributes:
        session: the last exchange.
        carrier: ``grpc``, ``local`` or ``replay``; empty until the first round
            chooses it, once for all.
        messages: the number of Flower messages to one client in the last round.
    """

    def __init__(
        self,
        settings: ExchangeSettings,
        model: nn.Module,
        layers: Mapping[str, Layer],
        average: Average = weighted_mean,
        believing: bool = True,
        called: ClientNames = UNNAMED,
    ) -> None:
        self._given, self.layers, self.average, self.believing, self.called = settings, layers, average, believing, called
        self.session, self.carrier, self.messages = Session([], {}), "", 1
        self._model = model
        self._service: ExchangeService | None = None
        self._cannot_meet = ""  # why statistics are measured by passes for the rest of the run; empty if they are not
        self._late: dict[str, tuple[int, Message]] = {}  # dropped clients whose replies are still missing, by the message's id

    def check(self, grid: Grid) -> None:
        """Raise ``RunFailed`` unless the carrier of the settings can serve this grid's rounds."""
        if misfit := self._misfit(grid):
            raise RunFailed(f"{misfit}. Set exchange='auto'")

    def round(self, grid: Grid, cohort: Sequence[Client], messages: Iterable[Message], timeout: float) -> list[Message]:
        """Send a round's train messages, run its layer-wise exchange, and return the replies.

        If the chosen carrier cannot serve this grid and cohort, the first round
        raises ``RunFailed``.
        """
        self.carrier = self.carrier or self._choose(grid, cohort, timeout)
        self.session = self._opened(cohort, self.settings.policy, self.settings.deadline)
        return self._carry(self.carrier, grid, _by_client(cohort, messages), self.session, timeout, timeout)

    def measure(
        self, grid: Grid, clients: Sequence[Client], messages: Iterable[Message], timeout: float, simulated: bool
    ) -> tuple[list[Message], str]:
        """Send the messages of a statistics-only exchange, and return the replies and the carrier's name.

        Both are empty if the clients cannot all take part at the same time. Then,
        or if nobody joined, no later call tries again. There are ``timeout``
        seconds from one exchange to the next. ``simulated``: try it in Flower's
        simulation, too, which may be unable to run all clients at once.
        """
        if self._cannot_meet:
            return [], ""
        if reason := self._why_not_at_once(grid, len(clients), simulated):
            self._cannot_meet = reason
            log(logging.INFO, "%s. %s", reason, BY_PASSES)
            return [], ""
        carrier = "local" if isinstance(grid, InProcessGrid) else "grpc"
        sent = _by_client(clients, messages)
        for message in sent.values():
            add_to_config(message.content, {"exchange-memory": MEMORY // len(clients) if carrier == "local" else MEMORY})
        self.session = self._opened(clients, "abort", max(timeout, self.settings.deadline), trains=False)
        replies = self._carry(carrier, grid, sent, self.session, timeout, timeout * (1 + len(self.layers)))
        if not self.session.batches:
            self._cannot_meet = self.session.failure or "no client took part"
        return replies, carrier

    def late_clients(self, grid: Grid) -> set[int]:
        """Return clients that an earlier round dropped, and that have not replied to it yet."""
        for reply in pulled(grid, {identity: message for identity, (_, message) in self._late.items()}):
            self._late.pop(reply.metadata.reply_to_message_id, None)
        return {client for client, _ in self._late.values()}

    def stop(self) -> None:
        """Close sockets and threads."""
        if self._service is not None:
            self._service.stop()
        self.carrier, self._service, self._late = "", None, {}

    def _opened(self, cohort: Sequence[Client], policy: str, deadline: float, trains: bool = True) -> Session:
        return Session(
            [client.index for client in cohort],
            self.layers,
            average=self.average,
            policy=policy,
            deadline=deadline,
            join_deadline=self.settings.join_deadline,
            samples={client.index: client.samples for client in cohort if trains},  # a loader may yield some samples twice
            believing=self.believing,
            called=self.called,
        )

    # the choice of the carrier

    def _misfit(self, grid: Grid) -> str:
        wanted, here = self._given.carrier, isinstance(grid, InProcessGrid)
        place = "in one process, where clients run one after the other" if here else "where clients run in other processes"
        return f"exchange={wanted!r} does not work {place}" if wanted == ("grpc" if here else "local") else ""

    def _why_not_at_once(self, grid: Grid, clients: int, simulated: bool) -> str:
        """Return why the clients cannot exchange layer by layer. Empty: the service listens."""
        if isinstance(grid, InProcessGrid) and grid.one_program:
            return "engine='vectorised' measures all clients at once, a pass at a time"
        if "replay" in (self._given.carrier, self.carrier):
            return "exchange='replay' takes a message per layer, as passes do"
        if (misfit := self._misfit(grid)) or isinstance(grid, InProcessGrid):
            return misfit or local.too_many(clients, self._model)
        if simulates(grid) and not simulated and not self.carrier:
            return "a simulation may be unable to run all clients at once (recalibration='exchange' tries it)"
        try:
            self._listen()
        except RunFailed as error:
            return str(error)
        return ""

    def _choose(self, grid: Grid, cohort: Sequence[Client], timeout: float) -> str:
        if self._given.carrier == "replay":
            return "replay"
        if isinstance(grid, InProcessGrid):
            return "local"
        try:
            problem = self._meet(grid, cohort, timeout)
        except BaseException:
            self.stop()
            raise
        if not problem:
            return "grpc"
        self.stop()
        if self._given.carrier == "grpc":
            raise RunFailed(problem)
        log(logging.WARNING, "%s. exchange='auto' goes on with replay", problem)
        return "replay"

    def _meet(self, grid: Grid, cohort: Sequence[Client], timeout: float) -> str:
        """Test, before training, whether all clients of a cohort can join an exchange over gRPC at once.

        Return what to change if they cannot. With the policy ``shrink``, rounds go
        on without unreachable clients. ``RunFailed`` is raised if the service
        cannot listen or clients cannot use it.
        """
        messages = {c.index: Message(greeting(), c.node, RENDEZVOUS, ttl=timeout, group_id="0") for c in cohort}
        settings = self.settings
        session = Session(messages, {}, policy=settings.policy, join_deadline=settings.join_deadline, called=self.called)
        self._carry("grpc", grid, messages, session, timeout, timeout)
        address = self._listen()["exchange-address"]
        unable = {client: why for client, why in session.dropped.items() if NOT_JOINED not in why}
        if session.batches and len(unable) == len(session.dropped):  # with the policy shrink, rounds go on without these clients
            for client, why in sorted(unable.items()):
                log(logging.WARNING, "%s cannot use the exchange at %s: %s", self.called.client(client), address, why)
            return ""
        if unable:
            advice = "check exchange-host, exchange-port and certificates at the server, and exchange-addresses in node configs"
            raise RunFailed(f"the exchange at {address} fails: {session.failure or next(iter(unable.values()))}: {advice}")
        needed = f"the exchange needs all {len(cohort)} clients of a cohort to run at once, but {session.failure or 'none joined'}"
        return f"{needed}: in simulation, give Ray a worker for each (docs/reference/exchange.md), or set exchange='replay', which is slow"

    @cached_property
    def settings(self) -> ExchangeSettings:
        """Return the settings, on a deployment's server its folder's, or raise ``RunFailed``."""
        try:
            return exchange_in(self._given)
        except ValueError as error:
            raise RunFailed(str(error)) from error

    # the carriers

    def _carry(
        self, carrier: str, grid: Grid, messages: Mapping[int, Message], session: Session, timeout: float, longest: float
    ) -> list[Message]:
        """Run the session within ``longest`` seconds, and ``timeout`` from one exchange to the next."""
        if carrier == "replay":
            return self._by_replay(grid, messages, session, timeout)
        common = {"exchange": "local"} if carrier == "local" else self._listen() | {"exchange-timeout": longest}
        service = self._service if carrier == "grpc" else None
        tokens = local.admit(session) if service is None else service.open(session)
        try:
            for client, message in messages.items():
                add_to_config(message.content, common | {"exchange-token": tokens[client]})
            if service is None:
                return list(grid.send_and_receive(messages.values(), timeout=timeout))
            return self._replies(grid, messages, session, timeout, longest)
        finally:
            if service is None:
                local.dismiss(tokens)
            else:
                service.close(session)

    def _listen(self) -> dict[str, Any]:
        """Start the run's gRPC service if need be, and return its fields for train messages."""
        settings = self.settings
        try:
            if self._service is None:
                largest = max((2 * layer.channels * layer.dtype.itemsize for layer in self.layers.values()), default=0)
                self._service = ExchangeService(settings.listen_on, settings.port, largest, settings.certificates, settings.ports).start()
                how = "TLS" if settings.certificates else "plaintext"
                log(logging.INFO, "exchange: listening on %s:%s (%s)", settings.listen_on, self._service.port, how)
            return {
                "exchange": "grpc",
                "exchange-address": f"{f'[{settings.host}]' if ':' in settings.host else settings.host}:{self._service.port}",
                "exchange-authority": settings.certificates.authority.read_bytes() if settings.certificates else b"",
                "exchange-patience": 2 * settings.deadline,
            }
        except (OSError, ValueError) as error:
            raise RunFailed(str(error)) from error

    def _replies(self, grid: Grid, messages: Mapping[int, Message], session: Session, timeout: float, longest: float) -> list[Message]:
        """Send the messages, and return the replies. Clients with an error are dropped at once."""
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

    def _by_replay(self, grid: Grid, messages: Mapping[int, Message], session: Session, timeout: float) -> list[Message]:
        """Send the messages with all answers so far until all clients have finished."""
        transcript: list[tuple[Key, Answer]] = []
        final: dict[int, Message] = {}
        sizes, down = dict.fromkeys(messages, 0.0), dict.fromkeys(messages, 0)
        self.messages, pending = 0, list(messages)
        while pending:
            sent = {client: copy_of(messages[client]) for client in pending}
            for client in pending:
                down[client] += attach(sent[client].content, transcript)
            requests = self._requests(grid, sent, session, timeout, final, sizes)
            if self.messages == 0:
                for client in sent:
                    session.submit(client, Join(requests[client][0] if client in requests else 0), lambda answer: None)
            self.messages += 1
            answers: dict[int, Answer | ExchangeFailed] = {}
            for client, (_, request) in requests.items():
                session.submit(client, request, partial(answers.__setitem__, client))
            good = {client: answer for client, answer in answers.items() if isinstance(answer, Answer)}
            if pending := sorted(good):
                transcript.append((requests[pending[0]][1].key, good[pending[0]]))
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
        """Send the messages, and return the batch size and request of each client that needs an answer.

        The others leave the session, and their replies enter ``final``, as does a
        client whose repetition computed other values than before (``sizes``).
        """
        requests: dict[int, tuple[int, Local]] = {}
        replies: dict[int, Message] = {}
        for answer in self._replies(grid, sent, session, timeout, timeout):
            replies.setdefault(answer.metadata.src_node_id, answer)  # if a client answers twice, the first reply counts
        for client, message in sent.items():
            reply = replies.get(message.metadata.dst_node_id)
            if reply is None or reply.has_error():  # for the error, ``_replies`` has dropped the client already
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


def _by_client(clients: Sequence[Client], messages: Iterable[Message]) -> dict[int, Message]:
    by_node = {client.node: client.index for client in clients}
    return {by_node[message.metadata.dst_node_id]: message for message in messages}
