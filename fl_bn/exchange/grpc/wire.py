"""Convert requests and answers to bytes and back: a line of JSON, and the values after it, little-endian.

A stream's first request is ``{"join": batch}``, where 0 says that the client takes no part in this
round. Its last one is ``{"leave": true}``. All others have ``layer``, ``quantity``, ``call`` and
``count``, and a client's vector. Each but the last gets one answer, ``{"count": ..., "batch": ...}``
and the cohort's vector, once all clients of the round have sent theirs. A stream that ends without a
leave means that its client has died.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_bn.exchange.call import Answer, Join, Key, Layer, Local, Quantity, Refused, Request
from fl_bn.support.wire import excerpt, printable

DTYPES = {torch.float32: "<f4", torch.float64: "<f8"}


def encode_request(request: Request | None) -> bytes:
    """Convert a client's request to a message. None: the client leaves the session."""
    if isinstance(request, Local):
        key = request.key
        return _packed(request.values, layer=key.layer, quantity=key.quantity.value, call=key.call, count=request.count)
    return _packed(leave=True) if request is None else _packed(join=request.batch)


def decode_request(data: bytes, layers: Mapping[str, Layer]) -> Request | None:
    """Convert a message to a client's request.

    ``layers`` are those that may be exchanged. None: the client leaves the session.

    Raises:
        Refused: the message cannot be read, or names an unknown layer or quantity. Or its bytes are no whole
            number of the layer's values. How many there must be is the session's rule.
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
    """Convert an answer to a message. One message serves all clients of a cohort."""
    return _packed(answer.values, count=answer.count, batch=answer.batch)


def decode_answer(data: bytes, dtype: torch.dtype) -> Answer:
    """Convert a message to an answer with values of ``dtype``. Errors of parsing are raised as they come."""
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
