"""Check replies before the server uses them, alike for all ways of running, and take them in.

They come as a ``Reply``, or, in Flower, as a message (``flower.replies``).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fl_bn.exchange.session import Session
from fl_bn.federation.aggregation import WeightedSum, largest
from fl_bn.federation.fields import LARGEST, Field, Form, Values, number, one_of, whole
from fl_bn.federation.fields import measured as a_number
from fl_bn.federation.policy import unbounded
from fl_bn.federation.schema import Schema
from fl_bn.federation.values import Payload, Reply, RoundReplies, Sections, to_numpy, views
from fl_bn.support.wire import Absent, WireError, excerpt, reason

LOGGER = logging.getLogger("flwr")
WIDEST_WEIGHT = 1e4
"""The largest weight in a reply, as a multiple of the server's largest, or of 1 if larger.

One client's finite value of 3e38 would dominate the average unnoticed. Honest
training stays below this limit, even in the first steps of an untrained deep
network.
"""
REPLIED = Form("metrics", {"samples": whole(), "measured": whole(default=None)})  # samples 0: the client took no part in the round
TRAINED = REPLIED.and_also(
    Form(
        "metrics",
        {
            "steps": whole(1),
            "loss": a_number(),
            "waited": number(0, default=0.0),
            "kept": whole(default=None),
            "batch": whole(default=None),
        },
    )
)
NAMED = Field(lambda v: isinstance(v, Mapping) and all(type(name) is str for name in v), "a dict {name: number}, each name a text")
LOOPED = TRAINED.and_also(Form("metrics", {"steps": whole()}))  # a user's own loop may end before its first step


def bounds_of(sent: Sections, rate: float, buffers: Collection[str] = ()) -> dict[str, float]:
    """Return section -> the largest absolute value in a reply, for weights and gradients.

    A gradient times the learning rate may be as large as the largest allowed
    weight, ``buffers`` not counted.
    """
    weight = WIDEST_WEIGHT * max(1.0, largest(t for name, t in sent.get("weights", {}).items() if name not in buffers))
    return {"weights": weight, "gradients": weight / rate if rate > 0 else math.inf}


@dataclass(frozen=True)
class Expected:
    """Describe the expected replies to one instruction.

    Attributes:
        form: The reply's numbers.
        samples: Client -> the number of samples that it announced.
        most_steps: ``most_steps(samples)`` returns the most local steps; 0:
            unknown.
        bounds: Section -> the largest allowed absolute value, if any.
        unbounded: The tensors without ``bounds``.
    """

    round: int
    signature: str
    schema: Schema
    form: Form
    samples: Mapping[int, int] = field(default_factory=dict)
    most_steps: Callable[[int], int] = unbounded
    bounds: Mapping[str, float] = field(default_factory=dict)
    unbounded: Collection[str] = ()

    def check(self, reply: Reply) -> Reply:
        """Check ``reply``, and return it with plain CPU tensors and the numbers of ``form``.

        Raises:
            Absent: The client took no part in the round.
            WireError: A part of the reply is not as expected. The message names the
                first wrong part.
        """
        about = {"round": reply.round, "signature": reply.signature, "metrics": reply.metrics}
        Form("reply", {"round": whole(self.round, self.round), "signature": one_of(self.signature), "metrics": NAMED}).read(about)
        values = self.numbers(reply.client, {**reply.metrics, "samples": reply.samples})
        Form("metrics", {"weight": whole(1, reply.samples)}).read({"weight": reply.weight})
        return replace(self.reply(reply.client, values, arrays_of(reply.sections)), weight=reply.weight)

    def numbers(self, client: int, record: Mapping[str, Any] | None) -> Values:
        """Check a reply's numbers, and return those of ``form``. Errors are those of ``check``."""
        samples: int = REPLIED.read(record)["samples"]
        if samples == 0:
            raise Absent("metrics", "samples", "0: the client trained on no samples in this round")
        values = self.form.read(record)
        limits = {
            "samples": self.samples.get(client, LARGEST) if self.schema.sections else LARGEST,
            "batch": samples,
            "measured": self.samples.get(client, LARGEST if "steps" in self.form.fields else samples),
            "steps": self.most_steps(self.samples.get(client, samples)) or LARGEST,
            "kept": self.round - 1,  # the round after which the client's state was stored
        }
        for name, most in limits.items():
            if name in self.form.fields and values.get(name, 0) > most:
                problem = f"expected at most {most}, as the client announced or was asked for, but got {values[name]}"
                raise WireError("metrics", name, problem)
        return values

    def reply(self, client: int, values: Values, payload: Payload) -> Reply:
        """Make the reply of ``client`` from numbers and arrays, or raise WireError."""
        largest = self.schema.check(payload, self.bounds, self.unbounded)
        sections = {section: views(arrays) for section, arrays in payload.items()}
        numbers = {name: float(value) for name, value in values.items()}
        samples: int = values["samples"]
        return Reply(client, sections, samples, samples, numbers, self.round, self.signature, largest)


def arrays_of(sections: Any) -> Payload:
    """Return a reply's tensors as arrays, without a copy if they are plain and on the CPU.

    Raises:
        WireError: ``sections`` is not section -> name -> tensor, or a tensor is
            sparse or on ``meta``.
    """
    payload: Payload = {}
    where = "reply", "sections"
    try:
        for section, tensors in sections.items():
            where, payload[section] = ("reply", str(section)), {}
            for name, tensor in tensors.items():
                where = str(section), str(name)
                payload[section] |= to_numpy({name: tensor})
    except (AttributeError, TypeError, RuntimeError, NotImplementedError) as error:  # not named tensors; sparse, quantised, or meta ones
        problem = f"expected dense tensors of plain numbers by section and name, but: {reason(str(error))}"
        raise WireError(*where, problem) from error
    return payload


def checked(
    replies: Sequence[Reply], expected: Expected, clients: int, exchange: Session | None = None, cohort: Sequence[int] | None = None
) -> RoundReplies:
    """Check the ``replies`` of clients in this process.

    Of several usable replies of one client, none is used. A stranger's is logged
    and left out. By default, ``cohort`` is all clients that replied.
    """
    parts, refused, wrong = dict[int, list[Reply]](), dict[int, str](), set[int]()
    expected = replace(expected, form=LOOPED) if expected.form is TRAINED else expected
    for reply in replies:
        if (problem := _stranger(reply, clients)) is not None:
            LOGGER.warning("round %s: a reply is not used: %s", expected.round, problem)
            continue
        try:
            usable = expected.check(reply)
            parts.setdefault(reply.client, []).append(usable)
        except WireError as error:
            refused[reply.client] = str(error)
            wrong |= set() if isinstance(error, Absent) else {reply.client}
    for client in [client for client, several in parts.items() if len(several) > 1]:
        number = len(parts.pop(client))
        refused[client] = f"{number} replies name this client: give each client its own number, round.reply(samples, client=...)"
        wrong.add(client)
    refused = {client: why for client, why in refused.items() if client not in parts}
    used = [parts[client][0] for client in sorted(parts)]
    everyone = sorted(parts.keys() | refused.keys()) if cohort is None else cohort
    return RoundReplies(everyone, used, refused, wrong - parts.keys(), exchange, "" if exchange is None else "local")


def _stranger(reply: Reply, clients: int) -> str | None:
    """Return why ``reply`` cannot come from a client of this run, if so."""
    if not isinstance(reply, Reply):
        return f"expected a Reply, the first value that round.reply(...) returns, but got a {type(reply).__name__}"
    if type(reply.client) is not int or not 0 <= reply.client < clients:
        return f"expected client 0..{clients - 1}, as the server has {clients} clients, but the reply names client {excerpt(reply.client)}"
    return None


class Intake:
    """Add replies to a weighted sum as they arrive, and free the memory of their weights.

    So the server needs the memory of three models only. A reply waits for those
    before it in ``cohort``, so that the order of arrival changes no bit.
    """

    def __init__(self, cohort: Sequence[int], weigh: Callable[[Reply], float]) -> None:
        self._turns, self._weigh = deque(sorted(cohort)), weigh
        self._came: dict[int, Reply | None] = {}
        self._sum = WeightedSum()

    def take(self, client: int, reply: Reply | None) -> None:
        """Take a checked reply, None if missing or refused, at most once per client."""
        self._came[client] = reply
        while self._turns and self._turns[0] in self._came:
            self._add(self._turns.popleft())

    def end(self) -> tuple[list[Reply], WeightedSum]:
        """Return all replies in client order, without weights' values, and their sum."""
        for client in self._turns:
            self._add(client)
        return [reply for _, reply in sorted(self._came.items()) if reply is not None], self._sum

    def _add(self, client: int) -> None:
        if (reply := self._came.get(client)) is None:
            return
        (section,) = reply.sections.keys() & {"weights", "gradients"}
        self._sum.add(reply.sections[section], self._weigh(reply))
        gone = {name: torch.empty_like(tensor, device="meta") for name, tensor in reply.sections[section].items()}
        self._came[client] = replace(reply, sections={**reply.sections, section: gone})


def taking_part(session: Session, parts: Sequence[Reply], refused: dict[int, str]) -> list[Reply]:
    """Return the replies of clients in the exchange, weighted by their batch sizes in it.

    Others are added to ``refused``. With ``exchange-policy='abort'``, one missing
    reply makes all others unusable.
    """
    usable, batches = {part.client: part for part in parts}, session.taking_part
    missing = sorted(set(batches) - set(usable))
    if missing and session.policy == "abort":
        session.fail(f"{session.called.clients(missing)} took part, but sent no usable reply (exchange-policy is abort)")
    refused |= {index: "it took no part in the exchange" for index in usable if index not in batches}
    if session.failure:
        refused |= dict.fromkeys(refused.keys() | usable.keys(), session.failure)
    refused |= session.dropped
    return [replace(part, weight=batches[index]) for index, part in sorted(usable.items()) if index not in refused]
