"""Put the client's half of a round around your own handlers and training loop, in a Flower app of your own."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from flwr.app import Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.utils.data import default_collate

from fl_bn.bn.conversion import convert
from fl_bn.bn.roles import inputs_like
from fl_bn.federation.checkpoint import generators, set_generators
from fl_bn.federation.client import LocalRound
from fl_bn.federation.loaders import check_not_one_batch
from fl_bn.federation.local import torch_seed
from fl_bn.federation.network import Network
from fl_bn.federation.own_loop import local_round
from fl_bn.federation.values import ClientState
from fl_bn.flower.handlers import QUERIES, Participant, Request, StateStore, read, register, reply_to
from fl_bn.flower.layerwise.transcript import Unanswered, question
from fl_bn.flower.own_metrics import EXAMPLES, is_number
from fl_bn.flower.wire.gate import OWN_METRICS, Gate, admit_own
from fl_bn.flower.wire.messages import STATISTICS, TO_EVALUATE, TO_MEASURE, TO_TRAIN
from fl_bn.methods import Method, Phase, StatisticsReport
from fl_bn.objectives import PLAIN, Objective
from fl_bn.support.names import short
from fl_bn.task import CLASSIFICATION, Task, batch_size

P = TypeVar("P", bound=Participant)
Batches = Callable[[Context], Iterable[Any]]
"""Returns a client's training batches, such as a DataLoader."""
Models = Callable[[Context], nn.Module]
"""Returns a client's unconverted network."""


class OwnRound:
    """Compute one round at one client. ``training`` yields this object.

    Your loop trains its ``model``. After the ``with`` block, ``message`` makes the
    reply.

    Attributes:
        model: the network to train, in training mode, converted for the method. Its
            tensors come from the server or, if they stay at this client, from its
            last round.
        number: the number of the round, from 1.
        learning_rate: the strategy's ``rate``, or the one that ``train_config``
            names.
        rate_share: the factor, in (0, 1], for your learning rate in this round,
            below 1 where the statistics are frozen. The message's ``lr``,
            ``learning_rate`` and ``learning-rate`` include it already. Multiply any
            other rate by it.
        batch: sets the number of samples of the first batch: ``round.batch(32)``.
        step_done: records a step without a torch optimiser: ``round.step_done()``.
        backward: computes the gradients of an objective, and returns the loss
            alone: ``round.backward(lambda: loss_of(x), x)`` replaces
            ``loss.backward()``. A third argument calls a network on inputs, as
            ``Task.forward`` does.
        instruction: the server's instruction.
        local: the client's half of the round without Flower.
    """

    def __init__(self, message: Message, request: Request, local: LocalRound, store: StateStore) -> None:
        self._message, self._request, self._store = message, request, store
        self._open, self._kept = True, ClientState()
        self.local, self.instruction, self.model = local, local.instruction, local.model
        self.batch, self.step_done, self.backward = local.batch, local.step_done, local.backward
        self.number, self.learning_rate = local.instruction.round, local.instruction.learning_rate
        self.rate_share = local.instruction.rate_share

    @property
    def steps(self) -> int:
        """Return the number of local steps so far."""
        return self.local.steps

    def message(
        self, samples: int, loss: float | None = None, metrics: Mapping[str, float] | MetricRecord = MappingProxyType({})
    ) -> Message:
        """Return the reply to the server's message, and store the tensors that stay at this client.

        The reply's record ``metrics`` is yours. It has ``num-examples``, ``loss``
        and your own metrics. You may add to it, or add records whose names do not
        begin with ``fl-bn/``.

        Args:
            samples: the number of different samples that the round trained on: the
                client's weight in the average of the model. 0: the client takes no
                part.
            loss: the mean training loss. Default: ``metrics["loss"]``, if any.
            metrics: your own training metrics by name, which the strategy combines:
                ``{"train_acc": 0.9}``.
        """
        own: Any = numbers(metrics)
        loss = own.get("loss") if loss is None and is_number(own.get("loss")) else loss
        told = {} if loss is None else {"loss": float(loss)}
        if samples == 0 and not self.steps:
            reply, kept = self.local.sit_out(0, {})
        else:
            reply, kept = self.local.reply(samples, told.get("loss", math.nan))
        answer = reply_to(self._message, self._request.header, reply)
        answer.content[OWN_METRICS] = MetricRecord({EXAMPLES: reply.samples, **told, **own})
        if kept.sections and kept.round == reply.round:  # otherwise the store keeps the earlier state
            self._kept = kept
        if not self._open:
            self.store()
        return answer

    def store(self) -> None:
        """Store the tensors that stay at this client, once the block of ``training`` succeeds."""
        self._open = False
        if self._kept.sections:
            self._store.write(self._kept.round, self._kept.sections)


def numbers(metrics: Mapping[str, Any], kind: Callable[[], Any] = MetricRecord) -> Any:
    """Return a user's metrics as Flower's record of a ``kind``. ``ValueError``: it cannot hold one of them."""
    record = kind()
    for name, value in metrics.items():
        one = value.item() if isinstance(value, np.generic | np.ndarray | Tensor) and math.prod(value.shape) == 1 else value
        try:
            record[name] = one
        except (TypeError, ValueError):
            raise ValueError(f"metric {short(name)}: expected a number, or a list of numbers of one type, but got {short(value)}") from None
    return record


class RoundGoesOn(Exception):
    """Report that an exchange by replay needs one more answer, for which ``question`` asks."""

    def __init__(self, question: Message) -> None:
        self.question = question
        super().__init__("FedTAN's exchange needs several messages for a round: write @app.train(mods=[fl_bn.flower.replayed])")


def replayed(message: Message, context: Context, handler: Callable[[Message, Context], Message]) -> Message:
    """Let ``handler`` use several messages for one round: ``@app.train(mods=[replayed])``.

    If the round needs an answer of the server first, this Flower mod replies with
    the client's question. FedTAN needs it if a cohort's clients cannot all run at
    the same time (carrier ``replay`` of ``ExchangeSettings``). ``handler`` is your
    train handler, which uses ``training``.
    """
    try:
        return handler(message, context)
    except RoundGoesOn as pending:
        return pending.question


@contextmanager
def _repeatable(seed: int, model: nn.Module, everything: bool) -> Iterator[None]:
    """Seed torch, with ``everything`` Python and NumPy, for the draws of a repeated round."""
    before = generators()
    with torch_seed(seed, inputs_like(model).device):
        if everything:
            random.seed(seed)
            np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            if everything:
                set_generators(before)


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
    """Run the client's half of a round around your own training loop, inside a train handler.

    FedTAN may compute a round more than once, so torch's generator is seeded from
    run, client and round; with the carrier ``replay``, NumPy's and Python's are,
    too. The client's tensors stay in ``context.state`` between rounds, or below
    ``state-dir`` of the node config.

    Args:
        message: the server's message.
        context: Flower's context of the client.
        model: your network, unconverted.
        method: the method, the same as the server's.
        batches: the training batches. HBN (unless ``separate=False``) and FBN with
            ``report="pass"`` measure them before training. Other methods do not use
            them.
        task: splits a batch into inputs and targets for that measurement.
        objective: ``PLAIN``, or FedProx, SCAFFOLD, FedSAM or MOON. With one of
            these four, call ``round.backward(lambda: loss_of(x), x)`` in place of
            ``loss.backward()``.

    Yields:
        The round: train its ``model``, then return its ``message(samples, loss)``.

    Raises:
        ValueError: the message is for another model or method, this site forbids an
            answer (``Refused``), or ``batches`` that the method needs are missing
            or iterable only once.
        RoundGoesOn: the round needs one more answer from the server, see
            ``replayed``.
    """
    admit_own(message, context, evaluates=False)
    client = _client(context, model, method, Participant)
    converted, request = client.network.original, read(message, client.network, TO_TRAIN)
    instruction, store = request.instruction, client.store(request.config)
    if method.reports(instruction.phase) is StatisticsReport.PASS and batches is None:
        raise ValueError(f"{method.name} measures the training data before training: call training(..., batches=trainloader)")
    kept, joins = request.kept(store), request.connect(client.node_config)
    repeatable = ExitStack()
    if instruction.phase is Phase.EXCHANGE:
        seed = int(np.random.default_rng([context.run_id, client.client, instruction.round]).integers(2**62))
        repeatable.enter_context(_repeatable(seed, converted, request.config["exchange"] == "replay"))
    try:
        with repeatable, local_round(converted, method, instruction, kept, objective=objective, connect=joins) as local:
            if batches is not None and method.reports(instruction.phase) is StatisticsReport.PASS:
                local.measure(batches, task)
            own = OwnRound(message, request, local, store)
            yield own
        own.store()
    except Unanswered as pending:
        raise RoundGoesOn(reply_to(message, request.header, question(pending))) from pending
    except ValueError as error:
        if notes := getattr(error, "__notes__", None):  # the server gets the error's text alone
            raise ValueError(f"{error} ({'; '.join(notes)})") from error
        raise


def evaluating(message: Message, context: Context, model: nn.Module, method: Method) -> nn.Module:
    """Return the network to test in an evaluate handler of your own, in evaluation mode.

    Its tensors come from the server or, if they stay at this client, from its last
    round. ``ValueError`` is raised for a message of another model or method, or if
    this site forbids an answer.
    """
    admit_own(message, context, evaluates=True)
    client = _client(context, model, method, Participant)
    request = read(message, client.network, TO_EVALUATE)
    return LocalRound(client.network.original, method, request.instruction, request.kept(client.store(request.config))).model.eval()


def answer(
    app: ClientApp,
    model: Callable[[], nn.Module],
    method: Method,
    batches: Batches,
    *,
    task: Task = CLASSIFICATION,
    tells: bool = False,
) -> None:
    """Register handlers with ``app`` for the server's queries, such as who the client is.

    Your own handlers answer train and evaluate messages. A ``Gate`` checks messages
    and replies of these handlers, and of all if you make the app as
    ``ClientApp(mods=[Gate()])``.

    Args:
        app: your ClientApp.
        model: makes your network, unconverted.
        method: the method, the same as the server's.
        batches: returns the training batches of the client with a given context.
        task: splits a batch into inputs and targets.
        tells: whether the client sends the BatchNorm layers that it keeps (FedBN,
            SiloBN), which summarise its data, for the average that the server's
            ``evaluate_fn`` gets.
    """
    answers(app, lambda context: model(), method, batches, task=task, tells=tells)


def answers(app: ClientApp, model: Models, method: Method, batches: Batches, *, task: Task, tells: bool) -> None:
    """Do the same as ``answer``, for a network that depends on the client's context."""
    register(app, partial(_participant, model, method, batches, task, tells), {**QUERIES, STATISTICS: _measure}, [Gate()])


class _Measuring(Participant):
    batches: Iterable[Any]
    task: Task


def _participant(model: Models, method: Method, batches: Batches, task: Task, tells: bool, context: Context) -> _Measuring:
    loader = batches(context)
    client = _client(context, model(context), method, _Measuring)
    client.batches, client.task, client.tells, client.samples = loader, task, tells, partial(samples_in, loader, task)
    return client


def _measure(build: Callable[[Context], _Measuring], message: Message, context: Context) -> Message:
    admit_own(message, context, evaluates=False)
    client = build(context)
    request = read(message, client.network, TO_MEASURE)
    kept, joins = request.kept(client.store(request.config)), request.connect(client.node_config)
    with local_round(client.network.original, client.network.method, request.instruction, kept, connect=joins) as local:
        local.measure(client.batches, client.task)
    reply, _ = local.reply(local.statistics_pass.samples)
    return reply_to(message, request.header, replace(reply, metrics={}))  # its number of samples is that of the measured samples


def _client(context: Context, model: nn.Module, method: Method, kind: type[P]) -> P:
    node = context.node_config
    if missing := {"partition-id", "num-partitions"} - {*node}:
        raise ValueError(f"this client's node config has no {min(missing)!r}: --node-config 'partition-id=0 num-partitions=5' gives both")
    network, folder = Network(convert(model, method), method), Path(str(node["state-dir"])) if "state-dir" in node else None
    return kind(network, int(node["partition-id"]), int(node["num-partitions"]), lambda: 0, context.state, folder, node)


MOST_BATCHES = 1_000_000
"""The most batches that are counted of a loader without a length."""


def samples_in(loader: Iterable[Any], task: Task) -> int:
    """Return the number of samples that a client may train on or measure in a pass over its loader.

    A user's collate function may make several samples of one, so a first batch is
    made. A loader of single samples, or a single batch, raises ``ValueError``.
    """
    check_not_one_batch("batches(context)", loader, task)
    data: Any = getattr(loader, "dataset", None)
    if not hasattr(data, "__len__"):
        return sum(int(batch_size(*task.read(batch))) for batch in islice(loader, MOST_BATCHES))
    sampler: Any = getattr(loader, "sampler", None)
    drawn: int = max(len(data), len(sampler) if hasattr(sampler, "__len__") else 0)
    size, collate = getattr(loader, "batch_size", None), getattr(loader, "collate_fn", default_collate)
    if not size or not drawn or collate is default_collate:
        return drawn
    before = generators()  # the random numbers of the first round's batches must not change
    try:
        made = int(batch_size(*task.read(next(iter(loader)))))
    except Exception:  # whatever the user's dataset or function raises, or a batch that only the user's own loop can read
        return drawn
    finally:
        set_generators(before)
    return drawn * max(1, -(-made // min(int(size), drawn)))
