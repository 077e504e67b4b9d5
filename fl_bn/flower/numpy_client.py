"""The client: one ``NumPyClient`` for every method."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from flwr.client import NumPyClient
from safetensors.torch import save_file
from torch import nn

from fl_bn.data.batches import ClientTooSmall
from fl_bn.derived import plain_names
from fl_bn.exchange.call import Exchange
from fl_bn.exchange.local import LocalExchange
from fl_bn.exchange.replay import ReplayExchange, Unanswered
from fl_bn.federation import schema
from fl_bn.federation.client import LocalRound
from fl_bn.federation.composition import check_composition
from fl_bn.federation.engines.rendezvous import cohort_round
from fl_bn.federation.local import Samples, evaluate
from fl_bn.federation.narrow import AS_THE_MODEL, Overflow, PayloadDtype
from fl_bn.federation.network import Network
from fl_bn.federation.payload import Payload, to_numpy, to_tensors
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.sources import SampleSource
from fl_bn.federation.values import ClientState, Instruction
from fl_bn.flower.app.client_state import FileState, MemoryState, StateStore
from fl_bn.flower.layerwise.exchange_address import ExchangeAddresses, SiteExchange
from fl_bn.flower.layerwise.transcript import Transcript, detach, request_payload
from fl_bn.flower.log import log
from fl_bn.flower.secagg.told import to_write
from fl_bn.flower.wire.codec import Header, check_header, flatten, header_from, unflatten
from fl_bn.flower.wire.messages import TO_SAVE
from fl_bn.flower.wire.run_id import RunId
from fl_bn.methods import INPUTS, Method, Phase, StatisticsPass
from fl_bn.support.wire import WireError
from fl_bn.task import CLASSIFICATION, Task

COUNTS = ("steps", "batch", "measured", "kept", "drift-layer")  # metrics that are whole numbers
WHOLE: dict[str, Callable[[float], float]] = dict.fromkeys(COUNTS, int)

GRPC_FIELDS = ("exchange-token", "exchange-address", "exchange-authority", "exchange-timeout", "exchange-patience")


@dataclass(frozen=True)
class Site:
    """What one client has: its index among ``clients``, its data, its device.

    ``folder``: for the model that it saves at the end. ``state``: for what it keeps between rounds, below a folder of the run's name;
    without one that is in Flower's ``context.state``, as long as the simulation or the SuperNode lives. ``exchange``: the addresses of a
    layer-wise exchange that it connects to.
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


class BatchNormClient(NumPyClient):
    """Trains, measures and evaluates one model as its method says.

    ``model`` is converted already and pristine; it is copied, never changed. Clients of one process may share a ``Network``, and train one
    copy by turns. ``state`` is Flower's ``context.state``. All that is drawn at random depends on ``seed``, the client and the round alone.
    ``tells``: its ``get_parameters`` answers. ``shares_drift``: where statistics stay at home, it tells how far they moved in a round; one
    of these numbers is an element of its own statistics.
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

    @property
    def model(self) -> nn.Module:
        """The pristine network. Do not change it."""
        return self.network.original

    def get_properties(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Who this client is, asked once when the server first sees it."""
        return {
            "client": self.site.client,
            "clients": self.site.clients,
            "samples": len(self.site.train),
            "signature": self.signature,
            "label-counts": json.dumps(self.site.label_counts or []),
        }

    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        """One round of this client.

        ``config``: the header's fields, ``layout`` of ``parameters`` (see ``codec.flatten``) and ``learning-rate``. Returns the arrays
        of the reply, the number of different samples trained on, and metrics with the reply's ``layout``.
        """
        phase, number = Phase(config["phase"]), int(config["round"])
        rounding = PayloadDtype.of(config.get("payload", AS_THE_MODEL), self.model)
        payload, state, joins = rounding.widen(unflatten(parameters, config["layout"])), self._state(config), None
        kept = state.read(before=number + (phase is Phase.MEASURE))
        if phase is Phase.EXCHANGE:
            joins = partial(connect, self.site.exchange, config, detach(payload, config))
        if phase is Phase.MEASURE:
            joins = partial(connect, self.site.exchange, config, []) if config.get("exchange") else None
            memory = int(config.get("exchange-memory", 0))
            asked = self._instruction(phase, payload, config, measured=str(config.get("measured", INPUTS)), memory=memory)
        else:
            kept = replace(kept, counted=int(config.get("counted", kept.round)) >= kept.round)
            rates = {"learning_rate": float(config["learning-rate"]), "rate_share": float(config.get("rate-share", 1.0))}
            asked = self._instruction(phase, payload, config, **rates)
        try:
            with self.network.lend() as lent:
                round = LocalRound(lent, self.method, asked, kept, self.settings, joins)
                source = SampleSource(self.site.train, self.seed, self.site.client, self.task, self.shares_drift)
                reply, keeps = cohort_round(round, source)
        except Unanswered as pending:
            arrays, layout = flatten(request_payload(pending.request))
            return arrays, 0, {"layout": layout, "batch": pending.batch, "count": pending.request.count}
        except ClientTooSmall as reason:
            if joins is not None:
                joins(0).close()
            return self._sits_out(number, reason)
        try:
            arrays, layout = flatten(rounding.narrow({section: to_numpy(tensors) for section, tensors in reply.sections.items()}))
        except Overflow as reason:
            return self._sits_out(number, reason)
        metrics: dict[str, Any] = {"layout": layout, **{key: WHOLE.get(key, float)(value) for key, value in reply.metrics.items()}}
        if round.trains and (sections := to_write(keeps, kept, number)) is not None:
            state.write(number, sections)
        return arrays, reply.samples, metrics

    def _sits_out(self, number: int, reason: Exception) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        log(logging.WARNING, "client %s sits round %s out: %s", self.site.client, number, reason)
        return [], 0, {"layout": "[]"}

    def evaluate(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Loss and other metrics on this client's test data, with its own local tensors; ``save``: file name under the site's folder."""
        with self._own_model(parameters, config) as model:
            metrics = evaluate(model, self.site.test, task=self.task).result()
            self._save(model, str(config.get("save", "")))
        return metrics.pop("loss"), len(self.site.test), metrics

    def save(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> None:
        """Save the model that ``evaluate`` would test under the site's folder, as ``save`` of ``config`` names it."""
        with self._own_model(parameters, config) as model:
            self._save(model, str(config["save"]))

    @contextmanager
    def _own_model(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> Iterator[nn.Module]:
        """Return what the server sent with this client's own local tensors."""
        kept = self._state(config).read(before=int(config["round"]) + 1)
        asked = self._instruction(Phase.MEASURE, unflatten(parameters, config["layout"]), config)
        with self.network.lend() as lent:
            yield LocalRound(lent, self.method, asked, kept).model

    def _save(self, model: nn.Module, name: str) -> None:
        if not name or self.site.folder is None:
            return
        TO_SAVE.read({"save": name})  # a folder's name, and no way out of this client's own
        path = self.site.folder / name / "clients" / f"client-{self.site.client}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        names = plain_names(model)
        save_file({names[k]: t.contiguous().cpu().clone() for k, t in model.state_dict().items()}, path)

    def get_parameters(self, config: Mapping[str, Any]) -> list[np.ndarray]:
        """Scale, shift and statistics that this client keeps (``unseen.kept_layers``), for the average that unseen clients get.

        Raises:
            PermissionError: this client does not tell.
        """
        if not self.tells:
            raise PermissionError("this client tells nothing of the layers that it keeps: unseen-client is off in its run config")
        kept, state = self._state(config).read(before=int(config["round"]) + 1).get("local"), self.model.state_dict()
        names = schema.kept_layers(self.model, self.method).sections[schema.KEPT]
        return list(to_numpy({name: kept.get(name, state[name]) for name in names}).values())

    def asked(self, config: Mapping[str, Any]) -> StatisticsPass:
        """The pass that the message of a statistics-only exchange asks for."""
        return StatisticsPass.asked(str(config.get("measured", INPUTS)), self.method.statistics_pass.samples)

    def meet(self, config: Mapping[str, Any]) -> None:
        """Join the exchange and leave it again: the server wants to know whether all of a cohort can be there at once."""
        connect(self.site.exchange, config, [], 1).close()

    def kept(self, config: Mapping[str, Any], before: int) -> ClientState:
        """Return what this client keeps from the rounds before ``before``, of the run that ``config`` names."""
        return self._state(config).read(before)

    def _state(self, config: Mapping[str, Any]) -> StateStore:
        return state_of(self._context_state, self.site.state, config, self.site.client, self.signature)

    def _instruction(self, phase: Phase, payload: Payload, config: Mapping[str, Any], **fields: Any) -> Instruction:
        came = header_from(config)
        expected = Header(self.method.name, came.phase, came.round, self.signature, payload=came.payload)
        check_header(expected, came, self.network.instruction(), payload)
        return Instruction(int(config["round"]), phase, {section: to_tensors(arrays) for section, arrays in payload.items()}, **fields)


def state_of(state: RecordDict, folder: Path | None, config: Mapping[str, Any], client: int, signature: str) -> StateStore:
    """What a client keeps between rounds: in files below ``folder``, or in Flower's ``context.state`` without one."""
    run_id = RunId.of(config)
    if folder is None or not run_id.run:
        return MemoryState(state, signature)
    return FileState(folder, run_id, client, signature)


def connect(addresses: ExchangeAddresses, config: Mapping[str, Any], transcript: Transcript, batch: int) -> Exchange:
    """Join the exchange that the message's ``config`` names, with a batch of so many samples, if its address is one of ``addresses``.

    Raises:
        ExchangeFailed: it is none, or the exchange cannot be joined; the message says nothing of this client's network.
        WireError: the message lacks a field that this carrier needs.
    """
    carrier = config.get("exchange")
    if carrier == "replay":
        return ReplayExchange(transcript, batch)
    for field in ("exchange-token",) if carrier == "local" else GRPC_FIELDS:
        if field not in config:
            raise WireError("config", field, f"expected one beside exchange={carrier!r}, but it is missing")
    token = str(config["exchange-token"])
    if carrier == "local":
        return LocalExchange(token, batch)
    timeout, patience = float(config["exchange-timeout"]), float(config["exchange-patience"])
    addresses.check(address := str(config["exchange-address"]))
    return SiteExchange(address, token, batch, bytes(config["exchange-authority"]), timeout, patience)
