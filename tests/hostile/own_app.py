"""Run a user's own Flower app on a grid that changes the replies of some nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result
from torch import nn
from torch.nn import functional as F

from fl_bn.flower import InProcessGrid, OwnAppStrategy, answer, evaluating, replayed, training
from fl_bn.methods import METHODS
from tests.hostile.liars import RoundRecord
from tests.kept import Kept
from tests.noted import noted

CLIENTS = 5
Spoil = Callable[[Message, str, RecordDict], None]  # the instruction, its type, and the reply's content, to be changed in place


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def batches(context: Context) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(int(context.node_config["partition-id"])))
    return [(part, part[:, :3].argmax(1)) for part in x.split(8)]


def own_app(name: str = "fbn", *mods: Any) -> ClientApp:
    app, method = ClientApp(mods=list(mods)), METHODS[name]()
    answer(app, net, method, batches)

    @app.train(mods=[replayed])
    def train(message: Message, context: Context) -> Message:
        with training(message, context, net(), method, batches(context)) as round:
            optimizer = torch.optim.SGD(round.model.parameters(), lr=0.1)
            for x, y in batches(context):
                optimizer.zero_grad()
                F.cross_entropy(round.model(x), y).backward()
                optimizer.step()
        return round.message(16, 1.0)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        model, ((x, y), *_) = evaluating(message, context, net(), method), batches(context)
        with torch.no_grad():
            scores = model(x)
        loss, accuracy = F.cross_entropy(scores, y).item(), (scores.argmax(1) == y).double().mean().item()
        metrics: dict[str, Any] = {"loss": loss, "accuracy": accuracy, "num-examples": 8, "confusion": [1, 2]}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


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
