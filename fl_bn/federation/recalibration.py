"""Re-calibration: the exact statistics of the union of the clients' data in every BatchNorm layer, by passes in evaluation mode.

PreciseBN (Rethinking "Batch" in BatchNorm, Wu, Johnson, 2021, section 3) without its batches, and federated. In evaluation mode every
client normalises with the same constants, so the pooled moments of a layer's input are those of the union of all data *under the
statistics of the layers below*. These are exact after the pass before: pass p makes layers 1..p exact, and L passes all L of them. A pass
that moves nothing has found all exact. Passes that go on until then change the layers from below (``unreached``); a given, smaller number
of passes changes all layers each time, so that none keeps what is known to be wrong.

Works for any torch network, converted or not, trained in a federation or not; weights are never touched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import torch
from torch import nn

from fl_bn.federation.aggregation import combine, running_statistics
from fl_bn.federation.local import Samples, statistics_pass
from fl_bn.federation.settings import seeded
from fl_bn.methods import INPUTS, Method, StatisticsPass, replace_by_pooled
from fl_bn.moments import Moments, Running
from fl_bn.roles import Role, batch_norms, inputs_like

TOLERANCE = 32.0
"""Movements that count as none, in units of the rounding (eps) of the statistics' dtype: of a mean relative to its size and its standard
deviation, of a variance relative to itself. A pass repeated on the same statistics gives the same bits on a CPU; on a GPU the order of a
sum is not fixed, and its rounding is some eps per level of the summation tree. 32 eps are 4e-6 in float32 and 7e-15 in float64."""


class Movement(NamedTuple):
    """How far a pass moved one layer's statistics, by the channel that moved most.

    ``mean``: in standard deviations of the statistics before; ``variance``: the factor by which it changed, farthest from 1. Both with
    the layer's ``eps`` in the variance, as it normalises.
    """

    layer: str
    mean: float
    variance: float


@dataclass(frozen=True)
class Pass:
    """One pass. ``number``: from 1; ``clients``: that were measured; ``settled``: it moved nothing, so that another would not, either.

    ``in_order``: of all layers, only the last that the network registers moved, if any. ``exchanges``: of one that went layer by layer,
    after which all layers are exact; else 0.
    """

    number: int
    movements: tuple[Movement, ...]
    clients: int
    settled: bool
    exchanges: int = 0
    in_order: bool = True

    @classmethod
    def between(
        cls,
        number: int,
        clients: int,
        old: Mapping[str, Running],
        new: Mapping[str, Running],
        eps: Mapping[str, float],
        tolerance: float = TOLERANCE,
        exchanges: int = 0,
        left: Collection[str] = (),
    ) -> Pass:
        """From the statistics before it and those that were measured, both as the model holds them; the layers of ``left`` keep theirs.

        Where nobody was measured, nothing is settled.
        """
        settled = clients > 0 and all(_still(old[name], new[name], eps[name], tolerance) for name in new)
        in_order = all(_still(old[name], new[name], eps[name], TOLERANCE) for name in list(new)[:-1])
        movements = tuple(_movement(name, old[name], (old if name in left else new)[name], eps[name]) for name in new)
        return cls(number, movements, clients, settled, exchanges, in_order)

    @property
    def largest(self) -> Movement:
        """The layer whose mean moved most."""
        return max(self.movements, key=lambda movement: (movement.mean != movement.mean, movement.mean))


def unreached(layers: Sequence[str], number: int) -> Sequence[str]:
    """Returns those of ``layers`` that pass ``number`` leaves as they were, where passes go on until all layers are exact.

    A pass changes the layers that it makes exact and one more, in the order in which the network registers them. Each pass that changed all
    layers would measure each under wrong statistics of those before it. In a deep network such errors multiply: those of ResNet-50
    overflow float32 within ten passes.
    """
    return layers[number + 1 :]


def through(layers: int, made: Pass) -> bool:
    """Whether ``made`` is the last of passes that go on until all ``layers`` are exact.

    As a rule, that is the pass with their number. A network may call its layers in another order than that in which it registers them.
    Then something below the last layer still moves, and as many passes again, which change all layers, are enough for any order.
    """
    return made.settled or made.number >= 2 * layers or (made.number >= layers and made.in_order)


def recalibrate(model: nn.Module, clients: Sequence[Samples], passes: int = 0, tolerance: float = TOLERANCE) -> list[Pass]:
    """Change the running statistics of ``model`` to those of the union of the clients' data (variance unbiased); the passes made.

    At most ``passes`` (0: as many as make all layers exact), fewer where one moves nothing by more than ``tolerance`` (see ``TOLERANCE``).
    What a client measures is rounded to the model's dtype, as on the wire: a federated run with the same clients has the same bits. A
    layer that the network uses at two depths depends on itself: its statistics then converge, if at all, and are not exact at the end.

    Raises:
        ValueError: there is no data, or a BatchNorm layer keeps no running statistics.
    """
    if passes < 0 or tolerance < 0:
        raise ValueError(f"passes (0: until all layers are exact) and tolerance must be >= 0, but got {passes} and {tolerance}")
    if reason := without_statistics(model):
        raise ValueError(reason)
    clients = [samples for samples in clients if len(samples)]
    if not clients:
        raise ValueError("re-calibration needs data to measure: no client has a sample")
    layers, dtype, made = batch_norms(model), inputs_like(model).dtype, list[Pass]()
    for number in count(1):
        before = running_statistics(model)
        reports = [_as_sent(statistics_pass(model, samples, StatisticsPass.asked(INPUTS), seeded(0)), dtype) for samples in clients]
        _store(model, combine(replace_by_pooled, before, reports, [1] * len(reports), layers))
        left = unreached(list(layers), number) if not passes or passes >= len(layers) else ()
        after = running_statistics(model)
        made.append(Pass.between(number, len(clients), before, after, epsilons(model), tolerance, left=left))
        _store(model, {name: before[name] for name in left})
        if number == passes or made[-1].settled or (not passes and through(len(layers), made[-1])):
            break
    return made


def why_not(model: nn.Module, method: Method) -> str:
    """Why a federation of ``method`` cannot re-calibrate the (converted) ``model``; empty where it can."""
    if not method.shares(Role.STATISTIC):
        return (
            f"method {method.name!r} keeps running statistics at the clients, each of its own data: there are no shared ones to "
            "re-calibrate. Take a method that shares them (fedavg, fixbn, hbn, fbn, fedtan, ...)"
        )
    if not batch_norms(model):
        return (
            f"under method {method.name!r} this model has no BatchNorm layer, so there are no running statistics to re-calibrate. Take a "
            "network with BatchNorm, and a method that keeps it (fedavg, fixbn, hbn, fbn, fedtan, ...)"
        )
    return without_statistics(model)


def without_statistics(model: nn.Module) -> str:
    """Says which BatchNorm layers of ``model`` keep no running statistics, or that it has none at all; empty where all is well."""
    layers = batch_norms(model)
    if not layers:
        return "this model has no BatchNorm layer, so there are no running statistics to re-calibrate"
    if missing := [name for name, layer in layers.items() if layer.running_mean is None]:
        return (
            f"BatchNorm layer {missing[0]!r} keeps no running statistics (track_running_stats=False): it normalises with its batch in "
            "evaluation, too, and what the layers above see depends on how data fall into batches. Build it with track_running_stats=True"
        )
    return ""


def epsilons(model: nn.Module) -> dict[str, float]:
    """Returns epsilon by layer: what BatchNorm adds to the variance."""
    return {name: layer.eps for name, layer in batch_norms(model).items()}


def _as_sent(moments: Mapping[str, Moments], dtype: torch.dtype) -> dict[str, Moments]:
    return {k: Moments(m.count, m.mean.to(dtype).cpu().double(), m.var.to(dtype).cpu().double()) for k, m in moments.items()}


@torch.no_grad()
def _store(model: nn.Module, statistics: Mapping[str, Running]) -> None:
    layers = batch_norms(model)
    for name, running in statistics.items():
        mean, var = layers[name].running_mean, layers[name].running_var
        assert mean is not None
        assert var is not None
        mean.copy_(running.mean)
        var.copy_(running.var)


def _movement(name: str, old: Running, new: Running, eps: float) -> Movement:
    mean = (new.mean.double() - old.mean.double()).abs() / (old.var.double() + eps).sqrt()
    factor = (new.var.double() + eps) / (old.var.double() + eps)
    return Movement(name, float(mean.max()), float(factor[factor.log().abs().argmax()]))


def _still(old: Running, new: Running, eps: float, tolerance: float) -> bool:
    allowed = tolerance * torch.finfo(new.mean.dtype).eps
    mean, var = new.mean.double(), new.var.double()
    still = (mean - old.mean.double()).abs() <= allowed * (mean.abs() + (var + eps).sqrt())
    return bool((still & ((var - old.var.double()).abs() <= allowed * (var + eps))).all())
