"""Write the lines of the log about normalisation layers and rounds."""

from __future__ import annotations

import inspect
import logging
import math
from collections import Counter
from collections.abc import Iterator
from itertools import product

from torch import nn

from fl_bn.bn.roles import NORM_LAYERS, Role, buffers_in_words
from fl_bn.federation.locality import Locality
from fl_bn.federation.record import RoundRecord
from fl_bn.flower.compat import log
from fl_bn.methods import Method, Phase, Place
from fl_bn.methods.fedtan import CohortBatchNorm
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.task import CLASSIFICATION, Task

SHOWN = 4  # the most metrics of the user's own that a line of the log shows, of training and of evaluation each


def layers_by_type(model: nn.Module) -> str:
    """Return the number of normalisation layers by type, as ``3 BatchNorm2d, 1 BatchNorm1d`` or ``no normalisation layer``."""
    layers = Counter(type(module).__name__ for module in model.modules() if isinstance(module, NORM_LAYERS))
    return ", ".join(f"{count} {name}" for name, count in layers.items()) or "no normalisation layer"


def describe_layers(source: nn.Module, model: nn.Module, method: Method) -> Iterator[str]:
    """Yield log lines about what a method does with a network.

    They name the layers before and after conversion, what happens to the tensors of each role (weights, statistics, ...),
    and what clients report.

    Args:
        source: The network before conversion.
        model: The network after conversion.
        method: The method.
    """
    before, after = layers_by_type(source), layers_by_type(model)
    yield f"method {method.name}: found {before}" + ("" if before == after else f", trained as {after}")
    if method.prepare is not None:
        summary, *_ = (inspect.getdoc(method.prepare) or "changed").splitlines()
        yield f"the rest of the network: {summary}"
    locality = Locality.of(model, method)
    for role, place in product(Role, Place):
        if count := len(locality.names(place, of=[role])):
            yield f"{count} tensors of role {role.value}: {place.value}"
    if buffers := buffers_in_words(model):
        yield buffers
    if cohort := [module for module in model.modules() if isinstance(module, CohortBatchNorm)]:
        count = sum((1 if layer.schedule == "merged" else 2) + layer.share_gradients for layer in cohort)
        yield f"first local step: {count} layer-wise exchanges of moments{' and their gradients' if cohort[0].share_gradients else ''}"
    yield f"clients report: {method.report.value}"


def say_layers(source: nn.Module, model: nn.Module, method: Method) -> None:
    """Log the lines of ``describe_layers``."""
    for line in describe_layers(source, model, method):
        log(logging.INFO, "\t%s", line)


def in_short(record: RoundRecord, rounds: int, task: Task = CLASSIFICATION, called: ClientNames = UNNAMED) -> str:
    """Return the short line of a round, as ``[round 3/20] 3/3 clients  loss 2.2450  accuracy 15.8%  1.2 s``.

    A loss that no client told is left out.

    Args:
        record: The record of the round.
        rounds: The number of rounds of the run.
        task: The task, which names and formats the metric.
        called: The names of the clients.
    """
    evaluation, metric, worst = record.evaluation, task.metric, task.worst()
    clients = f"{len(record.accepted)}/{len(record.clients)} clients"
    if record.phase == Phase.MEASURE.value:
        parts = [f"[pass {record.round}] {clients if record.clients else 'the statistics before any pass'}"]
    else:
        untold = record.aggregated and math.isnan(record.loss)  # by secure aggregation, or by a loop of the user's
        parts = [f"[round {record.round}/{rounds}] {clients}", *([] if untold else [f"loss {record.loss:.4f}"])]
    if metric in evaluation:
        parts.append(f"{metric} {task.format_metric(evaluation[metric])}")
    parts += others(record, metric)
    if f"{metric}-{worst}" in evaluation:
        parts.append(f"{worst} {task.format_metric(evaluation[f'{metric}-{worst}'])}")
    if record.clients and not record.aggregated:
        parts.append("nothing changed")
    if record.far:
        parts.append(f"far from the others: {called.clients(record.far)}")
    return "  ".join([*parts, f"{record.seconds:.1f} s"])


def others(record: RoundRecord, metric: str) -> list[str]:
    """Return the user's own metrics of a round as ``name value`` for the log: at most ``SHOWN`` each of training and evaluation.

    Args:
        record: the record of the round.
        metric: the name of the task's metric. If it was evaluated, no other metrics of evaluation are shown.
    """
    evaluation = {} if metric in record.evaluation else record.evaluation
    trained = {name: value for name, value in record.own_metrics.items() if name != "loss"}
    return [f"{name} {value:.4g}" for metrics in (trained, evaluation) for name, value in list(metrics.items())[:SHOWN]]


def describe_round(record: RoundRecord, rounds: int, task: Task, method: Method, model: nn.Module, called: ClientNames = UNNAMED) -> str:
    """Return the long log line of a round, for run.log: its training, then normalisation, bytes and drift.

    Args:
        record: The record of the round.
        rounds: The number of rounds of the run.
        task: The task, which names and formats the metric.
        method: The method.
        model: The converted network.
        called: The names of the clients.
    """
    evaluation, metric, worst = record.evaluation, task.metric, task.worst()
    score = f", {metric} {task.format_metric(evaluation[metric])}" if metric in evaluation else ""
    score += "".join(f", {other}" for other in others(record, metric))
    if f"{metric}-std" in evaluation:
        spread, extreme = (task.format_metric(evaluation[f"{metric}-{suffix}"]) for suffix in ("std", worst))
        score += f" (std {spread}, {worst} {extreme} over clients)"
    if record.phase == Phase.MEASURE.value and not record.clients:
        return f"[pass {record.round}] the statistics before any pass{score}"
    training = f"[pass {record.round}] {len(record.accepted)}/{len(record.clients)} clients{score}"
    if record.phase != Phase.MEASURE.value:
        training = (
            f"[round {record.round}/{rounds}] {len(record.accepted)}/{len(record.clients)} clients, "
            f"lr {record.learning_rate:.4g}, loss {record.loss:.4f}{score}"
        )
    phase = Phase(record.phase)
    policy = f"{method.name} {phase.value}, {layers_by_type(model)}, reports {method.reports(phase).value}"
    drift = "nothing changed"
    if record.aggregated:
        drift = "no running statistics" if method.shares(Role.STATISTIC) else "running statistics stay at their clients"
    if record.drift is not None:
        drift = (
            f"min var {record.drift.min_var:.3g}, largest drift of a mean {record.drift.largest:.3g} sd ({record.drift.layer or 'model'})"
        )
    traffic = (
        f"per client {record.tensors_down} tensors {size(sum(record.bytes_down.values()))} down, "
        f"{record.tensors_up} tensors {size(sum(record.bytes_up.values()))} up"
    )
    if record.exchanges:
        up, waited = size(record.bytes_up.get("exchange", 0)), max((c.waited for c in record.accepted), default=0.0)
        longest = "" if phase is Phase.MEASURE else f", the longest wait {waited:.2f} s"
        traffic += f"; {record.exchanges} exchanges by {record.carrier} ({up} up){longest}"
    if record.far:
        training += f", far from the others: {called.clients(record.far)}"
    return f"{training} | normalisation: {policy}; {traffic}; {drift}"


def size(nbytes: float) -> str:
    """Format a number of bytes in B, kB or MB, where 1 kB is 1024 bytes and 1 MB is 1024 kB."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    return f"{nbytes / 1024:.1f} kB" if nbytes < 1024**2 else f"{nbytes / 1024**2:.2f} MB"
