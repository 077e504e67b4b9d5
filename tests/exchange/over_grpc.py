"""Play rounds over a real gRPC service: clients in threads, and a client that sends raw bytes."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Self

import grpc
import numpy as np
import torch

from fl_bn.exchange.call import Answer, ExchangeFailed, Join, Key, Layer, Local, Quantity
from fl_bn.exchange.grpc.client import GrpcExchange
from fl_bn.exchange.grpc.service import TOKEN, ExchangeService, encode_request
from fl_bn.exchange.session import Session, reduce

HOST = "127.0.0.1"
LAYERS = {"1": Layer(4, torch.float32), "block.bn": Layer(3, torch.float64)}
LARGEST = 48  # bytes of the longest vector of LAYERS
KEYS = (
    Key("1", Quantity.MOMENTS),
    Key("block.bn", Quantity.MEAN),
    Key("block.bn", Quantity.VARIANCE),
    Key("1", Quantity.MOMENTS, 1),
    Key("block.bn", Quantity.GRADIENTS),
    Key("1", Quantity.GRADIENTS),
)
SECOND = KEYS[1]
SOON = 5.0  # seconds that a test may take at most, and far from DEADLINE
DEADLINE = 20.0
PATIENT = {"deadline": DEADLINE, "join_deadline": DEADLINE}


def batch_of(client: int) -> int:
    return 3 + 2 * client


def local_of(client: int, key: Key) -> Local:
    """Return what ``client`` sends for ``key``: the same values in every call, with variances above zero.

    The clients have different counts, so that a wrong weight changes the average.
    """
    layer = LAYERS[key.layer]
    rng = np.random.default_rng([client, *str(key).encode()])
    return Local(key, torch.from_numpy(rng.uniform(0.1, 2.0, key.quantity.width(layer.channels))).to(layer.dtype), 16 * batch_of(client))


def expected(members: Iterable[int], key: Key) -> Answer:
    cohort = sorted(members)
    requests, batches = [local_of(client, key) for client in cohort], [batch_of(client) for client in cohort]
    values = reduce(requests, batches).to(LAYERS[key.layer].dtype)
    return Answer(values, sum(request.count for request in requests), sum(batches))


def same(answer: Answer, other: Answer) -> bool:
    alike = answer.values.dtype == other.values.dtype and torch.equal(answer.values, other.values)
    return alike and (answer.count, answer.batch) == (other.count, other.batch)


def play(address: str, token: str, client: int, authority: bytes = b"", keys: Iterable[Key] = KEYS) -> list[Answer]:
    """Send one honest client's requests for all ``keys``; return the answers."""
    exchange = GrpcExchange(address, token, batch_of(client), authority, timeout=2 * DEADLINE)
    try:
        requests = [local_of(client, key) for key in keys]
        answers = [exchange(request.key, request.values, request.count) for request in requests]
    except ExchangeFailed as error:
        exchange.close(str(error))
        raise
    exchange.close()
    return answers


def address_of(service: ExchangeService) -> str:
    return f"{HOST}:{service.port}"


@contextmanager
def within(seconds: float = SOON) -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < seconds


def eventually(condition: Callable[[], bool], seconds: float = SOON) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"the condition was not true within {seconds:g} s"
        time.sleep(0.005)


class Round:
    """Open a session for ``clients`` clients at ``service``; its honest clients run in threads."""

    def __init__(self, service: ExchangeService, clients: int = 3, policy: str = "abort", **deadlines: float) -> None:
        self.service, self.clients = service, range(clients)
        self.session = Session(self.clients, LAYERS, policy=policy, **(deadlines or PATIENT))
        self.tokens = service.open(self.session)
        self._threads = ThreadPoolExecutor(clients)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.service.close(self.session)
        self._threads.shutdown()

    def play(self, *clients: int, authority: bytes = b"") -> list[Future[list[Answer]]]:
        address = address_of(self.service)
        return [self._threads.submit(play, address, self.tokens[client], client, authority) for client in clients]

    def joined(self, *clients: int) -> None:
        """Wait until these clients have joined the session."""
        eventually(lambda: all(client in self.session._waiting for client in clients))


def finish(service: ExchangeService, clients: int = 3, authority: bytes = b"") -> None:
    """Play a round of honest clients, and check that all get the correct averages within ``SOON`` seconds."""
    with within(), Round(service, clients) as round:
        check([future.result(SOON) for future in round.play(*round.clients, authority=authority)], round.clients)


def check(answers: list[list[Answer]], members: Iterable[int], keys: Iterable[Key] = KEYS) -> None:
    """Check that each client's answers are the averages over the clients in ``members``."""
    right = [expected(members, key) for key in keys]
    for own in answers:
        assert len(own) == len(right)
        assert all(map(same, own, right))


class Stream:
    """Send raw messages to the service over a gRPC stream, with any token or none, valid or not."""

    def __init__(self, service: ExchangeService, token: str | None, compressed: bool = False) -> None:
        self.channel = grpc.insecure_channel(address_of(service), [("grpc.use_local_subchannel_pool", 1)])
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method = self.channel.stream_stream("/fl_bn.Exchange/Average", request_serializer=None, response_deserializer=None)
        self.call = method(
            iter(self._messages.get, None),
            metadata=() if token is None else ((TOKEN, token),),
            timeout=2 * DEADLINE,
            compression=grpc.Compression.Gzip if compressed else None,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()
        self.channel.close()

    def send(self, message: bytes) -> None:
        self._messages.put(message)

    def ask(self, request: Join | Local) -> bytes:
        self.send(encode_request(request))
        return bytes(next(self.call))

    def end(self) -> None:
        """Close the client's side of the stream."""
        self._messages.put(None)

    def outcome(self) -> tuple[grpc.StatusCode, str]:
        """Read the stream to its end; return its status code and details."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError:
            pass
        return self.call.code(), self.call.details()


JOIN = encode_request(Join(3))
BROKE = "its stream broke"
