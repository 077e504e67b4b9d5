"""Measure diagnostics that need all clients' data in one place, so they exist only in simulation.

The server process reads every client's part of the data itself. Diagnostics are measured at every evaluation, on copies
of the model, and use none of the run's random numbers. So a run has the same results with and without diagnostics.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from experiments.gradient_deviation import Batch, gradient_deviations
from fl_bn.app.assembly import client_model, client_samples, source_model, task
from fl_bn.app.config import SITES, ConfigError, RunConfig
from fl_bn.app.device import device
from fl_bn.bn.conversion import convert
from fl_bn.bn.derived import load_tensors
from fl_bn.bn.modules import copied
from fl_bn.bn.moments import Moments, Running, pool
from fl_bn.bn.observation import observe, pooled, uncompiled
from fl_bn.bn.roles import batch_norms, inputs_like
from fl_bn.federation.aggregation import running_statistics
from fl_bn.federation.local import Samples, evaluate
from fl_bn.federation.record import RoundRecord
from fl_bn.federation.settings import seeded
from fl_bn.methods import METHODS, Phase
from fl_bn.support.names import expected
from fl_bn.task import MetricState

DIAGNOSTICS = TRAINING_LOSS, DRIFT, GRADIENTS = ("training-loss", "drift", "gradients")
BATCH = 128  # samples of each client's batch, the same in every round: FedTAN's own batch size
_STREAM = 0xD1A6  # makes these draws independent of those of batches, dropout and statistics
EPS = 1e-5


class Measurement(NamedTuple):
    """Hold one line of diagnostics.csv.

    Attributes:
        round: The number of the round.
        layer: The name of the layer; empty: the value belongs to the whole network.
        client: The index of the client; None: the value belongs to all clients.
        quantity: The name of the quantity.
        value: The value.
    """

    round: int
    layer: str
    client: int | None
    quantity: str
    value: float


class Diagnostics:
    """Measure diagnostics of the global model in every evaluated round. Byzantine clients are left out.

    There are three kinds, each with several quantities.

    ``training-loss``: the loss and the task's metric on all clients' training data, in evaluation mode
    (``training-loss`` and, for example, ``training-accuracy``).

    ``drift`` (FixBN's paper, figure 2): six quantities of each BatchNorm layer, as means over its channels:

    * ``mean-moved``, ``var-moved``: how far the global statistics moved since the last evaluation. A mean is measured
      in standard deviations, a variance by the absolute log of the ratio.
    * ``batch-mean-distance``, ``batch-var-distance``: how far the statistics of a client's batch are from the global
      statistics, in the same units, as a mean over clients.
    * ``batch-mean-spread``, ``batch-var-spread``: how much the statistics of the same batch vary over the evaluations
      so far, as a mean over clients. For the mean, this is its variance in units of the global variance. For the
      variance, it is the variance of the log.

    Batch statistics are those of the layer's input. The layers before it normalise as in training, or as in evaluation
    once the statistics are frozen.

    ``gradients``: two quantities of the whole network (see ``gradient_deviation``). ``gradient-deviation`` is B_i^2 of
    each client, and their mean. ``centralised-gradient`` is the squared norm of the gradient on all batches together.

    Args:
        config: The run config.
        names: The kinds to measure. Each is a name in ``DIAGNOSTICS``.

    Raises:
        ConfigError: A name is unknown, the server does not have the data, or the method has no global model. Or ``drift``
            or ``gradients`` is named although the network has no BatchNorm.
    """

    def __init__(self, config: RunConfig, names: Sequence[str]) -> None:
        if unknown := [name for name in names if name not in DIAGNOSTICS]:
            raise ConfigError(expected("each of diagnostics", unknown[0], DIAGNOSTICS))
        if config.dataset == SITES:
            raise ConfigError(f"diagnostics need all clients' data in one place, which dataset={SITES!r} lacks")
        if config.build_method().personal:
            raise ConfigError(f"diagnostics measure a global model, which {config.method} lacks: leave out diagnostics")
        self.config, self.names = config, tuple(names)
        if set(names) & {DRIFT, GRADIENTS} and not batch_norms(client_model(config)):
            raise ConfigError(f"diagnostics drift and gradients need BatchNorm layers, which {config.method} lacks")
        self._before: dict[str, Running] = {}
        self._over_rounds: dict[tuple[str, int, str], Moments] = {}

    @cached_property
    def clients(self) -> list[Samples]:
        """Return the training samples of each honest client."""
        return [client_samples(self.config, client)[0] for client in range(self.config.clients - self.config.changes.attackers)]

    def after_round(self, record: RoundRecord, model: nn.Module) -> list[Measurement]:
        """Measure the global model after a round.

        Args:
            record: The record of the round.
            model: The global model. It is not changed.

        Returns:
            The measurements; an empty list for a round without evaluation.
        """
        if not self.config.round_policy().due(record.round, self.config.rounds):
            return []
        rows: list[Measurement] = []
        target = device(self.config)
        if TRAINING_LOSS in self.names:
            on_device = copied(model).to(target)
            of = task(self.config, self.clients[0].y)
            union = MetricState.union(evaluate(on_device, samples, task=of) for samples in self.clients)
            for quantity, value in (("training-loss", union.loss), (f"training-{of.metric}", union[of.metric])):
                rows.append(Measurement(record.round, "", None, quantity, value))
        if DRIFT in self.names:
            rows += self._drift(record, copied(model).to(target))
        if GRADIENTS in self.names:
            rows += self._gradients(record.round, model, target)
        return rows

    def _batches(self, like: Tensor) -> list[tuple[int, Batch]]:
        """Return index and batch of every client with at least two samples. The batches are the same in every round."""
        batches = []
        for client, samples in enumerate(self.clients):
            if (n := len(samples)) >= 2:
                chosen = np.sort(seeded(self.config.seed, client, _STREAM).choice(n, min(n, BATCH), replace=False))
                batches.append((client, samples.batch(chosen, like)))
        return batches

    @torch.no_grad()
    def _drift(self, record: RoundRecord, model: nn.Module) -> list[Measurement]:
        now, rows = running_statistics(model), []

        def row(layer: str, quantity: str, value: float) -> None:
            rows.append(Measurement(record.round, layer, None, quantity, value))

        for name, new in now.items():
            if name in self._before:
                old = self._before[name]
                row(name, "mean-moved", _in_deviations(new.mean, old))
                row(name, "var-moved", _log_ratio(new.var, old))
        self._before = now
        by_layer: dict[str, list[Moments]] = {name: [] for name in now}
        spreads: dict[tuple[str, str], list[float]] = {}
        model.eval()
        frozen = self.config.build_method().freezes_statistics(Phase(record.phase))
        for layer in batch_norms(model).values():
            layer.train(not frozen)
        for client, (x, _) in self._batches(inputs_like(model)):
            with uncompiled(), observe(model) as observed:
                model(x)
            for name, part in pooled(observed).items():
                part = Moments(part.count, part.mean.cpu(), part.var.cpu())
                by_layer[name].append(part)
                scale = now[name].var.double() + EPS
                for quantity, value, unit in (("mean", part.mean, scale), ("var", (part.bessel() + EPS).log(), torch.ones_like(scale))):
                    seen = self._seen((name, client, quantity), value)
                    if seen.count > 1:
                        spreads.setdefault((name, quantity), []).append(float((seen.var / unit).mean()))
        for name, parts in by_layer.items():
            if parts:
                row(name, "batch-mean-distance", _mean([_in_deviations(part.mean, now[name]) for part in parts]))
                row(name, "batch-var-distance", _mean([_log_ratio(part.bessel(), now[name]) for part in parts]))
        for (name, quantity), values in spreads.items():
            row(name, f"batch-{quantity}-spread", _mean(values))
        return rows

    def _seen(self, key: tuple[str, int, str], value: Tensor) -> Moments:
        """Store this round's value of a batch statistic under ``key``, and return the moments of all its values so far."""
        before = self._over_rounds.get(key)
        new = Moments(1, value.double(), torch.zeros_like(value, dtype=torch.float64))
        self._over_rounds[key] = new if before is None else pool([before, new])
        return self._over_rounds[key]

    def _gradients(self, round: int, model: nn.Module, target: torch.device) -> list[Measurement]:
        network = convert(source_model(self.config), METHODS["fedtan"]())
        load_tensors(network, {k: t for k, t in model.state_dict().items() if k in network.state_dict()})
        clients, batches = zip(*self._batches(inputs_like(network).to(target)), strict=True)
        deviations = gradient_deviations(network.to(target), batches, task(self.config, self.clients[0].y))
        rows = [Measurement(round, "", i, "gradient-deviation", value) for i, value in zip(clients, deviations.squared, strict=True)]
        rows.append(Measurement(round, "", None, "gradient-deviation", _mean(deviations.squared)))
        return [*rows, Measurement(round, "", None, "centralised-gradient", deviations.centralised)]


def _in_deviations(mean: Tensor, of: Running) -> float:
    return float(((mean.double() - of.mean.double()).abs() / (of.var.double() + EPS).sqrt()).mean())


def _log_ratio(var: Tensor, of: Running) -> float:
    return float(((var.double() + EPS) / (of.var.double() + EPS)).log().abs().mean())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
