"""A Flower app as a user may write it, with its own config, metrics and records, for the tests of ``OwnAppStrategy``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn.flower import answer, evaluating, replayed, training
from fl_bn.methods import METHODS, Method

CLIENTS, SAMPLES = 3, 16
Batch = tuple[Tensor, Tensor]


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def pretrained() -> nn.Sequential:
    model = net(5)
    with torch.no_grad():
        for name, tensor in model[1].state_dict().items():
            tensor.copy_(torch.tensor(7) if name == "num_batches_tracked" else torch.linspace(0.5, 1.5, 6))
    return model


def data(client: int) -> list[Batch]:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(client)) + 0.3 * client
    return [(part, part[:, :3].argmax(1)) for part in x.split(8)]


def client_of(context: Context) -> int:
    return int(context.node_config["partition-id"])


def metrics_of(loss: float, client: int) -> dict[str, Any]:
    return {"my_acc": 0.1 * (client + 1), "my_f1": 0.5}


def own_app(
    method: str | Method = "fixbn",
    *,
    batches: Callable[[int], list[Batch]] = data,
    before: Callable[[Message, Context], None] = lambda message, context: None,
    after: Callable[[Message, Context, Message], None] = lambda message, context, reply: None,
    metrics: Callable[[float, int], dict[str, Any]] = metrics_of,
    record: str = "metrics",
    rate: Callable[[Message], float] = lambda message: 0.1,
    says: Callable[[float, int], float] = lambda loss, round: loss,
    tells: bool = False,
    model: Callable[[], nn.Module] = net,
) -> ClientApp:
    """Make the app.

    Args:
        method: The method, or its name.
        batches: Returns the batches of a client.
        before: The user's own code before training and evaluation.
        after: The user's own code after training, which also gets the reply.
        metrics: Makes the metrics of a reply from the loss and the client.
        record: The name of the record with the evaluation's metrics.
        rate: Returns the learning rate for a message.
        says: Returns the loss that a client reports, from its true loss and the round.
        tells: Whether clients send the BatchNorm layers that they keep.
        model: Makes the network.
    """
    app, chosen = ClientApp(), METHODS[method]() if isinstance(method, str) else method
    answer(app, model, chosen, lambda context: batches(client_of(context)), tells=tells)

    @app.train(mods=[replayed])
    def train(message: Message, context: Context) -> Message:
        client = client_of(context)
        before(message, context)
        with training(message, context, model(), chosen, batches(client)) as round:
            optimizer = torch.optim.SGD(round.model.parameters(), lr=rate(message))
            for x, y in batches(client):
                optimizer.zero_grad()
                loss = F.cross_entropy(round.model(x), y)
                loss.backward()
                optimizer.step()
        reply = round.message(SAMPLES, says(loss.item(), round.number), metrics(loss.item(), client))
        after(message, context, reply)
        return reply

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client, tested = client_of(context), evaluating(message, context, model(), chosen)
        before(message, context)
        with torch.no_grad():
            loss = sum(F.cross_entropy(tested(x), y).item() for x, y in batches(client))
        own = MetricRecord({"eval_loss": loss, "eval_acc": 0.2 * (client + 1), "num-examples": 8 * (client + 1)})
        return Message(RecordDict({record: own}), reply_to=message)

    return app


def config(**values: Any) -> ConfigRecord:
    return ConfigRecord({name.replace("_", "-"): value for name, value in values.items()})
