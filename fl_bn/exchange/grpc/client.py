"""Connect a client to the gRPC service of the exchange, with one stream per round."""

from __future__ import annotations

import queue
import time

import grpc
import torch
from torch import Tensor

from fl_bn.exchange.call import Answer, ExchangeFailed, Join, Key, Local, Request, checked
from fl_bn.exchange.grpc.service import SERVICE, TOKEN, decode_answer, encode_request
from fl_bn.support.departures import leaving
from fl_bn.support.loopback import direct

MOST = 2.0**31 - 1  # the largest number of milliseconds or seconds that gRPC takes


class GrpcExchange:
    """Take part in a layer-wise exchange over gRPC. Making the object joins the round.

    Args:
        address: HOST:PORT of the service.
        token: the client's token for this round.
        authority: the authority's certificate, in PEM. Empty: no encryption.
        timeout: seconds that the whole stream may last.
        patience: seconds without an answer to a ping, after which the server is
            dead.

    Raises:
        ExchangeFailed: the service is out of reach or refuses the client, or not
            all join.
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
            ("grpc.max_receive_message_length", -1),  # as large as a layer
            *direct(address),
        ]
        if authority:
            self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(authority), options)
        else:
            self._channel = grpc.insecure_channel(address, options)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        average = self._channel.stream_stream(f"/{SERVICE}/Average")
        requests, timeout = iter(self._requests.get, None), min(timeout, MOST)
        self._answers = average(requests, metadata=((TOKEN, token),), timeout=timeout, wait_for_ready=False)
        try:
            self._ask(Join(batch), torch.float32)
        except BaseException:
            self.close("it could not join")
            raise

    def __call__(self, key: Key, local: Tensor, count: int) -> Answer:
        """Average ``local`` (d,), as ``Exchange`` says."""
        leaving("exchange", local.numel() * local.element_size(), self.batch)
        return checked(self._ask(Local(key, local.detach().cpu(), count), local.dtype), key, local)

    def close(self, error: str = "") -> None:
        """Leave the round: at once with an ``error``, else when the server has ended the stream."""
        if self._closed:
            return
        self._closed = True
        if error:
            self._answers.cancel()
        else:
            self._requests.put(encode_request(None))
        self._requests.put(None)
        try:
            for _ in () if error else self._answers:  # until the server has noticed that this client left
                pass
        except grpc.RpcError:
            pass  # the round failed after this client's last exchange
        finally:
            self._channel.close()

    def _ask(self, request: Request, dtype: torch.dtype) -> Answer:
        begin = time.perf_counter()
        self._requests.put(encode_request(request))
        try:
            return decode_answer(next(self._answers), dtype)
        except (StopIteration, grpc.RpcError, KeyError, ValueError, TypeError, RecursionError) as error:
            if isinstance(error, grpc.RpcError):
                why = f"{error.code().name}: {error.details()}"
            else:
                why = f"it ended, or its answer is none with values of {dtype}"
            raise ExchangeFailed(f"the exchange at {self._address} failed: {why}") from error
        finally:
            self.seconds += time.perf_counter() - begin
