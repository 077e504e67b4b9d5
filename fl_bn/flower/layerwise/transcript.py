"""Encode the messages of an exchange by replay. The server sends a transcript: all answers so far. A client sends its next request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Message, RecordDict

from fl_bn.exchange.call import Answer, Key, Local, Quantity
from fl_bn.exchange.replay import Unanswered
from fl_bn.federation.fields import NAME
from fl_bn.federation.payload import Payload
from fl_bn.federation.values import Reply
from fl_bn.flower.wire.codec import Header, from_records, to_record
from fl_bn.flower.wire.fields import OURS, add_to_config
from fl_bn.flower.wire.messages import REQUESTED
from fl_bn.support.wire import WireError, excerpt, reason

TRANSCRIPT = "transcript"
REQUEST = "exchange"
NAMED = re.compile(rf"({'|'.join(quantity.value for quantity in Quantity)})/([0-9]{{1,10}})/(.{{0,{NAME}}})", re.DOTALL)
Transcript = Sequence[tuple[Key, Answer]]


def attach(content: RecordDict, transcript: Transcript) -> int:
    """Put ``transcript`` into a train message.

    Returns:
        The number of bytes of the transcript's values.
    """
    arrays = [answer.values.numpy() for _, answer in transcript]
    keys = [[key.layer, key.quantity.value, key.call, answer.count, answer.batch] for key, answer in transcript]
    content[OURS + TRANSCRIPT] = to_record({str(i): array for i, array in enumerate(arrays)})
    add_to_config(content, {"exchange": "replay", TRANSCRIPT: json.dumps(keys)})
    return sum(array.nbytes for array in arrays)


def detach(payload: Payload, config: Mapping[str, Any]) -> list[tuple[Key, Answer]]:
    """Return the transcript in a train message, and remove it from ``payload``. Empty: the message has none.

    Args:
        payload: the message's arrays, which hold the values of the answers.
        config: the message's config, which holds the keys of the answers.

    Raises:
        WireError: the transcript is not valid.
    """
    arrays = payload.pop(TRANSCRIPT, {})
    try:
        keys = [_key_of(*entry) for entry in json.loads(str(config.get(TRANSCRIPT, "[]")))]
        values = [torch.from_numpy(np.array(arrays[str(i)])) for i in range(len(keys))]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"expected a list of entries and one vector for each, but reading them failed: {reason(repr(error))}"
        raise WireError(TRANSCRIPT, "", problem) from error
    if not all(vector.ndim == 1 and vector.is_floating_point() for vector in values):
        raise WireError(TRANSCRIPT, "", "expected vectors of floating-point numbers, but an array has another dtype, or not one dimension")
    return [(key, Answer(vector, count, batch)) for (key, count, batch), vector in zip(keys, values, strict=True)]


def _key_of(layer: object, quantity: object, call: object, count: object, batch: object) -> tuple[Key, int, int]:
    if type(layer) is not str or type(call) is not int or type(count) is not int or type(batch) is not int or min(call, count, batch) < 0:
        raise TypeError("an entry is [layer, quantity, call, count, batch]: the layer is a text, the last three are whole numbers >= 0")
    return Key(layer, Quantity(quantity), call), count, batch


def question(pending: Unanswered, client: int = 0) -> Reply:
    """Return the reply in which a client sends its first request without an answer, and so asks for this answer."""
    request, key = pending.request, pending.request.key
    sections = {REQUEST: {f"{key.quantity.value}/{key.call}/{key.layer}": request.values}}
    return Reply(client, sections, 0, 0, {"batch": pending.batch, "count": request.count, "passed": pending.passed})


def read_request(reply: Message, header: Header) -> tuple[int, Local, float] | None:
    """Read the request of a client that needs an answer.

    Args:
        reply: the client's reply.
        header: the header of the instruction, which the reply must repeat.

    Returns:
        The client's batch size, its request, and the sum of the absolute values of its earlier requests (``Unanswered.passed``).
            None if the reply is the client's last one of the round.

    Raises:
        WireError: the reply is an error, or cannot be read.
    """
    if reply.has_error():
        raise WireError("error", "", f"code {reply.error.code}: {reason(reply.error.reason)}")
    payload, repeated = from_records(reply.content)
    if REQUEST not in payload:
        return None
    header.check(repeated)
    metrics = REQUESTED.of_metrics(reply.content)
    names = list(payload[REQUEST])
    if len(names) != 1 or (match := NAMED.fullmatch(names[0])) is None:
        raise WireError(REQUEST, "", f"expected one vector 'quantity/call/layer', but got {excerpt(names)}")
    try:
        values = torch.from_numpy(np.array(payload[REQUEST][names[0]]))
    except (ValueError, TypeError) as error:
        raise WireError(REQUEST, names[0], f"expected numbers, but got {payload[REQUEST][names[0]].dtype}") from error
    return metrics["batch"], Local(Key(match[3], Quantity(match[1]), int(match[2])), values, metrics["count"]), metrics["passed"]
