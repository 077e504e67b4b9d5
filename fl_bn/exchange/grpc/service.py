"""Serve the exchange over gRPC, by an asyncio server in a thread of the ServerApp's process.

A message is a line of JSON, and the values after it, little-endian. A stream's
first request is ``{"join": batch}``, its last one ``{"leave": true}``. All others
have ``layer``, ``quantity``, ``call`` and ``count``, and a vector. Each but the
last gets one answer, ``{"count": ..., "batch": ...}`` and the cohort's vector. If a
stream ends without a leave, its client has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self, TypeVar

import grpc
import numpy as np
import torch
from torch import Tensor

from fl_bn.exchange.call import Answer, ExchangeFailed, Join, Key, Layer, Local, Quantity, Refused, Request
from fl_bn.exchange.session import LOGGER, Session
from fl_bn.exchange.settings import Certificates
from fl_bn.support.wire import excerpt, printable

T = TypeVar("T")
SERVICE = "fl_bn.Exchange"
TOKEN = "fl-bn-token"
TICK = 0.1  # seconds between checks of the clock
FRAME = 4096  # the most bytes that a message needs beside its values
DTYPES = {torch.float32: "<f4", torch.float64: "<f8"}


@dataclass(eq=False)
class Member:
    """Hold a client of a session, whose token admits one stream.

    Attributes:
        context: gRPC's object for the stream; None until the client connects.
        busy: whether the stream's handler is at work, so that nobody else may end
            the stream.
    """

    session: Session
    client: int
    context: grpc.aio.ServicerContext | None = None
    busy: bool = False
    ended: bool = False


class ExchangeService:
    """Serve any number of sessions (rounds' exchanges) over gRPC, from ``start`` to ``stop``.

    Args:
        port: the first port to try. 0: any free one.
        largest: the bytes of the longest vector. gRPC refuses longer ones unread.
        certificates: the PEM files for TLS. None: no encryption.
        ports: how many ports are tried, from ``port`` on.

    Raises:
        FileNotFoundError: a file of ``certificates`` is missing.
        ValueError: a file is not in PEM, or the key does not belong to the
            certificate.
    """

    def __init__(self, host: str, port: int, largest: int, certificates: Certificates | None = None, ports: int = 1) -> None:
        if certificates is not None:
            certificates.check()
        self.host, self.port, self.certificates = host, port, certificates
        self._ports, self._largest = range(port, port + ports), largest + FRAME
        self._members: dict[str, Member] = {}  # by token
        self._strangers = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="exchange", daemon=True)
        self._server: grpc.aio.Server | None = None

    def start(self) -> Self:
        """Start to listen, or raise ``OSError``."""
        self._thread.start()
        try:
            self._wait(self._start())
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Fail every open session, then close all streams, the socket and the thread."""
        for session in self._sessions():
            session.fail("the exchange service was stopped")
        if self._server is not None:
            self._wait(self._stop(self._server))
            self._server = None
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def open(self, session: Session) -> dict[int, str]:
        """Admit the clients of ``session``, and return an unguessable token for each one."""
        self._strangers = 0
        tokens = {client: secrets.token_hex(32) for client in sorted(session.active)}
        self._members.update({token: Member(session, client) for client, token in tokens.items()})
        return tokens

    def close(self, session: Session) -> None:
        """Close ``session`` and forget its tokens. Clients that still wait get an error."""
        session.close()
        for token, member in list(self._members.items()):
            if member.session is session and (member.context is None or member.ended):  # the others go when their streams end
                self._members.pop(token, None)

    async def _average(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        token = str(dict(context.invocation_metadata() or ()).get(TOKEN, ""))
        member = self._members.get(token)
        if member is None or member.context is not None:
            why, code = "its token is not one of this round's" if token else "it sent no token", grpc.StatusCode.UNAUTHENTICATED
            if member is not None:
                who, code = member.session.called.client(member.client), grpc.StatusCode.ALREADY_EXISTS
                why = f"the token of {who} admits one stream, and was used before"
            self._strangers += 1
            if self._strangers <= 10 or self._strangers % 100 == 0:  # many attempts must not fill the log
                LOGGER.warning("exchange: refused a connection from %s: %s (refusal %d)", context.peer(), why, self._strangers)
            await context.abort(code, f"expected the token of this round's train message, once, but {why}")
            return  # abort has raised
        member.context, reason = context, "its stream broke"
        try:
            async for data in requests:
                member.busy = True
                answer = await self._answer(member, data)
                if answer is None:
                    reason = ""
                    return
                if isinstance(answer, ExchangeFailed):
                    reason = str(answer)
                    await context.abort(grpc.StatusCode.ABORTED, reason)
                    return  # abort has raised
                yield encode_answer(answer)
                member.busy = False
        finally:
            member.busy = member.ended = True
            member.session.leave(member.client, reason)
            if member.session.out(member.client):
                self._members.pop(token, None)

    async def _answer(self, member: Member, data: bytes) -> Answer | ExchangeFailed | None:
        """Answer a request, or give the reason for having no answer. None: the client leaves."""
        session, client = member.session, member.client
        try:
            request = decode_request(data, session.layers)
        except Refused as refusal:
            session.leave(client, f"refused: {refusal}")
            return ExchangeFailed(f"refused: {refusal}")
        if request is None:
            return None
        answered: asyncio.Future[Answer | ExchangeFailed] = self._loop.create_future()

        def deliver(answer: Answer | ExchangeFailed) -> None:
            if threading.get_ident() == self._thread.ident:
                _resolve(answered, answer)
            else:
                self._loop.call_soon_threadsafe(_resolve, answered, answer)

        session.submit(client, request, deliver)
        return await answered

    async def _start(self) -> None:
        options = [
            ("grpc.max_receive_message_length", self._largest),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
            ("grpc.http2.max_ping_strikes", 0),
        ]
        server = grpc.aio.server(options=options)
        method = grpc.stream_stream_rpc_method_handler(self._average)  # of bytes, so that an unreadable request is refused by name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Average": method}),))
        for port in self._ports:
            address = f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"
            try:
                if self.certificates is None:
                    self.port = server.add_insecure_port(address)
                else:
                    pair = (self.certificates.key.read_bytes(), self.certificates.certificate.read_bytes())
                    self.port = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
                break
            except RuntimeError as error:
                if port == self._ports[-1]:
                    raise OSError(f"the exchange cannot listen on {address}: choose another port (0: any free), or bind=") from error
        await server.start()
        self._server = server
        self._watch = asyncio.create_task(self._check_deadlines())

    async def _check_deadlines(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            for session in self._sessions():
                session.expire()
            for member in list(self._members.values()):
                if member.context is not None and not member.busy and (reason := member.session.out(member.client)):
                    member.busy = True
                    with contextlib.suppress(Exception):  # ``abort`` always raises, whether or not the stream has ended before
                        await member.context.abort(grpc.StatusCode.ABORTED, reason)

    async def _stop(self, server: grpc.aio.Server) -> None:
        self._watch.cancel()
        await server.stop(0.5)
        ending = asyncio.all_tasks() - {asyncio.current_task()}
        if ending:
            await asyncio.wait(ending, timeout=1)

    def _sessions(self) -> set[Session]:
        return {member.session for member in list(self._members.values())}

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result()


def _resolve(future: asyncio.Future[Answer | ExchangeFailed], answer: Answer | ExchangeFailed) -> None:
    if not future.done():
        future.set_result(answer)


def encode_request(request: Request | None) -> bytes:
    """Convert a client's request to a message. None: the client leaves."""
    if isinstance(request, Local):
        key = request.key
        return _packed(request.values, layer=key.layer, quantity=key.quantity.value, call=key.call, count=request.count)
    return _packed(leave=True) if request is None else _packed(join=request.batch)


def decode_request(data: bytes, layers: Mapping[str, Layer]) -> Request | None:
    """Convert a message to a request for one of ``layers``. None: the client leaves.

    Raises:
        Refused: the message is unreadable, names an unknown layer or quantity, or
            has no whole number of values.
    """
    head, _, values = data.partition(b"\n")
    try:
        fields = json.loads(head)
        if "leave" in fields:
            return None
        if "join" in fields:
            return Join(_whole(fields["join"]))
        key = Key(fields["layer"], Quantity(fields["quantity"]), _whole(fields["call"]))
        return Local(key, _tensor(values, layers[key.layer].dtype), _whole(fields["count"]))
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        known = f"one of {len(layers)} BatchNorm layers ({printable(', '.join(layers), 40)}) and a quantity"
        raise Refused(f"expected a request that names {known}, but got {len(data)} bytes, {excerpt(head)}") from error


@lru_cache(maxsize=8)
def encode_answer(answer: Answer) -> bytes:
    """Convert an answer to a message, which serves all clients of a cohort."""
    return _packed(answer.values, count=answer.count, batch=answer.batch)


def decode_answer(data: bytes, dtype: torch.dtype) -> Answer:
    """Convert a message to an answer with values of ``dtype``. Errors of parsing pass."""
    head, _, values = data.partition(b"\n")
    fields = json.loads(head)
    return Answer(_tensor(values, dtype), _whole(fields["count"]), _whole(fields["batch"]))


def _packed(values: Tensor | None = None, **fields: object) -> bytes:
    numbers = b"" if values is None else values.numpy().astype(DTYPES[values.dtype], copy=False).tobytes()
    return json.dumps(fields).encode() + b"\n" + numbers


def _whole(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 2**64:
        raise ValueError(f"expected a whole number below 2**64, but got {excerpt(number)}")
    return number


def _tensor(values: bytes, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.frombuffer(values, DTYPES[dtype]).astype(DTYPES[dtype][1:]))
