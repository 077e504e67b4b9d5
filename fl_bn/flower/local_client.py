"""Compute a client's part of a round in fl-bn's application, and answer messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fl_bn.bn.derived import plain_names
from fl_bn.data.batches import ClientTooSmall
from fl_bn.federation.client import LocalRound
from fl_bn.federation.client_round import client_round
from fl_bn.federation.composition import check_composition
from fl_bn.federation.local import Samples, evaluate
from fl_bn.federation.network import Network
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.training import TRAINER, SampleLoop
from fl_bn.federation.values import ClientState, Reply, Sections
from fl_bn.flower.compat import log
from fl_bn.flower.handlers import QUERIES, Answer, Participant, Request, read, register, reply_to
from fl_bn.flower.layerwise.transcript import Unanswered, question
from fl_bn.flower.wire.gate import Gate, Limits, enough
from fl_bn.flower.wire.messages import RECORD_KEY_CONFIGS, SAVE, TO_EVALUATE, TO_SAVE
from fl_bn.methods import Method
from fl_bn.support.durable import save_network
from fl_bn.task import CLASSIFICATION, Task

T = TypeVar("T")
network_of = lru_cache(maxsize=1)(Network)
"""Share a network and its lent copies between clients that get the same model."""


@dataclass(frozen=True)
class Site:
    """Describe one client: its data and its device.

    Attributes:
        client: the client's index, from 0, of ``clients``.
        folder: the folder in which the client saves its model at the end; None: it
            saves none.
        label_counts: the number of training samples per label, if reported.
        state: the folder for tensors that the client keeps between rounds. None:
            they are in Flower's ``context.state``, as long as the simulation or the
            SuperNode runs.
        node_config: lists the addresses of layer-wise exchanges to which the client
            may connect.
    """

    client: int
    clients: int
    train: Samples
    test: Samples
    device: torch.device
    folder: Path | None = None
    label_counts: tuple[int, ...] | None = None
    state: Path | None = None
    node_config: Mapping[str, Any] = field(default_factory=dict)


class BatchNormClient(Participant):
    """Train, measure and evaluate one model as its method says.

    ``make_client_app`` calls ``compute``, ``evaluation`` and ``save``. Override
    ``compute`` to change the training. Random numbers depend only on ``seed``, the
    client and the round.

    Args:
        model: the converted network with its initial tensors, which never change.
            Clients of one process may share a ``Network``.
        method: the run's method.
        settings: the settings of local training.
        site: the client's data and device.
        state: Flower's ``context.state``.
        seed: the run's seed.
        tells: whether the client sends the layers that it keeps, for unseen
            clients.
        task: the model's task.
    """

    def __init__(
        self,
        model: nn.Module | Network,
        method: Method,
        settings: LocalTraining,
        site: Site,
        state: RecordDict,
        seed: int = 0,
        tells: bool = False,
        task: Task = CLASSIFICATION,
    ) -> None:
        network = model if isinstance(model, Network) else network_of(model, method, site.device)
        counts = site.label_counts or ()
        super().__init__(network, site.client, site.clients, lambda: len(site.train), state, site.state, site.node_config, tells, counts)
        self.method, self.settings, self.site, self.seed, self.task = method, settings, site, seed, task
        self.stores = own_sections  # chooses what the client stores after a round

    def introduce(self) -> dict[str, int | str]:
        """Return the client's introduction. ``ValueError``: method and settings do not fit."""
        check_composition(self.method, self.settings)
        return super().introduce()

    @property
    def model(self) -> nn.Module:
        """Return the converted network with its initial tensors, which rounds copy."""
        return self.network.original

    def compute(self, request: Request, pack: Callable[[Reply], T]) -> T:
        """Train or measure as ``request`` says, and keep the tensors that stay with this client.

        They are stored only if ``pack`` makes a message of the reply. The reply has
        0 samples if the client sits out or, in an exchange by replay, asks for the
        next answer.
        """
        instruction, store = request.instruction, self.store(request.config)
        kept, joins = request.kept(store), request.connect(self.node_config)
        try:
            with self.network.lend() as lent:
                loop = SampleLoop(self.site.train, self.seed, self.site.client, self.task)
                reply, keeps = client_round(lent, self.method, instruction, kept, partial(TRAINER.get(), loop), self.settings, joins)
        except Unanswered as pending:
            return pack(question(pending, self.site.client))
        except ClientTooSmall as reason:
            if joins is not None:
                joins(0).close()
            log(logging.WARNING, "client %s sits round %s out: %s", self.site.client, instruction.round, reason)
            return pack(Reply(self.site.client, {}, 0, 0))
        packed = pack(reply)
        if instruction.trains and (sections := self.stores(keeps, kept, instruction.round)):
            store.write(instruction.round, sections)
        return packed

    def test(self, request: Request) -> dict[str, float]:
        """Return the metrics on this client's test data, with the tensors that it keeps."""
        with self._own_model(request) as model:
            return evaluate(model, self.site.test, task=self.task).result()

    def evaluation(self, request: Request, least: int = 0) -> Reply:
        """Return the metrics of ``test`` as a reply; ``least`` as in ``enough``."""
        metrics, samples = self.test(request), len(self.site.test)
        loss = metrics.pop("loss")
        metrics, fewest = enough(metrics, samples, self.task.samples_behind(self.site.test.y), least)
        return Reply(self.site.client, {}, samples, samples, {"loss": loss, "fewest": fewest, **metrics})

    def save(self, request: Request) -> None:
        """Save the model that ``test`` would evaluate, in a folder below ``Site.folder``."""
        if self.site.folder is None:
            return
        path = self.site.folder / str(request.config["save"]) / "clients" / f"client-{self.site.client}.safetensors"
        with self._own_model(request) as model:
            names = plain_names(model)
            save_network(path, {names[k]: t for k, t in model.state_dict().items()})

    @contextmanager
    def _own_model(self, request: Request) -> Iterator[nn.Module]:
        kept = request.kept(self.store(request.config))
        with self.network.lend() as lent:
            yield LocalRound(lent, self.method, request.instruction, kept).model


def own_sections(keeps: ClientState, before: ClientState, round: int) -> Sections:
    """Return the sections of ``keeps`` that a client stores after ``round``, if any are new."""
    return dict(keeps.sections) if keeps.round == round else {}


def make_client_app(build: Callable[[Context], BatchNormClient]) -> ClientApp:
    """Make a ClientApp that answers the server's messages. Its ``Gate`` checks each message and reply.

    ``build`` makes the client from Flower's context of a message.
    """
    app = ClientApp(mods=[Gate()])
    own: dict[str, Answer] = {"train": _work, "query.statistics": _work, "evaluate": _evaluate, SAVE: _save}
    register(app, build, QUERIES | own)
    return app


def _work(build: Callable[[Context], BatchNormClient], message: Message, context: Context) -> Message:
    if RECORD_KEY_CONFIGS in message.content:  # only train messages have it; the gate refuses it in others
        from fl_bn.flower.secagg.client import secure  # imported here, since a run without secure aggregation does not need it

        return secure(build, message, context)
    client = build(context)
    request = read(message, client.network)
    return client.compute(request, partial(reply_to, message, request.header))


def _evaluate(build: Callable[[Context], BatchNormClient], message: Message, context: Context) -> Message:
    client = build(context)
    request = read(message, client.network, TO_EVALUATE)
    return reply_to(message, request.header, client.evaluation(request, Limits.of(context).min_samples))


def _save(build: Callable[[Context], BatchNormClient], message: Message, context: Context) -> Message:
    client = build(context)
    client.save(read(message, client.network, TO_SAVE))
    return Message(RecordDict(), reply_to=message)
