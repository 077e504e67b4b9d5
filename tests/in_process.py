"""Run Flower in this process on few samples: a real ClientApp, a real strategy, and a grid that keeps all messages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result
from torch import nn

from fl_bn.bn.conversion import convert
from fl_bn.federation.local import Samples
from fl_bn.federation.record import RoundRecord
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.values import Reply
from fl_bn.flower import BatchNormClient, BatchNormStrategy, InProcessGrid, Rounds, RunFailed, Site, make_client_app
from fl_bn.flower.handlers import Request
from fl_bn.flower.wire.codec import our_records
from fl_bn.methods import Method
from tests.kept import Kept
from tests.networks import seeded_network
from tests.noted import noted

T = TypeVar("T")
TWO_STEPS = LocalTraining(batch_size=4, steps=2, momentum=0.9)
FULL_BATCH = LocalTraining(batch_size=64, epochs=1)
CPU = torch.device("cpu")


def client_app(
    method: Method,
    clients: Sequence[Samples],
    settings: LocalTraining = TWO_STEPS,
    *,
    model: nn.Module | None = None,
    folder: Path | None = None,
    state: Path | None = None,
    disturb: Callable[[int, str], None] = lambda client, kind: None,
    counted: int = 0,
    tells: bool = False,
) -> ClientApp:
    """Make the ClientApp of ``clients``, by default with a small CNN.

    ``disturb`` is called before a client computes, with its index and a text such as ``train 1``; it may raise. ``counted``: how many
    clients there are according to each client's config. ``state``: the folder for what clients keep, their state-dir.
    ``tells``: clients send the BatchNorm layers that they keep.
    """
    converted = convert(model or seeded_network("cnn"), method)

    class Disturbed(BatchNormClient):
        def compute(self, request: Request, pack: Callable[[Reply], T]) -> T:
            disturb(self.site.client, f"{request.header.phase} {request.header.round}")
            return super().compute(request, pack)

    def build(context: Context) -> BatchNormClient:
        index = int(context.node_config["partition-id"])
        site = Site(index, counted or len(clients), clients[index], clients[index], CPU, folder, (len(clients[index]),), state=state)
        return Disturbed(converted, method, settings, site, context.state, tells=tells)

    return make_client_app(build)


class WatchedGrid(InProcessGrid):
    """Keep all messages in both directions.

    ``shuffle`` is a seed: node ids and the order of replies are then random, as Flower's are. None: they follow the clients' order.
    """

    def __init__(self, app: ClientApp, clients: int, shuffle: int | None = None, engine: str = "sequential") -> None:
        super().__init__(app, clients, {"engine": engine})
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self.random = None if shuffle is None else random.Random(shuffle)
        if self.random is not None:
            contexts = list(self._contexts.values())
            self.random.shuffle(contexts)
            self._contexts = {self.random.getrandbits(60): context for context in contexts}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.sent += messages
        ids = list(super().push_messages(messages))
        self.received += [self._answers[identity] for identity in ids]
        return ids

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        return super().send_and_receive(messages) if self.random is None else iter(self.pull_messages(self.push_messages(messages)))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        if self.random is not None:
            self.random.shuffle(replies)
        return replies

    def states(self) -> list[RecordDict]:
        """Return the ``context.state`` of every client, in client order."""
        return [c.state for c in sorted(self._contexts.values(), key=lambda c: int(c.node_config["partition-id"]))]

    def kinds(self) -> list[str]:
        """Return the type and round of each exchange, in order, such as ``train 1`` or ``query.statistics 1``."""
        said = [f"{m.metadata.message_type} {m.metadata.group_id}" for m in self.sent]
        return [kind for before, kind in zip([None, *said], said, strict=False) if kind != before]

    def train(self, round: int, *, replies: bool = False) -> list[dict[str, dict[str, np.ndarray]]]:
        """Return the arrays in the train messages (or in their replies) of ``round``, by section, in the order sent."""
        messages = self.received if replies else self.sent
        wanted = (m for m in messages if m.metadata.message_type == "train" and m.metadata.group_id == str(round) and m.has_content())
        return [sections(m.content) for m in wanted]


def sections(content: RecordDict) -> dict[str, dict[str, np.ndarray]]:
    return {section: arrays_of(record) for section, record in our_records(content, ArrayRecord).items()}


def arrays_of(record: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in record.items()}


@dataclass
class Run:
    """Hold the results of a run; ``trajectory`` has for each round the shared tensors that were evaluated after it."""

    strategy: BatchNormStrategy
    grid: WatchedGrid
    result: Result
    records: list[RoundRecord] = field(default_factory=list)
    trajectory: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)


def a_tenth(round: int, rounds: int) -> float:
    return 0.1


def run(
    method: Method,
    clients: Sequence[Samples],
    rounds: int = 3,
    *,
    settings: LocalTraining = TWO_STEPS,
    grid: WatchedGrid | None = None,
    policy: Mapping[str, Any] | None = None,
    model: nn.Module | None = None,
    may_fail: bool = False,
    **options: Any,
) -> Run:
    """Run ``rounds`` rounds in this process, by default with a small CNN and a new grid.

    ``policy`` are fields of ``Rounds``. ``may_fail``: a run that fails is returned without a result.
    """
    grid = grid or WatchedGrid(client_app(method, clients, settings, model=model), len(clients))
    ran = Run.__new__(Run)
    ran.records, ran.grid = [], grid
    plain = {"clients": len(clients), "update": settings.update, "wait": 0.0, "calibrate": 0, "unit_scale": False, "rate": a_tenth}
    rules = Rounds(**{**plain, **(policy or {})})
    ran.strategy = BatchNormStrategy(model or seeded_network("cnn"), method, rules, callbacks=[Kept(ran.records)], **options)
    ran.trajectory = noted(ran.strategy)
    try:
        ran.result = ran.strategy.start(grid, num_rounds=rounds)
    except RunFailed:
        if not may_fail:
            raise
    return ran


def identical(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> bool:
    """Return whether two sets of arrays have the same names, dtypes and bits."""
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and a[k].tobytes() == b[k].tobytes() for k in a)
