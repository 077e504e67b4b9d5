"""The client: one ``NumPyClient`` for every method."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from flwr.client import NumPyClient
from flwr.common.logger import log
from safetensors.torch import save_file
from torch import nn

from fl_bn.data.augment import augmenter
from fl_bn.data.batches import ClientTooSmall, check_size, draw_batches
from fl_bn.exchange.call import Exchange
from fl_bn.exchange.grpc.client import GrpcExchange
from fl_bn.exchange.local import LocalExchange
from fl_bn.exchange.replay import ReplayExchange, Unanswered
from fl_bn.federation.aggregation import Drift, running_statistics
from fl_bn.federation.companions import Companion, Named
from fl_bn.federation.companions import companions as companions_of
from fl_bn.federation.composition import check_composition
from fl_bn.federation.local import LocalResult, Samples, evaluate, statistics_pass, torch_seed, train, trainable
from fl_bn.federation.momentum import SECTIONS, Buffers, buffers_of, from_kept, load_buffers, to_kept
from fl_bn.federation.settings import LocalTraining, seeded
from fl_bn.flower import schema
from fl_bn.flower.client_state import ClientState, FileState, Kept, MemoryState
from fl_bn.flower.codec import Header, Payload, encode_moments, flatten, header_from, signature, to_numpy, to_tensors, unflatten
from fl_bn.flower.lineage import Lineage
from fl_bn.flower.messages import TO_EVALUATE
from fl_bn.flower.transcript import Transcript, detach, request_payload
from fl_bn.layers import count_updates
from fl_bn.methods import INPUTS, NORMALISERS, Method, Phase, Report, StatisticsPass
from fl_bn.moments import Moments
from fl_bn.objectives import CONTROL
from fl_bn.roles import Role, roles
from fl_bn.task import CLASSIFICATION, Task

BATCHES, DROPOUT, SUBSET, AUGMENT = range(4)  # what a seeded generator is for


@dataclass(frozen=True)
class Site:
    """What one client has: its index among ``clients``, its data, its device.

    ``folder``: for the model that it saves at the end. ``state``: for what it keeps between rounds, below a folder of the run's name;
    without one that is in Flower's ``context.state``, as long as the simulation or the SuperNode lives.
    """

    client: int
    clients: int
    train: Samples
    test: Samples
    device: torch.device
    folder: Path | None = None
    label_counts: tuple[int, ...] | None = None
    state: Path | None = None


class BatchNormClient(NumPyClient):
    """Trains, measures and evaluates one model as its method says.

    ``model`` is converted already and pristine; it is copied, never changed. ``state`` is Flower's ``context.state``. All that is drawn
    at random depends on ``seed``, the client and the round alone. ``tells``: its ``get_parameters`` answers. ``shares_drift``: where
    statistics stay at home, it tells how far they moved in a round; one of these numbers is an element of its own statistics.
    """

    def __init__(
        self,
        model: nn.Module,
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
        self.model = copy.deepcopy(model).to(site.device)
        self.signature, self.tells, self.shares_drift = signature(model, method), tells, shares_drift
        self._context_state, self._roles = state, roles(model)

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
        phase, round = Phase(config["phase"]), int(config["round"])
        payload = unflatten(parameters, config["layout"])
        connect = partial(_connect, config, detach(payload, config) if phase is Phase.EXCHANGE else [])
        state = self._state(config)
        kept = state.read(before=round + (phase is Phase.MEASURE))
        companions = () if phase is Phase.MEASURE else companions_of(self.settings)
        self._load(payload, config, kept, companions)
        if phase is Phase.MEASURE:
            arrays, layout = flatten({"moments": self._moments(self._measure(round, phase, self.asked(config)))})
            return arrays, len(self.site.train), {"layout": layout}
        try:
            check_size(len(self.site.train))  # before the statistics pass, which one sample may break
            reports = self.method.reports(phase)
            moments = self._measure(round, phase, self.method.statistics_pass) if reports is Report.PASS else {}
            rate, counted = float(config["learning-rate"]), int(config.get("counted", kept.round))
            result, buffers, waited = self._train(round, phase, rate, kept, counted, payload, connect)
        except Unanswered as pending:
            arrays, layout = flatten(request_payload(pending.request))
            return arrays, 0, {"layout": layout, "batch": pending.batch, "count": pending.request.count}
        except ClientTooSmall as reason:
            if phase is Phase.EXCHANGE:
                connect(0).close()
            log(logging.WARNING, "client %s sits round %s out: %s", self.site.client, round, reason)
            return [], 0, {"layout": "[]"}
        reply = self._reply(phase, result, moments or result.moments, payload, buffers)
        arrays, layout = flatten(reply)
        metrics: dict[str, Any] = {"layout": layout, "loss": result.loss, "steps": result.steps, "waited": waited}
        metrics |= self._updates(phase, result.steps) | self._local_drift()
        metrics |= {"batch": result.first} if reports is Report.FIRST else {}
        if sections := self._to_keep(result, buffers):
            metrics["kept"] = kept.round
            state.write(round, sections)
        return arrays, result.samples, metrics

    def evaluate(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Loss and other metrics on this client's test data, with its own local tensors; ``save``: file name under the site's folder."""
        kept = self._state(config).read(before=int(config["round"]) + 1)
        self._load(unflatten(parameters, config["layout"]), config, kept)
        metrics = evaluate(self.model, self.site.test, task=self.task).result()
        if (name := str(config.get("save", ""))) and self.site.folder is not None:
            TO_EVALUATE.read({"save": name})  # a folder's name, and no way out of this client's own
            path = self.site.folder / name / "clients" / f"client-{self.site.client}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({k: t.contiguous().cpu() for k, t in self.model.state_dict().items()}, path)
        return metrics.pop("loss"), len(self.site.test), metrics

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
        _connect(config, [], 1).close()

    def _state(self, config: Mapping[str, Any]) -> ClientState:
        lineage = Lineage.of(config)
        if self.site.state is None or not lineage.run:
            return MemoryState(self._context_state, self.signature)
        return FileState(self.site.state, lineage, self.site.client, self.signature)

    def _load(self, payload: Payload, config: Mapping[str, Any], kept: Kept, companions: Sequence[Companion] = ()) -> None:
        """Load the shared tensors received and the local tensors kept."""
        Header(self.method.name, str(config["phase"]), int(config["round"]), self.signature).check(header_from(config))
        expected = schema.instruction(self.model, self.method, companions)
        expected.check(payload)
        beside = {companion.section for companion in companions}
        tensors = {name: t for key in payload.keys() - beside for name, t in to_tensors(payload[key]).items()}
        self.model.load_state_dict(tensors | kept.get("local"), strict=False)
        self._before = running_statistics(self.model)

    def _measure(self, round: int, phase: Phase, how: StatisticsPass) -> dict[str, Moments]:
        rng = seeded(self.seed, self.site.client, round, SUBSET, phase is Phase.MEASURE)
        size = {"batch_size": self.settings.batch_size} if how.measured == NORMALISERS else {}
        return statistics_pass(self.model, self.site.train, how, rng, **size)

    def _train(
        self,
        round: int,
        phase: Phase,
        learning_rate: float,
        kept: Kept,
        counted: int,
        payload: Payload,
        connect: Callable[[int], Exchange],
    ) -> tuple[LocalResult, Buffers, float]:
        """The result, the optimiser's momentum where it outlives the round, and the seconds spent waiting for others."""
        settings, site = self.settings, self.site
        rng = seeded(self.seed, site.client, round, BATCHES)
        batches = draw_batches(len(site.train), settings.batch_size, rng, epochs=settings.epochs, steps=settings.steps)
        dropout = int(seeded(self.seed, site.client, round, DROPOUT).integers(2**62))
        parameters = trainable(self.model, self.method, phase)
        optimizer = settings.make_optimizer(parameters.values(), learning_rate)
        if settings.maintain != "reset":
            load_buffers(optimizer, parameters, self._maintained(kept, payload))
        exchange = None
        if phase is Phase.EXCHANGE:  # all that takes long, as a process's first optimiser does, is done: now others wait for us
            first = next(batches)
            batches, exchange = chain([first], batches), connect(len(first))
        with torch_seed(dropout, site.device), count_updates(self.model) as self._moved:
            result = train(
                self.model,
                site.train,
                batches,
                settings,
                learning_rate,
                self.method,
                phase,
                self.task,
                kept=kept.sections,
                control=to_tensors(payload.get(CONTROL, {})),
                counted=counted >= kept.round,
                optimizer=optimizer,
                exchange=exchange,
                augment=augmenter(settings.augment, seeded(self.seed, site.client, round, AUGMENT)),
            )
        buffers = {} if settings.maintain == "reset" else buffers_of(optimizer, parameters, SECTIONS[settings.optimizer])
        return result, buffers, 0.0 if exchange is None else exchange.seconds

    def _maintained(self, kept: Kept, payload: Payload) -> Buffers:
        """The optimiser's buffers of the round before: what the server sent, else what was kept."""
        buffers = from_kept(kept.get("optimizer"))
        if self.settings.maintain == "global":
            for key, section in SECTIONS[self.settings.optimizer].items():
                buffers[key] = buffers.get(key, {}) | to_tensors(payload[section])
        return buffers

    def _moments(self, moments: Mapping[str, Moments]) -> dict[str, np.ndarray]:
        unseen = {k: torch.zeros_like(s.mean) for k, s in running_statistics(self.model).items()}
        complete = {k: moments.get(k, Moments(0, zeros, zeros)) for k, zeros in unseen.items()}
        return encode_moments(complete, next(self.model.parameters()).dtype)

    def _reply(
        self, phase: Phase, result: LocalResult, moments: Mapping[str, Moments], received: Payload, buffers: Mapping[str, Named]
    ) -> Payload:
        """Of what travels beside the weights, what this round did not train goes back as it came, and a control variate unchanged."""
        state = self.model.state_dict()
        expected = schema.reply(self.model, self.method, phase, self.settings.update, companions_of(self.settings)).sections
        sources: dict[str, Named] = {"weights": state, "statistics": state, "gradients": result.gradients}
        if self.settings.objective.travels:
            sources[CONTROL] = {n: torch.zeros_like(state[n]) for n in expected[CONTROL]} | dict(result.finish.sent)
        if self.settings.maintain == "global":
            for key, section in SECTIONS[self.settings.optimizer].items():
                new = {n: t.to(state[n].dtype) for n, t in buffers.get(key, {}).items()}
                sources[section] = to_tensors(received[section]) | new
        reply = {k: to_numpy({n: sources[k][n] for n in expected[k]}) for k in expected if k != "moments"}
        return reply | ({"moments": self._moments(moments)} if "moments" in expected else {})

    def _updates(self, phase: Phase, steps: int) -> dict[str, list[int]]:
        """How often each layer moved its running statistics, where that is not once per step (a layer that is used twice)."""
        counts = list(self._moved.values())
        return {"updates": counts} if self.method.reports(phase) is Report.RUNNING and {*counts} - {steps} else {}

    def _local_drift(self) -> dict[str, float]:
        if not self.shares_drift or self.method.shares(Role.STATISTIC):
            return {}
        after = running_statistics(self.model)
        if (drift := Drift.between(self._before, after)) is None:
            return {}
        return {"drift": drift.largest, "drift-layer": list(after).index(drift.layer), "min-var": drift.min_var, "growth": drift.growth}

    def _to_keep(self, result: LocalResult, buffers: Buffers) -> dict[str, Named]:
        state = self.model.state_dict()
        local = {name: state[name] for name, role in self._roles.items() if role in self.method.local}
        sections: dict[str, Named] = {"local": local} if local else {}
        if result.gradients and self.settings.momentum > 0:
            sections["momentum"] = result.gradients
        if result.finish.kept:
            sections["objective"] = result.finish.kept
        if self.settings.maintain == "global":
            buffers = {k: {n: t for n, t in of.items() if not self.method.shares(self._roles[n])} for k, of in buffers.items()}
        if maintained := to_kept(buffers):
            sections["optimizer"] = maintained
        return sections


def _connect(config: Mapping[str, Any], transcript: Transcript, batch: int) -> Exchange:
    """This client's side of the exchange that the train message names."""
    carrier = config.get("exchange")
    if carrier == "replay":
        return ReplayExchange(transcript, batch)
    token = str(config["exchange-token"])
    if carrier == "local":
        return LocalExchange(token, batch)
    timeout, patience = float(config["exchange-timeout"]), float(config["exchange-patience"])
    return GrpcExchange(str(config["exchange-address"]), token, batch, bytes(config["exchange-authority"]), timeout, patience)
