"""The door for a Flower app of your own: your handlers and your training loop, with the client's half of the round around them.

In client_app.py::

    app = ClientApp()
    answer(app, Net, fixbn(), lambda context: load_data(context)[0])

    @app.train()
    def train(msg, context):
        with training(msg, context, Net(), fixbn()) as round:
            loss = my_training_loop(round.model, trainloader)
        return round.message(len(trainloader.dataset), loss)

In server_app.py the strategy is ``fl_bn.flower.FixBN(Net())`` (``own_strategies``) in place of ``FedAvg()``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fl_bn.conversion import convert
from fl_bn.exchange.replay import Unanswered
from fl_bn.federation.client import LocalRound
from fl_bn.federation.local import torch_seed
from fl_bn.federation.network import Network
from fl_bn.federation.own_loop import local_round
from fl_bn.federation.payload import signature
from fl_bn.flower.app.client_app import HELLO, RENDEZVOUS, STATISTICS
from fl_bn.flower.app.client_state import StateStore, store_of
from fl_bn.flower.handlers import Request, read, reply_to
from fl_bn.flower.layerwise.exchange_address import ExchangeAddresses, connect
from fl_bn.flower.layerwise.transcript import question
from fl_bn.flower.wire.fields import Form
from fl_bn.flower.wire.gate import Gate, admit_own
from fl_bn.flower.wire.messages import TO_EVALUATE, TO_MEASURE, TO_MEET, TO_TRAIN
from fl_bn.flower.wire.versions import here
from fl_bn.methods import Method, Phase, StatisticsReport
from fl_bn.objectives import PLAIN, Objective
from fl_bn.roles import inputs_like
from fl_bn.task import CLASSIFICATION, Task

Batches = Callable[[Context], Iterable[Any]]
"""The training batches of the client whose Flower context it is: a DataLoader, say."""


class OwnRound:
    """What ``training`` yields. ``model`` is what the loop trains; ``message`` makes the reply, after the block.

    Args:
        message: the server's.
        request: what it asks.
        local: the client's half of the round.
        store: where the client keeps its tensors between rounds.
    """

    def __init__(self, message: Message, request: Request, local: LocalRound, store: StateStore) -> None:
        self._message, self._request, self._local, self._store = message, request, local, store

    @property
    def local(self) -> LocalRound:
        """The client's half of the round in plain torch: ``backward``, ``measure``, ``steps``."""
        return self._local

    @property
    def rate_share(self) -> float:
        """The share of your learning rate that this round is to step with: below 1 where the method has frozen the statistics.

        A rate that your loop reads from ``lr`` or ``learning_rate`` of the message's config has fallen already; multiply any other.
        """
        return self.local.instruction.rate_share

    @property
    def model(self) -> nn.Module:
        """The network, converted for the method, with what the server sent and what this client kept; in training mode."""
        return self.local.model

    def message(self, samples: int, loss: float = 0.0) -> Message:
        """The reply of a round over ``samples`` different samples, whose mean training loss was ``loss``."""
        reply, kept = self.local.reply(samples, float(loss))
        made = reply_to(self._message, self._request.header, reply, self._request.rounding)
        if kept.sections and kept.round == reply.round:  # else the state before stays
            self._store.write(kept.round, kept.sections)
        return made


class RoundGoesOn(Exception):
    """FedTAN's exchange by replay needs an answer of the server's before the round can go on; ``replayed`` sends the question."""

    def __init__(self, question: Message) -> None:
        self.question = question
        super().__init__("the exchange goes by replay: write @app.train(mods=[fl_bn.flower.replayed]) in client_app.py")


def replayed(message: Message, context: Context, handler: Callable[[Message, Context], Message]) -> Message:
    """A Flower mod for a train handler whose rounds may come to it in several messages: ``@app.train(mods=[replayed])``.

    FedTAN needs it where a cohort is larger than what can run at once (``ExchangeSettings``, carrier ``replay``).
    """
    try:
        return handler(message, context)
    except RoundGoesOn as pending:
        return pending.question


@contextmanager
def _repeatable(seed: int, model: nn.Module, everything: bool) -> Iterator[None]:
    """Shuffling and dropout draw the same whenever this round is computed; by replay that is once per answer."""
    before = random.getstate(), np.random.get_state()
    with torch_seed(seed, inputs_like(model).device):
        if not everything:
            yield
            return
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


@contextmanager
def training(
    message: Message,
    context: Context,
    model: nn.Module,
    method: Method,
    batches: Iterable[Any] | None = None,
    *,
    task: Task = CLASSIFICATION,
    objective: Objective = PLAIN,
) -> Iterator[OwnRound]:
    """The client's half of a round inside a train handler of your own.

    ``model``: your network, unconverted. ``batches``: for HBN, whose pass before training measures them. ``objective``: FedProx, SCAFFOLD
    or FedSAM; then call ``round.local.backward(lambda: loss_of(x), x)`` in place of ``loss.backward()``. What the client keeps between
    its rounds is in ``context.state``, or below ``state-dir`` of the node config. In FedTAN's rounds torch's generator is seeded from run,
    client and round (by replay NumPy's and Python's, too), since a round may be computed more than once.

    Raises:
        ValueError: the server's message is for another model or method, or ``batches`` are missing.
    """
    converted = convert(model, method)
    request = _read(message, context, converted, method, TO_TRAIN)
    instruction, store = request.instruction, _store(context, request, converted, method)
    if method.reports(instruction.phase) is StatisticsReport.PASS and batches is None:
        raise ValueError(f"{method.name} measures the training data before training: give training(..., batches=trainloader)")
    kept, joins = request.kept(store), request.connect(ExchangeAddresses.of(context.node_config))
    repeatable = ExitStack()
    if instruction.phase is Phase.EXCHANGE:
        seed = int(np.random.default_rng([context.run_id, _index(context), instruction.round]).integers(2**62))
        repeatable.enter_context(_repeatable(seed, converted, request.config["exchange"] == "replay"))
    try:
        with repeatable, local_round(converted, method, instruction, kept, objective=objective, connect=joins) as local:
            if batches is not None and method.reports(instruction.phase) is StatisticsReport.PASS:
                local.measure(batches, task)
            yield OwnRound(message, request, local, store)
    except Unanswered as pending:
        raise RoundGoesOn(reply_to(message, request.header, question(pending))) from pending


def evaluating(message: Message, context: Context, model: nn.Module, method: Method) -> nn.Module:
    """The network that an evaluate handler of your own tests: converted, with what the server sent and what this client kept."""
    converted = convert(model, method)
    request = _read(message, context, converted, method, TO_EVALUATE)
    LocalRound(converted, method, request.instruction, request.kept(_store(context, request, converted, method)))
    return converted.eval()


def answer(app: ClientApp, model: Callable[[], nn.Module], method: Method, batches: Batches, *, task: Task = CLASSIFICATION) -> None:
    """Let ``app`` answer what the server asks beside training: who it is, and the statistics of its data.

    ``model()`` makes your network, unconverted. ``batches(context)``: the training batches. What these answer passes a ``Gate``. Your own
    handlers do, too, in an app that is made with one: ``ClientApp(mods=[Gate()])``.
    """
    gate = Gate()

    @app.query(HELLO.removeprefix("query."), mods=[gate])
    def hello(message: Message, context: Context) -> Message:
        data, loader = convert(model(), method), batches(context)
        samples = _count(loader, task)
        said: dict[str, int | str] = {
            "client": _index(context),
            "clients": int(_needed(context, "num-partitions")),
            "samples": samples,
            "signature": signature(data, method),
            "label-counts": "[]",
            "version": here(),
        }
        return Message(RecordDict({"hello": ConfigRecord({**said})}), reply_to=message)

    @app.query(STATISTICS.removeprefix("query."), mods=[gate])
    def statistics(message: Message, context: Context) -> Message:
        converted = convert(model(), method)
        request = _read(message, context, converted, method, TO_MEASURE)
        kept, joins = request.kept(_store(context, request, converted, method)), request.connect(ExchangeAddresses.of(context.node_config))
        with local_round(converted, method, request.instruction, kept, connect=joins) as local:
            local.measure(batches(context), task)
        reply, _ = local.reply(local.measured_samples)
        return reply_to(message, request.header, replace(reply, metrics={}))  # its samples are those measured

    @app.query(RENDEZVOUS.removeprefix("query."), mods=[gate])
    def rendezvous(message: Message, context: Context) -> Message:
        connect(ExchangeAddresses.of(context.node_config), TO_MEET.of_configs(message.content), [], 1).close()
        return Message(RecordDict(), reply_to=message)


def _read(message: Message, context: Context, converted: nn.Module, method: Method, form: Form) -> Request:
    """Let ``message`` in, and read what it asks. ``form``: of its config."""
    admit_own(message, context, evaluates=form is TO_EVALUATE)
    if "header" not in message.content:
        raise ValueError(
            "this message is of another strategy: in server_app.py start one of fl_bn.flower's (FixBN, FedBN, HBN, FBN, FedTAN, ...)"
        )
    return read(message, Network(converted, method), form)


def _store(context: Context, request: Request, converted: nn.Module, method: Method) -> StateStore:
    """Return where this client keeps its tensors between rounds."""
    folder = Path(str(context.node_config["state-dir"])) if "state-dir" in context.node_config else None
    return store_of(context.state, folder, request.config, _index(context), signature(converted, method))


def _needed(context: Context, key: str) -> Any:
    if key not in context.node_config:
        raise ValueError(f"this client's node config has no {key!r}: start it with --node-config 'partition-id=0 num-partitions=5'")
    return context.node_config[key]


def _index(context: Context) -> int:
    return int(_needed(context, "partition-id"))


def _count(loader: Iterable[Any], task: Task) -> int:
    data: Any = getattr(loader, "dataset", None)
    return len(data) if hasattr(data, "__len__") else sum(len(task.read(batch)[1]) for batch in loader)
