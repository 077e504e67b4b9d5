"""Exchange vectors by replay: a client computes its round again whenever a new answer has come.

The server sends all answers so far, the transcript. The client uses them in order,
and asks for the next one in its reply. Every repetition has the same batch and
random numbers, so it reaches the same point. No process waits between messages, so
any cohort size works.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from fl_bn.exchange.call import Answer, ExchangeFailed, Key, Local, Quantity, checked
from fl_bn.federation.fields import NAME
from fl_bn.federation.values import Payload, Reply
from fl_bn.flower.wire.codec import OURS, Header, add_to_config, header_of, payload_of, to_record
from fl_bn.flower.wire.messages import REQUESTED
from fl_bn.support.wire import WireError, excerpt, reason

TRANSCRIPT = "transcript"
REQUEST = "exchange"
NAMED = re.compile(rf"({'|'.join(quantity.value for quantity in Quantity)})/([0-9]{{1,10}})/(.{{0,{NAME}}})", re.DOTALL)
Transcript = Sequence[tuple[Key, Answer]]


def size(values: Tensor) -> float:
    """Return the sum of the absolute values."""
    return float(values.detach().double().abs().sum())


class Unanswered(Exception):
    """Signal that the client needs an answer that is not in the transcript yet.

    Attributes:
        batch: the number of samples in the client's batch.
        passed: the sum of the absolute values of all earlier requests in this
            repetition, which the server compares with those that it has received.
    """

    def __init__(self, request: Local, batch: int, passed: float = 0.0) -> None:
        self.request, self.batch, self.passed = request, batch, passed
        super().__init__(f"no answer yet for {request.key}")


class ReplayExchange:
    """Return a transcript's answers, then raise ``Unanswered``."""

    def __init__(self, transcript: Sequence[tuple[Key, Answer]], batch: int) -> None:
        self.batch, self.seconds, self._passed = batch, 0.0, 0.0
        self._remaining = list(transcript)

    def __call__(self, key: Key, local: Tensor, count: int) -> Answer:
        """Return the next answer of the transcript, if it has one.

        If its key is another one, or it does not fit ``local``, ``ExchangeFailed``
        is raised.
        """
        if not self._remaining:
            raise Unanswered(Local(key, local.detach().cpu(), count), self.batch, self._passed)
        answered, answer = self._remaining.pop(0)
        if answered != key:
            raise ExchangeFailed(f"the transcript's next answer is for {answered}, but this repetition of the round needs {key}")
        self._passed += size(local)
        return checked(answer, key, local)

    def close(self, error: str = "") -> None:
        """Do nothing: no other client waits."""


def attach(content: RecordDict, transcript: Transcript) -> int:
    """Put ``transcript`` into a train message, and return its values' number of bytes."""
    arrays = [answer.values.numpy() for _, answer in transcript]
    keys = [[key.layer, key.quantity.value, key.call, answer.count, answer.batch] for key, answer in transcript]
    content[OURS + TRANSCRIPT] = to_record({str(i): array for i, array in enumerate(arrays)})
    add_to_config(content, {"exchange": "replay", TRANSCRIPT: json.dumps(keys)})
    return sum(array.nbytes for array in arrays)


def detach(payload: Payload, config: Mapping[str, Any]) -> list[tuple[Key, Answer]]:
    """Take the transcript, if any, out of ``payload``. A wrong one raises ``WireError``."""
    arrays = payload.pop(TRANSCRIPT, {})
    try:
        entries = enumerate(json.loads(str(config.get(TRANSCRIPT, "[]"))))
        return [_entry(torch.from_numpy(np.array(arrays[str(i)])), *entry) for i, entry in entries]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"expected a list of entries and a vector for each, but reading them failed: {reason(repr(error))}"
        raise WireError(TRANSCRIPT, "", problem) from error


def _entry(values: Tensor, layer: Any, quantity: Any, call: Any, count: Any, batch: Any) -> tuple[Key, Answer]:
    whole = all(type(number) is int and number >= 0 for number in (call, count, batch))
    if type(layer) is not str or not whole or values.ndim != 1 or not values.is_floating_point():
        raise TypeError("an entry is [layer, quantity, call, count, batch], a text and whole numbers >= 0; its vector has floats")
    return Key(layer, Quantity(quantity), call), Answer(values, count, batch)


def question(pending: Unanswered, client: int = 0) -> Reply:
    """Return the reply in which a client asks for an answer."""
    request, key = pending.request, pending.request.key
    sections = {REQUEST: {f"{key.quantity.value}/{key.call}/{key.layer}": request.values}}
    return Reply(client, sections, 0, 0, {"batch": pending.batch, "count": request.count, "passed": pending.passed})


def read_request(reply: Message, header: Header) -> tuple[int, Local, float] | None:
    """Read the request of a client that needs an answer; None: this is its last reply.

    Return its batch size, its request, and the sum of the absolute values of its
    earlier requests. A reply that does not repeat ``header`` raises ``WireError``.
    """
    payload, repeated = payload_of(reply.content), header_of(reply.content)
    if REQUEST not in payload:
        return None
    header.check(repeated)
    metrics, (name, *others) = REQUESTED.of(reply.content), [*payload[REQUEST], ""]
    if len(others) != 1 or (match := NAMED.fullmatch(name)) is None:
        raise WireError(REQUEST, "", f"expected one vector 'quantity/call/layer', but got {excerpt(list(payload[REQUEST]))}")
    values = torch.from_numpy(np.array(payload[REQUEST][name]))
    return metrics["batch"], Local(Key(match[3], Quantity(match[1]), int(match[2])), values, metrics["count"]), metrics["passed"]
