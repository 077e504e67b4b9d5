"""Adapt a trained model to a new client, with its unlabelled samples and the tensors of the clients that trained.

There are four ways to choose BatchNorm's affine parameters and statistics. "Known" clients are those that trained:

    average-affine   the mean affine parameters of the known clients, and the new client's own statistics. FedBN: Federated
                     Learning on Non-IID Features via Local Batch Normalization, Li et al., ICLR 2021, appendix G
    recompute        the affine parameters of the shared model (the initial ones, if clients keep theirs), and the new
                     client's own statistics
    nearest          all tensors that one known client keeps, including its statistics. It is the client with the most
                     similar data
    test-batch       the affine parameters of average-affine, and the statistics of each test batch: no other samples are
                     needed. Nado et al., Evaluating Prediction-Time Batch Normalization for Robustness under Covariate
                     Shift, 2020; Schneider et al., NeurIPS 2020

If a method shares the affine parameters, ``average-affine`` and ``recompute`` both take the shared ones, and are the same.

**The similarity** of two clients' data is measured at the input of the first BatchNorm layer whose statistics clients keep.
The distribution of this input depends only on the data and on the shared tensors below the layer. So the statistics that a
known client keeps for this layer can be compared with those that the new client measures. Deeper layers cannot be compared: their inputs
went through BatchNorm layers with each client's own affine parameters and statistics. The distance is the symmetric
Kullback-Leibler divergence of Gaussians, averaged over channels. Scaling a channel changes neither this distance nor
BatchNorm's output. Scaling would change the 2-Wasserstein distance, in which channels of large variance dominate.
Running statistics from training are a little older than the weights. So they differ a little from statistics that are
measured afterwards on the same data.

Legend: N samples, C channels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from fl_bn.bn.conversion import convert
from fl_bn.bn.copying import copied
from fl_bn.bn.derived import load_tensors
from fl_bn.bn.moments import Running
from fl_bn.bn.roles import Role, batch_norms, inputs_like
from fl_bn.federation.aggregation import average
from fl_bn.federation.local import Samples, statistics_pass
from fl_bn.federation.locality import Locality
from fl_bn.federation.payload import Named
from fl_bn.federation.recalibration import epsilons, recalibrate, without_statistics
from fl_bn.federation.settings import seeded
from fl_bn.methods import INPUTS, Method, Place, StatisticsPass
from fl_bn.support.names import check_name

AVERAGE_AFFINE, RECOMPUTE, NEAREST, TEST_BATCH = "average-affine", "recompute", "nearest", "test-batch"
HOW = (AVERAGE_AFFINE, RECOMPUTE, NEAREST, TEST_BATCH)


class NotAdaptable(ValueError):
    """Report that a model cannot be adapted to a new client. The message has the reason."""


@dataclass(frozen=True)
class Known:
    """Hold the tensors of a finished run, by their names in the state_dict.

    Attributes:
        shared: The server's tensors.
        clients: Name of a known client -> all tensors of its model. Empty if clients keep no tensors, or if their
            models are not available.
        average: The average of the tensors that clients keep. Give it if ``clients`` is empty.
    """

    shared: Named
    clients: Mapping[str, Named] = field(default_factory=dict)
    average: Named = field(default_factory=dict)


@dataclass(frozen=True)
class Adapted:
    """Hold a model for the new client.

    Attributes:
        model: The model.
        distances: With ``nearest``: name of a known client -> the distance between its data and the new client's. The
            model has the tensors of the client with the smallest distance. Empty for other ways.
    """

    model: nn.Module
    distances: Mapping[str, float] = field(default_factory=dict)


class Adaptation:
    """Make models for new clients from one finished run.

    Args:
        network: The network as its author wrote it, with the initial weights. It stays unchanged.
        method: The run's method.
        known: The run's tensors.

    Raises:
        NotAdaptable: The method shares no tensor, the network has no statistics, or ``known`` belongs to another network
            or method.
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
        self._locality, self._affine = locality, locality.names(Place.HOME, of=[Role.AFFINE])
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
        """Return the model of a new client before adaptation: the shared tensors, and the average of the clients' own tensors.

        Return None if this average is unknown.
        """
        return None if any(name not in self._average for name in self._kept) else self._with(self._average)

    def refusal(self, how: str) -> str:
        """Return the reason why this run's model cannot be adapted in the way ``how``; empty if it can.

        Raises:
            ValueError: ``how`` is not in ``HOW``.
        """
        check_name("how to adapt", how, HOW)
        if how == NEAREST and not self._locality.home_statistics:
            return f"nearest: {self.method.name} shares all statistics of BatchNorm, so no client keeps any that a new client could take"
        if how == NEAREST and not self.known.clients:
            return "nearest: the models of the clients that trained are needed, but not given"
        if how in (AVERAGE_AFFINE, TEST_BATCH) and any(name not in self._average for name in self._affine):
            return f"{how}: the affine parameters that {self.method.name} keeps at the clients, or their average, are needed, but not given"
        return ""

    def adapt(self, how: str, x: Tensor) -> Adapted:
        """Adapt the model in the way ``how``.

        With ``test-batch``, the returned model has the clients' average statistics. To evaluate it, pass it to
        ``with_batch_statistics`` first.

        Args:
            how: One of ``HOW``.
            x: The new client's samples (N, ...), without labels. ``test-batch`` does not use them.

        Returns:
            The adapted model, and with ``nearest`` the distances between the clients' data.

        Raises:
            NotAdaptable: The way is impossible (see ``refusal``), or a layer gets fewer than two values per channel.
            ValueError: ``how`` is not in ``HOW``.
        """
        if reason := self.refusal(how):
            raise NotAdaptable(reason)
        if how == NEAREST:
            distances = self._distances(x)
            chosen = self.known.clients[min(distances, key=distances.__getitem__)]
            return Adapted(self._with({name: chosen[name] for name in self._kept}), distances)
        if how == TEST_BATCH:
            return Adapted(self._with(self._average))
        model = self._with({name: self._average[name] for name in self._affine} if how == AVERAGE_AFFINE else {})
        recompute_statistics(model, x)
        return Adapted(model)

    def _with(self, tensors: Named) -> nn.Module:
        model = copied(self._network)
        load_tensors(model, {**self.known.shared, **tensors})
        return model.eval()

    def _distances(self, x: Tensor) -> dict[str, float]:
        model = self._with({})
        name, eps = first_layer(model, x, self._locality.home_statistics)
        own = input_statistics(model, x)[name]
        mean, var = (f"{name}.{key}" if name else key for key in ("running_mean", "running_var"))
        return {
            client: divergence(own, Running(state[mean].double(), state[var].double()), eps) for client, state in self.known.clients.items()
        }


def recompute_statistics(model: nn.Module, x: Tensor) -> None:
    """Set the statistics of ``model``, in place, to the mean and the unbiased variance over all of ``x`` (N, ...).

    A layer is measured after all layers before it have their new statistics. This is ``recalibrate`` with one client.

    Raises:
        NotAdaptable: A layer gets fewer than two values per channel.
    """
    input_statistics(model, x)
    recalibrate(model, [_unlabelled(x)])


def input_statistics(model: nn.Module, x: Tensor) -> dict[str, Running]:
    """Return the statistics of each BatchNorm layer's input over ``x`` (N, ...), in evaluation mode.

    Raises:
        NotAdaptable: A layer gets fewer than two values per channel.
    """
    by_layer = statistics_pass(model, _unlabelled(x), StatisticsPass.for_exchange(INPUTS), seeded(0))
    if few := [name for name, moments in by_layer.items() if moments.count < 2]:
        raise NotAdaptable(
            f"layer {few[0]}: a variance needs at least 2 values per channel, but got {len(x)} sample(s): adapt with more samples"
        )
    return {name: Running(moments.mean.cpu(), moments.bessel().cpu()) for name, moments in by_layer.items()}


@torch.no_grad()
def first_layer(model: nn.Module, x: Tensor, among: Collection[str] | None = None) -> tuple[str, float]:
    """Return the name and the eps of the BatchNorm layer that ``x`` reaches first in the forward pass.

    Only the first sample is used. ``model`` stays in evaluation mode afterwards. Layers that are not ``among`` count as none.
    """
    order: list[str] = []
    layers = {name: layer for name, layer in batch_norms(model).items() if among is None or name in among}
    handles = [layer.register_forward_pre_hook(lambda *_, name=name: order.append(name)) for name, layer in layers.items()]
    try:
        model.eval()(_unlabelled(x).batch(np.arange(1), inputs_like(model))[0])
    finally:
        for handle in handles:
            handle.remove()
    return order[0], epsilons(model)[order[0]]


def divergence(a: Running, b: Running, eps: float = 0.0) -> float:
    """Return the mean over channels (C,) of KL(a || b) + KL(b || a), where each channel is a Gaussian.

    Args:
        a: The statistics of one client.
        b: The statistics of another client.
        eps: The number that is added to both variances, as in BatchNorm.

    >>> divergence(Running(torch.zeros(1), torch.ones(1)), Running(torch.ones(1), torch.ones(1)))
    1.0
    """
    var_a, var_b = a.var.double() + eps, b.var.double() + eps
    shift = (a.mean.double() - b.mean.double()).square()
    return float(((var_a / var_b + var_b / var_a) / 2 - 1 + shift * (1 / var_a + 1 / var_b) / 2).mean())


def with_batch_statistics(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` whose BatchNorm layers normalise each batch with the statistics of this batch, also in evaluation."""
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


def _unlabelled(x: Tensor) -> Samples:
    return Samples(x, torch.zeros(len(x), dtype=torch.int64))
