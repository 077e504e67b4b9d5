"""Measure the exact statistics of clients' data in every BatchNorm layer of a trained model.

**Re-calibration** on all clients' data is PreciseBN (Rethinking "Batch" in
BatchNorm, Wu, Johnson, 2021, section 3), federated, without its batches. In a pass,
clients run the network over their data in evaluation mode, with the same constants.
So a layer's pooled moments are those of all data, given the layers below: pass p
makes layers 1..p exact, until one changes no statistic. It changes only layers
1..p+1 (``unreached``), but all if fewer passes than layers are asked for: the
highest would else keep wrong statistics.

**Adaptation** chooses BatchNorm's affine parameters and statistics by a new
client's unlabelled samples, in three ways. "Known" clients are those that trained:

    average-affine   the known clients' mean affine parameters, the new client's own
                     statistics. FedBN: Federated Learning on Non-IID Features via Local
                     Batch Normalization, Li et al., ICLR 2021, appendix G
    recompute        the shared model's affine parameters (the initial ones, if clients
                     keep theirs), the new client's own statistics
    test-batch       the affine parameters of average-affine, each test batch's statistics.
                     Nado et al., Evaluating Prediction-Time Batch Normalization for
                     Robustness under Covariate Shift, 2020; Schneider et al., NeurIPS 2020

If a method shares the affine parameters, ``average-affine`` and ``recompute`` are
the same.

Legend: N samples, C channels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fl_bn.bn.conversion import convert
from fl_bn.bn.derived import load_tensors
from fl_bn.bn.modules import copied
from fl_bn.bn.moments import Moments, Running
from fl_bn.bn.roles import Role, batch_norms
from fl_bn.federation.aggregation import average, combine, running_statistics, store_statistics
from fl_bn.federation.local import Samples, statistics_pass
from fl_bn.federation.schema import Locality
from fl_bn.federation.values import Named
from fl_bn.methods import Method, Place, replace_by_pooled
from fl_bn.options import refuse
from fl_bn.support.names import check_name

HOW = AVERAGE_AFFINE, RECOMPUTE, TEST_BATCH = "average-affine", "recompute", "test-batch"
TOLERANCE = 32.0
"""Largest relative change of a statistic that counts as no change, in units of its dtype's eps.

A mean's change is relative to its absolute value plus its standard deviation. On a
CPU, a repeated pass gives the same bits. On a GPU, the order of a sum is not fixed,
and its rounding error is some eps per level of the summation tree.
"""


class Movement(NamedTuple):
    """Describe how far a pass moved a layer's statistics, in the channel that moved most.

    Variances include the layer's ``eps``, as in normalisation.

    Attributes:
        mean: The largest change of a mean, in standard deviations before.
        variance: New variance / old variance, the factor farthest from 1.
    """

    layer: str
    mean: float
    variance: float


@dataclass(frozen=True)
class Pass:
    """Describe the result of one pass.

    Attributes:
        number: From 1.
        clients: How many clients were measured.
        settled: Whether no statistic changed by more than the tolerance.
        exchanges: The number of exchanges of a pass that went layer by layer, else
            0.
        in_order: Whether all layers but perhaps the last one kept their statistics
            (``through``).
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
        kept_layers: Collection[str] = (),
    ) -> Pass:
        """Compare running statistics before and after a pass.

        A change up to ``tolerance`` counts as none. Without clients, ``settled`` is
        False. ``kept_layers`` stay (``unreached``).
        """
        settled = clients > 0 and all(_still(old[name], new[name], eps[name], tolerance) for name in new)
        in_order = all(_still(old[name], new[name], eps[name], TOLERANCE) for name in list(new)[:-1])
        movements = tuple(_movement(name, old[name], (old if name in kept_layers else new)[name], eps[name]) for name in new)
        return cls(number, movements, clients, settled, exchanges, in_order)

    @property
    def largest(self) -> Movement:
        """Return the movement of the layer whose mean moved most."""
        return max(self.movements, key=lambda movement: (movement.mean != movement.mean, movement.mean))


def unreached(layers: Sequence[str], number: int) -> Sequence[str]:
    """Return the ``layers`` that keep their statistics in pass ``number`` of as many as needed.

    A pass changes one more layer than it makes exact. Others would be measured
    under wrong statistics, whose errors multiply: those of ResNet-50 overflow
    float32 within ten passes.
    """
    return layers[number + 1 :]


def through(layers: int, outcome: Pass) -> bool:
    """Tell whether passes may end, since each of ``layers`` layers has exact statistics.

    They may after one that changes no statistic, or after pass ``layers`` if it
    changed the last layer only. Else layers are called in another order than
    registered: twice as many passes suffice.
    """
    return outcome.settled or outcome.number >= 2 * layers or (outcome.number >= layers and outcome.in_order)


def recalibrate(model: nn.Module, clients: Sequence[Samples], passes: int = 0) -> list[Pass]:
    """Set the running statistics of ``model`` to those of all clients' data (variance unbiased).

    Moments are rounded as clients send them, so a federated run gives the same
    bits. Statistics of a layer that is used at two depths may converge, but are not
    exact.

    Args:
        model: The network, whose statistics are set in place.
        clients: Each client's samples.
        passes: The most passes; 0: as many as make all layers exact.

    Raises:
        ValueError: A BatchNorm layer keeps no running statistics, or there is none,
            or no client has a sample.
    """
    clients = [samples for samples in clients if len(samples)]
    reason = without_statistics(model)
    refuse((reason, reason), (not clients, "no client has a sample, so there is nothing to measure"))
    layers, outcomes = batch_norms(model), list[Pass]()
    for number in count(1):
        before = running_statistics(model)
        reports = [_as_sent(statistics_pass(model, samples), before) for samples in clients]
        store_statistics(model, combine(replace_by_pooled, before, reports, [1] * len(reports)))
        kept_layers = unreached(list(layers), number) if not passes or passes >= len(layers) else ()
        after = running_statistics(model)
        outcomes.append(Pass.between(number, len(clients), before, after, epsilons(model), kept_layers=kept_layers))
        store_statistics(model, {name: before[name] for name in kept_layers})
        if number == passes or outcomes[-1].settled or (not passes and through(len(layers), outcomes[-1])):
            break
    return outcomes


def why_not(model: nn.Module, method: Method, trains: bool = False) -> str:
    """Return why ``method`` cannot re-calibrate the converted ``model``, if so.

    In a run that ``trains``, clients have the statistics that they keep.
    """
    if not method.shares(Role.STATISTIC) or (not trains and Locality.of(model, method).home_statistics):
        return (
            f"method {method.name!r} keeps running statistics at the clients, so the shared model cannot be re-calibrated. Take a method "
            "that shares all its statistics (fedavg, fixbn, hbn, fbn, fedtan, ...)"
        )
    reason = without_statistics(model)
    return f"method {method.name!r}: {reason}" if reason else ""


def without_statistics(model: nn.Module) -> str:
    """Return why ``model`` has no running statistics, if so."""
    layers = batch_norms(model)
    if not layers:
        return "this model has no BatchNorm layer, so there are no running statistics to re-calibrate"
    if missing := [name for name, layer in layers.items() if layer.running_mean is None]:
        return (
            f"BatchNorm layer {missing[0]!r} keeps no running statistics (track_running_stats=False). In evaluation it normalises with its "
            "batch, so the inputs of later layers depend on how data are divided into batches. Build it with track_running_stats=True"
        )
    return ""


def epsilons(model: nn.Module) -> dict[str, float]:
    """Return layer -> epsilon, which BatchNorm adds to the variance."""
    return {name: layer.eps for name, layer in batch_norms(model).items()}


def _as_sent(moments: Mapping[str, Moments], statistics: Mapping[str, Running]) -> dict[str, Moments]:
    dtypes = {name: running.mean.dtype for name, running in statistics.items()}
    return {k: Moments(m.count, m.mean.to(dtypes[k]).cpu().double(), m.var.to(dtypes[k]).cpu().double()) for k, m in moments.items()}


def _movement(name: str, old: Running, new: Running, eps: float) -> Movement:
    mean = (new.mean.double() - old.mean.double()).abs() / (old.var.double() + eps).sqrt()
    factor = (new.var.double() + eps) / (old.var.double() + eps)
    return Movement(name, float(mean.max()), float(factor[factor.log().abs().argmax()]))


def _still(old: Running, new: Running, eps: float, tolerance: float) -> bool:
    allowed = tolerance * torch.finfo(new.mean.dtype).eps
    mean, var = new.mean.double(), new.var.double()
    still = (mean - old.mean.double()).abs() <= allowed * (mean.abs() + (var + eps).sqrt())
    return bool((still & ((var - old.var.double()).abs() <= allowed * (var + eps))).all())


class NotAdaptable(ValueError):
    """Report why a model cannot be adapted to a new client."""


@dataclass(frozen=True)
class Known:
    """Hold the tensors of a finished run, by their names in the state_dict.

    Attributes:
        shared: The server's tensors.
        clients: A known client's name -> all tensors of its model, if available.
        average: The average of the tensors that clients keep, if ``clients`` is
            empty.
    """

    shared: Named
    clients: Mapping[str, Named] = field(default_factory=dict)
    average: Named = field(default_factory=dict)


class Adaptation:
    """Make models for new clients from a finished run of an unconverted ``network``.

    Raises:
        NotAdaptable: The method shares no tensor, the network has no statistics, or
            ``known`` is another one's.
    """

    def __init__(self, network: nn.Module, method: Method, known: Known) -> None:
        converted = convert(network, method)
        locality = Locality.of(converted, method)
        shared = locality.names(Place.SHARED, Place.STATISTIC)
        lonely = "" if shared else "it shares no tensor, so a run has no model for a client that did not take part in it"
        if reason := lonely or without_statistics(converted):
            raise NotAdaptable(f"method {method.name}: {reason}")
        self.method, self.known, self._network = method, known, network
        _check("the run's model", known.shared, converted, shared)
        self._affine = locality.names(Place.HOME, of=[Role.AFFINE])
        names = self._kept = locality.kept_by_clients()
        for client, state in known.clients.items():
            _check(client, state, converted, names)
        _check("the clients' average", known.average, converted, [name for name in names if name in known.average])
        if known.clients and names:
            states = [{name: state[name] for name in names} for state in known.clients.values()]
            self._average: Named = average(states, [1.0] * len(states))
        else:
            self._average = {name: known.average[name] for name in names if name in known.average}

    def before(self) -> nn.Module | None:
        """Return the model of shared tensors and clients' average ones; None if unknown."""
        return None if any(name not in self._average for name in self._kept) else self._with(self._average)

    def refusal(self, how: str) -> str:
        """Return why this run's model cannot be adapted by ``how``, if so."""
        check_name("how to adapt", how, HOW)
        if how in (AVERAGE_AFFINE, TEST_BATCH) and any(name not in self._average for name in self._affine):
            return f"{how}: the affine parameters that {self.method.name} keeps at the clients, or their average, are needed, but not given"
        return ""

    def adapt(self, how: str, x: Tensor) -> nn.Module:
        """Return the model adapted to the samples ``x`` (N, ...) in the way ``how``, one of ``HOW``.

        ``test-batch`` does not use ``x``. Pass its model, with the clients' average
        statistics, to ``with_batch_statistics`` before an evaluation.

        Raises:
            NotAdaptable: The way is impossible (``refusal``), or a layer gets fewer
                than two values per channel.
            ValueError: ``how`` is not in ``HOW``.
        """
        if reason := self.refusal(how):
            raise NotAdaptable(reason)
        if how == TEST_BATCH:
            return self._with(self._average)
        model = self._with({name: self._average[name] for name in self._affine} if how == AVERAGE_AFFINE else {})
        recompute_statistics(model, x)
        return model

    def _with(self, tensors: Named) -> nn.Module:
        model = copied(self._network)
        load_tensors(model, {**self.known.shared, **tensors})
        return model.eval()


def recompute_statistics(model: nn.Module, x: Tensor) -> None:
    """Set the statistics of ``model`` to mean and unbiased variance over ``x`` (N, ...).

    Layers before a layer get theirs first.

    Raises:
        NotAdaptable: A layer gets fewer than two values per channel.
    """
    samples = Samples(x, torch.zeros(len(x), dtype=torch.int64))
    by_layer = statistics_pass(model, samples)
    if few := [name for name, moments in by_layer.items() if moments.count < 2]:
        raise NotAdaptable(
            f"layer {few[0]}: a variance needs at least 2 values per channel, but got {len(x)} sample(s): adapt with more samples"
        )
    recalibrate(model, [samples])


def with_batch_statistics(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` that always normalises batches with their own statistics."""
    model = copied(model)
    for layer in batch_norms(model).values():
        layer.running_mean = layer.running_var = None
    return model.eval()


def _check(whose: str, state: Named, model: nn.Module, names: Sequence[str]) -> None:
    own = model.state_dict()
    for name in names:
        problem = f"is {tuple(state[name].shape)}" if name in state else "is missing"
        if name not in state or state[name].shape != own[name].shape:
            raise NotAdaptable(
                f"{whose}: expected {name} of shape {tuple(own[name].shape)}, but it {problem}: use a run of this network and method"
            )
