"""Compute one client's part of a round in fl-bn's application: training, measuring statistics, and evaluation."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from flwr.app import RecordDict
from safetensors.torch import save_file
from torch import Tensor, nn

from fl_bn.bn.derived import plain_names
from fl_bn.data.batches import ClientTooSmall
from fl_bn.exchange.replay import Unanswered
from fl_bn.federation.client import LocalRound
from fl_bn.federation.composition import check_composition
from fl_bn.federation.engines.vectorised import round_of_task
from fl_bn.federation.local import Samples, evaluate
from fl_bn.federation.narrow import Overflow
from fl_bn.federation.network import Network
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.sources import SampleSource
from fl_bn.federation.values import ClientState, Reply
from fl_bn.flower.app.client_state import StateStore, store_of
from fl_bn.flower.handlers import Request, kept_layers
from fl_bn.flower.layerwise.exchange_address import ExchangeAddresses, connect
from fl_bn.flower.layerwise.transcript import question
from fl_bn.flower.log import log
from fl_bn.flower.secagg.instruction_history import to_write
from fl_bn.flower.wire.gate import enough
from fl_bn.flower.wire.messages import TO_SAVE
from fl_bn.methods import INPUTS, Method, StatisticsPass
from fl_bn.task import CLASSIFICATION, Task

T = TypeVar("T")


@dataclass(frozen=True)
class Site:
    """Describe one client: its data and its device.

    Attributes:
        client: the client's index, from 0.
        clients: the number of clients.
        train: the training samples.
        test: the test samples.
        device: the device to compute on.
        folder: the folder for the model that the client saves at the end; None: it saves none.
        label_counts: the number of training samples per label, if the client reports it.
        state: the folder for tensors that the client keeps between rounds. Each run has a subfolder of its name.
            None: the tensors are kept in Flower's ``context.state``, as long as the simulation or the SuperNode runs.
        exchange: the addresses of a layer-wise exchange to which the client may connect.
    """

    client: int
    clients: int
    train: Samples
    test: Samples
    device: torch.device
    folder: Path | None = None
    label_counts: tuple[int, ...] | None = None
    state: Path | None = None
    exchange: ExchangeAddresses = ExchangeAddresses()


class LocalClient:
    """Train, measure and evaluate one model as its method says.

    It takes a ``Request`` and returns a ``Reply``. It knows nothing of Flower's messages or of lists of arrays. The
    arguments are those of ``BatchNormClient``.
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
        shares_drift: bool = False,
        task: Task = CLASSIFICATION,
    ) -> None:
        check_composition(method, settings)
        self.method, self.settings, self.site, self.seed, self.task = method, settings, site, seed, task
        self.network = model if isinstance(model, Network) else Network(model, method, site.device)
        self.signature, self.tells, self.shares_drift = self.network.signature, tells, shares_drift
        self._context_state = state
        self.tells_tests = True  # a training reply may also have metrics on the test data, if the settings ask for them

    @property
    def model(self) -> nn.Module:
        """Return the converted network with its initial tensors. Rounds train a copy. Do not change it."""
        return self.network.original

    def introduce(self) -> dict[str, int | str]:
        """Return the client's introduction, for which the server asks once.

        It has this client's index, the number of all clients, the number of training samples, the signature of model and
        method, and the number of samples per label as JSON.
        """
        return {
            "client": self.site.client,
            "clients": self.site.clients,
            "samples": len(self.site.train),
            "signature": self.signature,
            "label-counts": json.dumps(self.site.label_counts or []),
        }

    def compute(self, request: Request, pack: Callable[[Reply], T]) -> T:
        """Train or measure as ``request`` says, and keep the tensors that stay with this client.

        Args:
            request: the checked content of a message.
            pack: makes the outgoing message from the reply. The client's tensors are stored only if this succeeds. On
                ``Overflow`` (a weight is too large for the dtype in which it is sent), the client sits the round out.

        Returns:
            The result of ``pack``. The reply that ``pack`` gets has 0 samples if the client sits out, or if, in an exchange
                by replay, it asks the server for the next answer.
        """
        instruction, store = request.instruction, self.store(request.config)
        kept, joins = request.kept(store), request.connect(self.site.exchange)
        try:
            with self.network.lend() as lent:
                round = LocalRound(lent, self.method, instruction, kept, self.settings, joins)
                test = self.site.test if self.tells_tests else None
                source = SampleSource(self.site.train, self.seed, self.site.client, self.task, self.shares_drift, test)
                result = round_of_task(round, source)
        except Unanswered as pending:
            return pack(question(pending, self.site.client))
        except ClientTooSmall as reason:
            if joins is not None:
                joins(0).close()
            return pack(self._sits_out(instruction.round, reason))
        reply, keeps = result
        try:
            packed = pack(reply)
        except Overflow as reason:
            return pack(self._sits_out(instruction.round, reason))
        if request.trains and (sections := to_write(keeps, kept, instruction.round)) is not None:
            store.write(instruction.round, sections)
        return packed

    def _sits_out(self, round: int, reason: Exception) -> Reply:
        log(logging.WARNING, "client %s sits round %s out: %s", self.site.client, round, reason)
        return Reply(self.site.client, {}, 0, 0)

    def test(self, request: Request) -> dict[str, float]:
        """Return the loss and other metrics on this client's test data. The model includes the tensors that this client keeps.

        Save the model, too, if the request names a folder for it, and the site has a folder (``Site.folder``).
        """
        with self._own_model(request) as model:
            metrics = evaluate(model, self.site.test, task=self.task).result()
            self._save(model, str(request.config["save"]))
        return metrics

    def evaluation(self, request: Request, least: int = 0) -> Reply:
        """Return the metrics of ``test`` as a reply.

        Args:
            request: the checked content of an evaluate message.
            least: the smallest number of samples behind a metric. Metrics of fewer samples are withheld.
        """
        metrics, samples = self.test(request), len(self.site.test)
        loss = metrics.pop("loss")
        metrics, fewest = enough(metrics, samples, self.task.samples_behind(self.site.test.y), least)
        return Reply(self.site.client, {}, samples, samples, {"loss": loss, "fewest": fewest, **metrics})

    def save(self, request: Request) -> None:
        """Save the model that ``test`` would evaluate. The request names the folder, which lies below the site's folder.

        If the site has no folder (``Site.folder``), nothing is saved.
        """
        with self._own_model(request) as model:
            self._save(model, str(request.config["save"]))

    @contextmanager
    def _own_model(self, request: Request) -> Iterator[nn.Module]:
        """Yield the network with the server's tensors and this client's own."""
        kept = request.kept(self.store(request.config))
        with self.network.lend() as lent:
            yield LocalRound(lent, self.method, request.instruction, kept).model

    def _save(self, model: nn.Module, name: str) -> None:
        if not name or self.site.folder is None:
            return
        TO_SAVE.read({"save": name})  # check that ``name`` is a plain folder name, which cannot lead out of this client's folder
        path = self.site.folder / name / "clients" / f"client-{self.site.client}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        names = plain_names(model)
        save_file({names[k]: t.contiguous().cpu().clone() for k, t in model.state_dict().items()}, path)

    def kept_layers(self, config: Mapping[str, Any], round: int) -> dict[str, Tensor]:
        """Return the scales, shifts and statistics that this client keeps, as they are after ``round``.

        The server averages these tensors over the clients. A new client, which has not trained, gets this average.

        Args:
            config: the config of the server's message, which names the run.
            round: the round's number, from 1.

        Returns:
            Name -> tensor, by the names of the state_dict.

        Raises:
            PermissionError: this client does not share them.
        """
        if not self.tells:
            raise PermissionError("this client does not share the layers that it keeps: unseen-client is off in its run config")
        return kept_layers(self.kept(config, round + 1), self.network)

    def requested_pass(self, config: Mapping[str, Any]) -> StatisticsPass:
        """Return the statistics pass that the ``config`` of a statistics-only exchange requests."""
        return StatisticsPass.for_exchange(str(config.get("measured", INPUTS)), self.method.statistics_pass.samples)

    def meet(self, config: Mapping[str, Any]) -> None:
        """Join the layer-wise exchange that ``config`` names, and leave it again.

        By this the server tests whether all clients of a cohort can take part at the same time.
        """
        connect(self.site.exchange, config, [], 1).close()

    def kept(self, config: Mapping[str, Any], before: int) -> ClientState:
        """Return this client's state from the rounds before ``before``, of the run that ``config`` names."""
        return self.store(config).read(before)

    def store(self, config: Mapping[str, Any]) -> StateStore:
        """Return the store in which this client keeps its own tensors between the rounds of the run that ``config`` names."""
        return store_of(self._context_state, self.site.state, config, self.site.client, self.signature)
