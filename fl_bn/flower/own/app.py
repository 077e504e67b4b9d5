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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fl_bn.conversion import convert
from fl_bn.exchange.replay import Unanswered
from fl_bn.federation import schema
from fl_bn.federation.client import Connect, LocalRound
from fl_bn.federation.local import torch_seed
from fl_bn.federation.narrow import PayloadDtype
from fl_bn.federation.own_loop import local_round
from fl_bn.federation.payload import signature, to_numpy, to_tensors
from fl_bn.federation.values import Instruction
from fl_bn.flower.app.client_app import HELLO, RENDEZVOUS, STATISTICS
from fl_bn.flower.layerwise.exchange_address import ExchangeAddresses
from fl_bn.flower.layerwise.transcript import detach, request_payload
from fl_bn.flower.numpy_client import connect, state_of
from fl_bn.flower.wire.codec import Header, check_header, from_records, to_records
from fl_bn.flower.wire.gate import Gate, admit_own
from fl_bn.flower.wire.messages import TO_EVALUATE, TO_MEASURE, TO_MEET, TO_TRAIN
from fl_bn.flower.wire.versions import here
from fl_bn.methods import INPUTS, Method, Phase, Report
from fl_bn.objectives import PLAIN, Objective
from fl_bn.roles import inputs_like
from fl_bn.task import CLASSIFICATION, Task

Batches = Callable[[Context], Iterable[Any]]
"""The training batches of the client whose Flower context it is: a DataLoader, say."""


class OwnRound:
    """What ``training`` yields. ``model`` is what the loop trains; ``message`` makes the reply, after the block."""

    def __init__(self, message: Message, local: LocalRound | None, keep: Callable[[LocalRound, Any], None]) -> None:
        self._message, self._local, self._keep = message, local, keep

    @property
    def local(self) -> LocalRound:
        """The client's half of the round in plain torch: ``backward``, ``measure``, ``steps``."""
        assert self._local is not None
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
        payload, header = from_records(self._message.content)
        reply, kept = self.local.reply(samples, float(loss))
        rounding = PayloadDtype.of(header.payload, self.local.model)
        content = to_records(rounding.narrow({section: to_numpy(tensors) for section, tensors in reply.sections.items()}), header)
        whole = {"steps", "batch", "measured", "kept"}
        metrics: dict[str, Any] = {key: int(value) if key in whole else value for key, value in reply.metrics.items()}
        content["metrics"] = MetricRecord({"samples": reply.samples, **metrics})
        self._keep(self.local, kept)
        return Message(content, reply_to=self._message)


class RoundGoesOn(Exception):
    """FedTAN's exchange by replay needs an answer of the server's before the round can go on; ``replayed`` sends the question."""

    def __init__(self, question: RecordDict) -> None:
        self.question = question
        super().__init__("the exchange goes by replay: write @app.train(mods=[fl_bn.flower.replayed]) in client_app.py")


def replayed(message: Message, context: Context, handler: Callable[[Message, Context], Message]) -> Message:
    """A Flower mod for a train handler whose rounds may come to it in several messages: ``@app.train(mods=[replayed])``.

    FedTAN needs it where a cohort is larger than what can run at once (``ExchangeSettings``, carrier ``replay``).
    """
    try:
        return handler(message, context)
    except RoundGoesOn as pending:
        return Message(pending.question, reply_to=message)


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
    asked, values = _read(message, context, converted, method, TO_TRAIN)
    state = state_of(context.state, _folder(context), values, _index(context), signature(converted, method))
    kept = state.read(before=asked.round)
    kept = replace(kept, counted=int(values.get("counted", kept.round)) >= kept.round)
    transcript = detach(from_records(message.content)[0], values) if asked.phase is Phase.EXCHANGE else []
    addresses = ExchangeAddresses.of(context.node_config)
    joins: Connect | None = partial(connect, addresses, values, transcript) if asked.phase is Phase.EXCHANGE else None
    if method.reports(asked.phase) is Report.PASS and batches is None:
        raise ValueError(f"{method.name} measures the training data before training: give training(..., batches=trainloader)")

    def keep(local: LocalRound, kept: Any) -> None:
        if kept.sections and kept.round == asked.round:  # else the state before stays
            state.write(asked.round, kept.sections)

    own, repeatable = OwnRound(message, None, keep), ExitStack()
    if asked.phase is Phase.EXCHANGE:
        seed = int(np.random.default_rng([context.run_id, _index(context), asked.round]).integers(2**62))
        repeatable.enter_context(_repeatable(seed, converted, values["exchange"] == "replay"))
    try:
        with repeatable, local_round(converted, method, asked, kept, objective=objective, connect=joins) as local:
            own._local = local
            if batches is not None and method.reports(asked.phase) is Report.PASS:
                local.measure(batches, task)
            yield own
    except Unanswered as pending:
        _, header = from_records(message.content)
        content = to_records(request_payload(pending.request), header)
        content["metrics"] = MetricRecord({"samples": 0, "batch": pending.batch, "count": pending.request.count})
        raise RoundGoesOn(content) from pending


def evaluating(message: Message, context: Context, model: nn.Module, method: Method) -> nn.Module:
    """The network that an evaluate handler of your own tests: converted, with what the server sent and what this client kept."""
    converted = convert(model, method)
    asked, values = _read(message, context, converted, method, TO_EVALUATE)
    state = state_of(context.state, _folder(context), values, _index(context), signature(converted, method))
    LocalRound(converted, method, replace(asked, phase=Phase.MEASURE), state.read(before=asked.round + 1))
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
        converted, (_, header) = convert(model(), method), from_records(message.content)
        asked, values = _read(message, context, converted, method, TO_MEASURE)
        state = state_of(context.state, _folder(context), values, _index(context), signature(converted, method))
        addresses = ExchangeAddresses.of(context.node_config)
        joins: Connect | None = partial(connect, addresses, values, []) if values.get("exchange") else None
        with local_round(converted, method, asked, state.read(before=asked.round + 1), connect=joins) as local:
            local.measure(batches(context), task)
        reply, _ = local.reply(local.measured_samples)
        content = to_records({section: to_numpy(tensors) for section, tensors in reply.sections.items()}, header)
        content["metrics"] = MetricRecord({"samples": reply.samples})
        return Message(content, reply_to=message)

    @app.query(RENDEZVOUS.removeprefix("query."), mods=[gate])
    def rendezvous(message: Message, context: Context) -> Message:
        connect(ExchangeAddresses.of(context.node_config), TO_MEET.of_configs(message.content), [], 1).close()
        return Message(RecordDict(), reply_to=message)


def _read(message: Message, context: Context, converted: nn.Module, method: Method, form: Any) -> tuple[Instruction, Any]:
    """The instruction in a message, and the checked values of its config."""
    admit_own(message, context, evaluates=form is TO_EVALUATE)
    if "header" not in message.content:
        raise ValueError(
            "this message is of another strategy: in server_app.py start one of fl_bn.flower's (FixBN, FedBN, HBN, FBN, FedTAN, ...)"
        )
    payload, header = from_records(message.content)
    values = form.of_configs(message.content)
    phase = Phase(header.phase)
    if phase is Phase.EXCHANGE:
        payload.pop("transcript", None)
    expected = Header(method.name, header.phase, header.round, signature(converted, method), payload=header.payload)
    check_header(expected, header, schema.instruction(converted, method), payload)
    payload = PayloadDtype.of(header.payload, converted).widen(payload)
    sections = {section: to_tensors(arrays) for section, arrays in payload.items()}
    if phase is Phase.MEASURE:
        memory = int(values.get("exchange-memory", 0)) if form is TO_MEASURE else 0
        return Instruction(header.round, phase, sections, measured=str(values.get("measured", INPUTS)), memory=memory), values
    rate, share = (float(values["learning-rate"]), float(values["rate-share"])) if form is TO_TRAIN else (0.0, 1.0)
    return Instruction(header.round, phase, sections, rate, rate_share=share), values


def _needed(context: Context, key: str) -> Any:
    if key not in context.node_config:
        raise ValueError(f"this client's node config has no {key!r}: start it with --node-config 'partition-id=0 num-partitions=5'")
    return context.node_config[key]


def _index(context: Context) -> int:
    return int(_needed(context, "partition-id"))


def _folder(context: Context) -> Path | None:
    return Path(str(context.node_config["state-dir"])) if "state-dir" in context.node_config else None


def _count(loader: Iterable[Any], task: Task) -> int:
    data: Any = getattr(loader, "dataset", None)
    return len(data) if hasattr(data, "__len__") else sum(len(task.read(batch)[1]) for batch in loader)
