"""Run a user's own Flower app on a grid that changes the replies of some nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result

from fl_bn.flower import InProcessGrid, OwnAppStrategy
from fl_bn.methods import METHODS
from tests.flower import own_apps
from tests.flower.own_apps import net
from tests.hostile.liars import RoundRecord
from tests.kept import Kept
from tests.noted import noted

CLIENTS = 5
Spoil = Callable[[Message, str, RecordDict], None]  # the instruction, its type, and the reply's content, to be changed in place


def own_app(name: str = "fbn", *mods: Any) -> ClientApp:
    metrics = {"accuracy": 0.5, "num-examples": 8, "confusion": [1, 2]}
    return own_apps.own_app(name, mods=(list(mods), [], []), evaluated=lambda loss, client: {"loss": loss, **metrics})


class LyingGrid(InProcessGrid):
    """Let ``spoil`` change the replies of ``nodes``."""

    def __init__(self, app: ClientApp, nodes: Collection[int], spoil: Spoil, clients: int = CLIENTS) -> None:
        super().__init__(app, clients, {})
        self.nodes, self.spoil = nodes, spoil

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        if message.metadata.dst_node_id in self.nodes and reply.has_content():
            self.spoil(message, message.metadata.message_type, reply.content)
        return reply


class Ran(NamedTuple):
    """Hold the results of a run: Flower's result, every round's record, and the shared tensors after each round."""

    result: Result
    records: list[RoundRecord]
    trajectory: list[dict[str, np.ndarray]]


def lied(liars: Mapping[int, Spoil], name: str = "fbn", rounds: int = 2, nodes: int = CLIENTS, **options: Any) -> Ran:
    """Run the app on ``nodes`` nodes for ``rounds`` rounds. Each of ``liars``, which are clients, changes its replies by a function."""
    records = list[RoundRecord]()
    strategy = OwnAppStrategy(net(), METHODS[name](), callbacks=[Kept(records)], **options)
    found = noted(strategy)

    def spoil(message: Message, asked: str, content: RecordDict) -> None:
        liars[message.metadata.dst_node_id - 1](message, asked, content)

    grid = LyingGrid(own_app(name), {client + 1 for client in liars}, spoil, nodes)
    result = strategy.start(grid, num_rounds=rounds)
    return Ran(result, records, [found[n] for n in sorted(found)])
