"""Adapt a trained model to a new client, with its unlabelled samples and the run's tensors.

There are three ways to choose BatchNorm's affine parameters and statistics. "Known" clients are those that trained:

    average-affine   the mean affine parameters of the known clients, and the new client's own statistics. FedBN: Federated
                     Learning on Non-IID Features via Local Batch Normalization, Li et al., ICLR 2021, appendix G
    recompute        the affine parameters of the shared model (the initial ones, if clients keep theirs), and the new
                     client's own statistics
    test-batch       the affine parameters of average-affine, and the statistics of each test batch: no other samples are
                     needed. Nado et al., Evaluating Prediction-Time Batch Normalization for Robustness under Covariate
                     Shift, 2020; Schneider et al., NeurIPS 2020

If a method shares the affine parameters, ``average-affine`` and ``recompute`` both take the shared ones, and are the same.

Legend: N samples, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fl_bn.bn.conversion import convert
from fl_bn.bn.derived import load_tensors
from fl_bn.bn.modules import copied
from fl_bn.bn.moments import Running
from fl_bn.bn.roles import Role, batch_norms
from fl_bn.federation.aggregation import average
from fl_bn.federation.local import Samples, statistics_pass
from fl_bn.federation.recalibration import recalibrate, without_statistics
from fl_bn.federation.schema import Locality
from fl_bn.federation.settings import seeded
from fl_bn.federation.values import Named
from fl_bn.methods import INPUTS, Method, Place, StatisticsPass
from fl_bn.support.names import check_name

HOW = AVERAGE_AFFINE, RECOMPUTE, TEST_BATCH = "average-affine", "recompute", "test-batch"


class NotAdaptable(ValueError):
    """Report why a model cannot be adapted to a new client."""


@dataclass(frozen=True)
class Known:
    """Hold the tensors of a finished run, by their names in the state_dict.

    Attributes:
        shared: The server's tensors.
        clients: Name of a known client -> all tensors of its model. Empty if clients keep none, or if not available.
        average: The average of the tensors that clients keep. Give it if ``clients`` is empty.
    """

    shared: Named
    clients: Mapping[str, Named] = field(default_factory=dict)
    average: Named = field(default_factory=dict)


class Adaptation:
    """Make models for new clients from a finished run. ``network`` is unconverted, and stays unchanged.

    Raises:
        NotAdaptable: The method shares no tensor, the network has no statistics, or ``known`` is another one's.
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
        """Return the model of shared tensors and the clients' average ones; None if unknown."""
        return None if any(name not in self._average for name in self._kept) else self._with(self._average)

    def refusal(self, how: str) -> str:
        """Return why this run's model cannot be adapted in the way ``how``; empty if it can."""
        check_name("how to adapt", how, HOW)
        if how in (AVERAGE_AFFINE, TEST_BATCH) and any(name not in self._average for name in self._affine):
            return f"{how}: the affine parameters that {self.method.name} keeps at the clients, or their average, are needed, but not given"
        return ""

    def adapt(self, how: str, x: Tensor) -> nn.Module:
        """Return the model adapted to the samples ``x`` (N, ...) in the way ``how``, one of ``HOW``.

        With ``test-batch``, ``x`` is not used, and the model has the clients' average statistics. To evaluate it,
        pass it to ``with_batch_statistics`` first.

        Raises:
            NotAdaptable: The way is impossible (see ``refusal``), or a layer gets fewer than two values per channel.
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
    """Set the statistics of ``model``, in place, to mean and unbiased variance over ``x`` (N, ...).

    A layer is measured after all layers before it have their new statistics.
    """
    input_statistics(model, x)
    recalibrate(model, [_unlabelled(x)])


def input_statistics(model: nn.Module, x: Tensor) -> dict[str, Running]:
    """Return the statistics of BatchNorm layers' inputs over ``x`` (N, ...), in evaluation mode."""
    by_layer = statistics_pass(model, _unlabelled(x), StatisticsPass.for_exchange(INPUTS), seeded(0))
    if few := [name for name, moments in by_layer.items() if moments.count < 2]:
        raise NotAdaptable(
            f"layer {few[0]}: a variance needs at least 2 values per channel, but got {len(x)} sample(s): adapt with more samples"
        )
    return {name: Running(moments.mean.cpu(), moments.bessel().cpu()) for name, moments in by_layer.items()}


def with_batch_statistics(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` whose layers always normalise batches with their own statistics."""
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
