"""Client of the service: one stream for one round, from join to close."""

from __future__ import annotations

import queue
import time

import grpc
import torch
from torch import Tensor

from fl_bn.exchange.call import Answer, ExchangeFailed, Join, Key, Local, Request, checked
from fl_bn.exchange.grpc import exchange_pb2 as pb
from fl_bn.exchange.grpc import exchange_pb2_grpc
from fl_bn.exchange.grpc.service import TOKEN
from fl_bn.exchange.grpc.wire import decode_answer, encode_request
from fl_bn.support.loopback import direct

MOST = 2.0**31 - 1  # of a number that gRPC counts in: milliseconds, seconds


class GrpcExchange:
    """A client's exchange over gRPC. It joins the round when it is made.

    Args:
        address: HOST:PORT of the service.
        token: from the train message.
        batch: size of the client's batch.
        authority: PEM of the certificate authority. Empty: plaintext.
        timeout: of the whole stream, in seconds.
        patience: seconds after which a server that does not answer pings is given up.

    Raises:
        ExchangeFailed: the service cannot be reached, or refuses the client.
    """

    def __init__(
        self, address: str, token: str, batch: int, authority: bytes = b"", timeout: float = 600.0, patience: float = 30.0
    ) -> None:
        self.batch, self.seconds = batch, 0.0
        self._address, self._closed = address, False
        milliseconds = int(min(max(1000, 1000 * patience), MOST))
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.keepalive_time_ms", max(1000, milliseconds // 2)),
            ("grpc.keepalive_timeout_ms", max(1000, milliseconds // 2)),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.enable_retries", 0),
            *direct(address),
        ]
        if authority:
            self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(authority), options)
        else:
            self._channel = grpc.insecure_channel(address, options)
        self._requests: queue.SimpleQueue[pb.Request | None] = queue.SimpleQueue()
        stub = exchange_pb2_grpc.ExchangeStub(self._channel)
        requests, timeout = iter(self._requests.get, None), min(timeout, MOST)
        self._answers = stub.Average(requests, metadata=((TOKEN, token),), timeout=timeout, wait_for_ready=False)
        try:
            self._ask(Join(batch), torch.float32)
        except BaseException:
            self.close("it could not join")
            raise

    def __call__(self, key: Key, local: Tensor, count: int) -> Answer:
        """Average ``local`` (d,) over the cohort, and wait until all clients have sent theirs.

        Raises:
            ExchangeFailed: the round's exchange cannot go on.
        """
        return checked(self._ask(Local(key, local.detach().cpu(), count), local.dtype), key, local)

    def close(self, error: str = "") -> None:
        """Leave the round, and wait until the server has seen it. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if error:
            self._answers.cancel()
        else:
            self._requests.put(pb.Request(leave=pb.Leave()))
        self._requests.put(None)
        try:
            for _ in () if error else self._answers:  # until the server has seen us leave
                pass
        except grpc.RpcError:
            pass  # the others gave up after our last exchange
        finally:
            self._channel.close()

    def _ask(self, request: Request, dtype: torch.dtype) -> Answer:
        begin = time.perf_counter()
        self._requests.put(encode_request(request))
        try:
            answer = next(self._answers)
        except StopIteration:
            raise ExchangeFailed(f"the exchange at {self._address} ended before it answered") from None
        except grpc.RpcError as error:
            raise ExchangeFailed(f"the exchange at {self._address} failed: {error.code().name}: {error.details()}") from error
        finally:
            self.seconds += time.perf_counter() - begin
        try:
            return decode_answer(answer, dtype)
        except ValueError as error:
            raise ExchangeFailed(
                f"the exchange at {self._address} answered with {len(answer.values)} bytes, which are no multiple of {dtype}"
            ) from error
