"""A Flower app as a user may write it, with its own loop, config, metrics and records, for the tests of ``OwnAppStrategy``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import set_buffer_roles
from fl_bn.flower import InProcessGrid, answer, evaluating, replayed, training
from fl_bn.methods import METHODS, Method
from fl_bn.objectives import PLAIN, Objective

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


class Bank(nn.Module):
    """Hold a buffer of the user's own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(1, 6, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x


def banked(dtype: torch.dtype = torch.float32, role: str = "kept") -> nn.Module:
    return set_buffer_roles(nn.Sequential(*net()[:2], Bank(dtype), *net()[2:]), {"*.bank": role})


def data(client: int) -> list[Batch]:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(client)) + 0.3 * client
    return [(part, part[:, :3].argmax(1)) for part in x.split(8)]


def client_of(context: Context) -> int:
    return int(context.node_config["partition-id"])


def epoch(round: Any, batches: Any, rate: float, term: bool = False) -> float:
    """Train as any PyTorch loop does, or as one whose objective has a term of its own; return the last loss."""
    optimizer = torch.optim.SGD([p for p in round.model.parameters() if p.requires_grad], lr=rate)
    for x, y in batches:
        optimizer.zero_grad()
        if term:
            loss = round.backward(lambda x=x, y=y: F.cross_entropy(round.model(x), y), x)
        else:
            (loss := F.cross_entropy(round.model(x), y)).backward()
        optimizer.step()
    return loss.item()


with_objective = partial(epoch, term=True)


def own_app(
    method: str | Method = "fixbn",
    *,
    batches: Callable[[int], Any] = data,
    samples: Callable[[int], int] = lambda client: SAMPLES,
    loop: Callable[[Any, Any, float], float] = epoch,
    before: Callable[[Message, Context], Any] = lambda message, context: None,
    after: Callable[[Message, Context, Message], Any] = lambda message, context, reply: None,
    metrics: Callable[[float, int], dict[str, Any]] = lambda loss, client: {"my_acc": 0.1 * (client + 1), "my_f1": 0.5},
    evaluated: Callable[[float, int], dict[str, Any]] = lambda loss, client: {
        "eval_loss": loss,
        "eval_acc": 0.2 * (client + 1),
        "num-examples": 8 * (client + 1),
    },  # fmt: skip
    rate: Callable[[Message], float] = lambda message: 0.1,
    says: Callable[[float, int], float | None] = lambda loss, round: loss,
    model: Callable[[], nn.Module] = net,
    objective: Objective = PLAIN,
    mods: tuple[list[Any], list[Any], list[Any]] = ([], [], []),
    **answers: Any,
) -> ClientApp:
    """Make the app.

    Args:
        samples: Returns the number of samples that a client reports.
        before: The user's own code before training and evaluation.
        after: The user's own code after training, which also gets the reply.
        metrics: Makes the metrics of a reply from the loss and the client.
        evaluated: Makes the metrics of an evaluation.
        says: Returns the loss that a client reports, from its true loss and the round.
        mods: The mods of the app, of training and of evaluation.
        answers: Further arguments of ``answer``.
    """
    app, chosen = ClientApp(mods=mods[0]), METHODS[method]() if isinstance(method, str) else method
    answer(app, model, chosen, lambda context: batches(client_of(context)), **answers)

    @app.train(mods=[replayed, *mods[1]])
    def train(message: Message, context: Context) -> Message:
        client = client_of(context)
        before(message, context)
        with training(message, context, model(), chosen, batches(client), objective=objective) as round:
            loss = loop(round, batches(client), rate(message))
        reply = round.message(samples(client), says(loss, round.number), metrics(loss, client))
        after(message, context, reply)
        return reply

    @app.evaluate(mods=mods[2])
    def evaluate(message: Message, context: Context) -> Message:
        client, tested = client_of(context), evaluating(message, context, model(), chosen)
        before(message, context)
        with torch.no_grad():
            loss = sum(F.cross_entropy(tested(x), y).item() for x, y in data(client))
        return Message(RecordDict({"metrics": MetricRecord(evaluated(loss, client))}), reply_to=message)

    return app


def config(**values: Any) -> ConfigRecord:
    return ConfigRecord({name.replace("_", "-"): value for name, value in values.items()})


def ran(strategy: Any, app: ClientApp, rounds: int = 1, **named: Any) -> Any:
    """Run a strategy over an app in this process; return Flower's result."""
    return strategy.start(InProcessGrid(app, CLIENTS, {}), num_rounds=rounds, **named)


def tensors(result: Any) -> dict[str, Tensor]:
    """Return the tensors of a result or of arrays."""
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in getattr(result, "arrays", result).items()}


def equal(one: Any, other: Any) -> bool:
    a, b = tensors(one), tensors(other)
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def overriding(kind: type[Any], method: str, change: Callable[[Any], Any] = lambda returned: returned) -> type[Any]:
    """Return a user's subclass, one of whose methods changes what ``super()`` returns."""

    def called(self: Any, *args: Any, **named: Any) -> Any:
        return change(getattr(super(mine, self), method)(*args, **named))

    mine = type("Mine", (kind,), {method: called, "__module__": "theirs"})
    return mine


def refused(call: Callable[[], Any], kind: type[Exception], *words: str) -> None:
    """Expect an error of this class that names these fields, methods or clients."""
    with pytest.raises(kind) as error:
        call()
    assert type(error.value) is kind
    assert [word for word in words if word not in str(error.value)] == []


def begin() -> ArrayRecord:
    return ArrayRecord(pretrained().state_dict())


def grid(method: str, **options: Any) -> InProcessGrid:
    return InProcessGrid(own_app(method, **options), CLIENTS, {})
