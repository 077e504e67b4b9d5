# ruff: noqa: F401  # inner names, which the tests of this folder import from here
"""Change one client's replies on their way to the server, and run a federation with this client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key

from fl_bn.app.assembly import source_model
from fl_bn.app.config import RunConfig
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.aggregation import Defence
from fl_bn.federation.local import Samples
from fl_bn.federation.record import RoundRecord
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.shared_model import SharedModel
from fl_bn.federation.values import Reply, to_numpy
from fl_bn.flower.wire.codec import OURS, header_for, to_record, to_records
from fl_bn.methods import METHODS
from fl_bn.secure.privacy import Privacy
from fl_bn.secure.settings import SecureAggregation
from fl_bn.support.wire import WireError
from tests.federation import random_samples
from tests.in_process import TWO_STEPS, Run, WatchedGrid, client_app, run

LIAR = 1  # whose node is 2
Spoil = Callable[[Message, str, RecordDict], None]  # the instruction, what it asks for, and the reply's content, to be changed in place


def what(message: Message) -> str:
    """Return the type of a message, such as ``train``; with secure aggregation also its stage, such as ``train share_keys``."""
    records = message.content.config_records
    stage = str(records[RECORD_KEY_CONFIGS].get(Key.STAGE, "")) if RECORD_KEY_CONFIGS in records else ""
    return f"{message.metadata.message_type} {stage}".strip()


class LyingGrid(WatchedGrid):
    """Let clients lie: each of ``liars`` has a function that changes its replies."""

    def __init__(self, app: ClientApp, clients: int, liars: Mapping[int, Spoil]) -> None:
        super().__init__(app, clients)
        self.liars = liars

    def _answer(self, message: Message) -> Message:
        asked = what(message)  # Flower's mod takes the stage away
        answer, client = super()._answer(message), message.metadata.dst_node_id - 1
        if client in self.liars and answer.has_content():
            self.liars[client](message, asked, answer.content)
        return answer


def named(content: RecordDict, record: str) -> str:
    """Return the name of a record in a message: with fl-bn's prefix, or without it if only the user's own record exists."""
    return record if record in content and OURS + record not in content else OURS + record


def sets(kind: str, record: str, **fields: Any) -> Spoil:
    """Return a function that sets fields of ``record`` in replies to messages of type ``kind``; None removes a field."""

    def spoil(message: Message, asked: str, content: RecordDict) -> None:
        if asked != kind:
            return
        name = named(content, record)
        numbers = name in content.metric_records
        old = dict(content.metric_records[name] if numbers else content.config_records.get(name, {}))
        new = {k: v for k, v in old.items() if k.replace("-", "_") not in fields}
        new |= {k.replace("_", "-") if k.replace("_", "-") in old else k: v for k, v in fields.items() if v is not None}
        if name in content:
            del content[name]
        content[name] = MetricRecord(new) if numbers else ConfigRecord(new)

    return spoil


def alters(section: str, change: Callable[[str, np.ndarray], np.ndarray], kind: str = "train", round: int = 0) -> Spoil:
    """Return a function that changes each array of ``section`` in replies to ``kind``; in ``round`` alone, unless that is 0."""

    def spoil(message: Message, asked: str, content: RecordDict) -> None:
        name = OURS + section
        if asked == kind and name in content.array_records and round in (0, message.content.config_records[OURS + "header"]["round"]):
            arrays = {key: array.numpy() for key, array in content.array_records[name].items()}
            content[name] = ArrayRecord({key: Array(change(key, array)) for key, array in arrays.items()})

    return spoil


def ending(suffix: str, value: float) -> Callable[[str, np.ndarray], np.ndarray]:
    """Return a change of arrays: those whose name ends in ``suffix`` hold ``value`` alone."""
    return lambda name, array: np.full_like(array, value) if name.endswith(suffix) else array


def nothing(message: Message, asked: str, content: RecordDict) -> None:
    """Nobody lies."""


def silent(message: Message, asked: str, content: RecordDict) -> None:
    """Train, and send nothing."""
    if asked == "train":
        content.clear()


def lacks(kind: str, record: str) -> Spoil:
    """Return a function that removes ``record`` from replies to messages of type ``kind``."""

    def spoil(message: Message, asked: str, content: RecordDict) -> None:
        if asked == kind and (name := named(content, record)) in content:
            del content[name]

    return spoil


def people(n: int = 5, samples: int = 6) -> list[Samples]:
    return [random_samples(samples, brightness=0.1 * (i % 10), seed=i) for i in range(n)]


def lied(
    spoil: Spoil | Mapping[int, Spoil],
    name: str = "fbn",
    clients: Sequence[Samples] | None = None,
    rounds: int = 2,
    settings: LocalTraining = TWO_STEPS,
    policy: dict[str, Any] | None = None,
    chosen: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Run:
    """Run a federation in which the client ``LIAR`` lies, or each of several; ``chosen`` are the method's options.

    The run may start before the liars have introduced themselves.
    """
    clients, method, liars = clients or people(), METHODS[name](**chosen), spoil if isinstance(spoil, Mapping) else {LIAR: spoil}
    grid = LyingGrid(client_app(method, clients, settings), len(clients), liars)
    rules = {"at_start": len(clients) - len(liars), **(policy or {})}
    return run(method, clients, rounds, settings=settings, grid=grid, policy=rules, **options)
