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

CODES = {
    Quantity.MEAN: pb.MEAN,
    Quantity.VARIANCE: pb.VARIANCE,
    Quantity.MOMENTS: pb.MOMENTS,
    Quantity.GRADIENTS: pb.GRADIENTS,
    Quantity.STATISTICS: pb.STATISTICS,
}
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
        Refused: the message cannot be read, is empty, names a layer or quantity that does not exist, or has a vector of
            a wrong length.
    """
    try:
        message = pb.Request.FromString(data)
    except DecodeError as error:
        raise Refused(
            f"expected a request in the format of exchange.proto, but got {len(data)} bytes that cannot be read as one"
        ) from error
    kind = message.WhichOneof("kind")
    if kind == "leave":
        return None
    if kind == "join":
        return Join(message.join.batch)
    if kind != "local":
        raise Refused("expected a request to join, to average a layer's values or to leave, but got an empty one")
    local = message.local
    if local.quantity not in QUANTITIES:
        raise Refused(
            f"expected a quantity from 1 to {len(QUANTITIES)} (exchange.proto lists them: MEAN, VARIANCE, ...), but got {local.quantity}: "
            "does the client run the same version of fl-bn?"
        )
    key = Key(local.layer, QUANTITIES[local.quantity], local.call)
    if (layer := layers.get(key.layer)) is None:
        raise Refused(
            f"{key}: the server's model has no such BatchNorm layer; it has {len(layers)} ({', '.join(list(layers)[:3])} ...): does the "
            "client run the same model and version?"
        )
    expected = key.quantity.width(layer.channels) * layer.dtype.itemsize
    if len(local.values) != expected:
        raise Refused(f"{key}: expected {expected} bytes ({layer.channels} channels of {layer.dtype}), but got {len(local.values)}")
    return Local(key, _tensor(local.values, layer.dtype), local.count)


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
