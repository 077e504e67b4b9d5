"""Convert requests and answers to protobuf messages and back. An unreadable message is refused with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from fl_bn.exchange.call import Answer, Join, Key, Layer, Local, Quantity, Refused, Request
from fl_bn.exchange.grpc import exchange_pb2 as pb
from fl_bn.support.wire import printable

CODES = {quantity: pb.Quantity.Value(quantity.name) for quantity in Quantity}
QUANTITIES = {code: quantity for quantity, code in CODES.items()}
DTYPES = {torch.float32: "<f4", torch.float64: "<f8"}


def encode_request(request: Request) -> pb.Request:
    """Convert a client's request to a message."""
    if isinstance(request, Join):
        return pb.Request(join=pb.Join(batch=request.batch))
    key = request.key
    local = pb.Local(layer=key.layer, quantity=CODES[key.quantity], call=key.call, count=request.count, values=_bytes(request.values))
    return pb.Request(local=local)


def decode_request(data: bytes, layers: Mapping[str, Layer]) -> Request | None:
    """Convert a message to a client's request.

    Args:
        data: the message, as received.
        layers: the layers that may be exchanged, by name.

    Returns:
        The request, or None if the client leaves the session.

    Raises:
        Refused: the message cannot be read, is empty, or names a layer or quantity that does not exist. Or its bytes are no whole number
            of the layer's values. How many there must be is the session's rule.
    """
    got = "it cannot be read"
    try:
        message = pb.Request.FromString(data)
        kind, local = message.WhichOneof("kind"), message.local
        if kind == "leave":
            return None
        if kind == "join":
            return Join(message.join.batch)
        got = f"it names layer {printable(local.layer, 40)!r} and quantity {local.quantity}, with {len(local.values)} bytes of values"
        key = Key(local.layer, QUANTITIES[local.quantity], local.call)
        return Local(key, _tensor(local.values, layers[key.layer].dtype), local.count)
    except (DecodeError, KeyError, ValueError) as error:
        known = f"one of {len(layers)} BatchNorm layers ({printable(', '.join(layers), 40)}) and a quantity from 1 to {len(QUANTITIES)}"
        raise Refused(
            f"expected a request that names {known}, but of {len(data)} bytes {got}: does the client run the same model and version?"
        ) from error


@lru_cache(maxsize=8)
def encode_answer(answer: Answer) -> pb.Answer:
    """Convert an answer to a message. One message serves all clients of a cohort."""
    return pb.Answer(values=_bytes(answer.values), count=answer.count, batch=answer.batch)


def decode_answer(message: pb.Answer, dtype: torch.dtype) -> Answer:
    """Convert a message to an answer with values of ``dtype``."""
    return Answer(_tensor(message.values, dtype), message.count, message.batch)


def _bytes(values: Tensor) -> bytes:
    return bytes(values.numpy().astype(DTYPES[values.dtype], copy=False).tobytes())


def _tensor(values: bytes, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.frombuffer(values, DTYPES[dtype]).astype(DTYPES[dtype][1:]))
