"""The server's model: what is shared, as a payload, as Flower's arrays, and as the statistics and weights that a round changes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor, nn

from fl_bn.conversion import convert
from fl_bn.federation.aggregation import average, combine, pseudo_gradient, running_statistics
from fl_bn.federation.companions import Companion, accompanied
from fl_bn.federation.defence import Defence, undercut
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.recalibration import epsilons
from fl_bn.federation.unit_scale import producers, rescaled
from fl_bn.flower import schema
from fl_bn.flower.codec import Header, Payload, decode_moments, signature, tensor_name, tensors_of, to_numpy, to_tensors
from fl_bn.flower.log import log
from fl_bn.flower.replies import Contribution
from fl_bn.methods import Method, Phase, Report, replace_by_pooled
from fl_bn.moments import Moments, Running
from fl_bn.roles import Role, batch_norms


class NotFinite(Exception):
    """What was to become tensor ``name`` of the shared model is not finite in its dtype. Nothing was changed."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"{name}: what came out of the clients' replies together is not finite")

    def farthest(self, parts: Sequence[Contribution]) -> int:
        """The position of the contribution with the largest value in that tensor."""
        return max(range(len(parts)), key=lambda i: self._size(parts[i]))

    def refusal(self, part: Contribution) -> str:
        return f"{self.name}: the clients' replies together are not finite, and its own is the largest ({self._size(part):.3g})"

    def _size(self, part: Contribution) -> float:
        section, _, name = self.name.rpartition("/")
        layer, _, key = name.rpartition(".")
        moment = tensor_name(layer, key.removeprefix("running_"))
        if section:
            found = [part.payload[section][name]]
        else:
            found = [arrays[n] for arrays in part.payload.values() for n in (name, moment) if n in arrays]
        return max((float(np.abs(array.astype(np.float64)).max(initial=0)) for array in found), default=0.0)


class SharedModel:
    """``model`` converted for ``method``, seen from the server. Local tensors are there too, but never travel and never change.

    ``clients``: in the population.
    """

    def __init__(self, model: nn.Module, method: Method, companions: Sequence[Companion] = (), clients: int = 1) -> None:
        self.method, self._companions, self._clients = method, companions, clients
        self._source, self.model = model, convert(model, method).cpu()
        self.signature = signature(self.model, method)
        self.layers = batch_norms(self.model)
        self._learnable = {name for name, p in self.model.named_parameters(remove_duplicate=False) if p.requires_grad}
        self._shares_statistics = method.shares(Role.STATISTIC)
        like = accompanied(self.model, method)
        self.companions = {c.section: {name: c.like(p.detach()) for name, p in like.items()} for c in companions}

    def header(self, round: int, phase: Phase) -> Header:
        return Header(self.method.name, phase.value, round, self.signature)

    def payload(self) -> Payload:
        """What goes down: weights, and statistics unless they stay home."""
        state = self.model.state_dict()
        sections = schema.instruction(self.model, self.method).sections
        return {section: to_numpy({name: state[name] for name in names}) for section, names in sections.items()}

    def payload_to_train(self, optimizer: ServerOptimizer) -> Payload:
        """What goes down when clients train: from where ``optimizer`` lets them start, and what accompanies the weights."""
        payload, state = self.payload(), self.model.state_dict()
        ahead = optimizer.lookahead({name: state[name] for name in self._learnable})
        payload["weights"] |= to_numpy({name: tensor.to(state[name].dtype) for name, tensor in ahead.items()})
        return payload | {section: to_numpy(tensors) for section, tensors in self.companions.items()}

    def _accompanied(self, parts: Sequence[Contribution], weights: Sequence[float]) -> dict[str, dict[str, Tensor]]:
        """What came beside the weights, combined."""
        new = {}
        for companion in self._companions:
            came = [to_tensors(part.payload[companion.section]) for part in parts]
            new[companion.section] = companion.combine(self.companions[companion.section], came, weights, self._clients)
        return new

    def arrays(self) -> ArrayRecord:
        """Everything shared, by state_dict name."""
        named = {name: array for section in self.payload().values() for name, array in section.items()}
        return ArrayRecord({name: Array(array) for name, array in named.items()})

    def load(self, arrays: ArrayRecord) -> None:
        self.model.load_state_dict(tensors_of(arrays), strict=False)

    def unit_scaled(self, arrays: ArrayRecord) -> ArrayRecord:
        """``arrays`` on unit scale, see ``unit_scale.rescaled``; as they are, with a warning, where the network cannot be traced."""
        try:
            made = producers(self._source)
        except ValueError as error:
            log(logging.WARNING, "the initial weights keep their scale, so mind the learning rate: %s", error)
            return arrays
        log(logging.INFO, "unit scale: the layers before %d of %d BatchNorm layers are rescaled", len(made), len(self.layers))
        self.load(arrays)
        eps = epsilons(self.model)
        self.model.load_state_dict(rescaled(self.model.state_dict(), self.statistics(), eps, made), strict=False)
        return self.arrays()

    def restore(self, tensors: Mapping[str, Tensor], companions: Mapping[str, Tensor]) -> None:
        """``companions``: by ``section/name``. Raises ValueError where they are not exactly what is shared, by name, shape and dtype."""
        mine = tensors_of(self.arrays()) | self.accompanying()
        came = {**tensors, **companions}
        for name in mine.keys() | came.keys():
            ours, theirs = (f"{tuple(t[name].shape)} {t[name].dtype}" if name in t else "nothing" for t in (mine, came))
            if ours != theirs:
                raise ValueError(f"{name}: the run shares {ours}, but the checkpoint has {theirs}")
        self.model.load_state_dict(tensors, strict=False)
        self.companions = {k: {name: companions[f"{k}/{name}"] for name in section} for k, section in self.companions.items()}

    def accompanying(self) -> dict[str, Tensor]:
        """What accompanies the weights, by ``section/name``."""
        return {f"{k}/{name}": tensor for k, section in self.companions.items() for name, tensor in section.items()}

    def statistics(self) -> dict[str, Running]:
        """Shared running statistics by layer; empty where they stay home."""
        return running_statistics(self.model) if self._shares_statistics else {}

    def store(self, statistics: Mapping[str, Running]) -> None:
        """Raises NotFinite, and changes nothing, where the model's dtype cannot hold them."""
        self._load_all(_named(statistics))

    def _load_all(self, tensors: Mapping[str, Tensor]) -> None:
        state = self.model.state_dict()
        for name, tensor in tensors.items():
            if not _fits(tensor, state[name].dtype):
                raise NotFinite(name)
        self.model.load_state_dict(dict(tensors), strict=False)

    def change(
        self,
        parts: Sequence[Contribution],
        weights: Sequence[float],
        optimizer: ServerOptimizer,
        rate: float,
        defence: Defence,
        statistics: Mapping[str, Running],
    ) -> list[float]:
        """One server step, along the pseudo-gradient ``weights - average`` or with the clients' averaged gradients at ``rate``, and the new
        shared ``statistics``: all of it or, where anything is not finite, none.

        Returns the distance of each update to what ``defence`` made of all; empty without one.

        Raises:
            NotFinite: the model's dtype cannot hold what came out, or what clients would start from then.
        """
        before, state = optimizer.buffers(), self.model.state_dict()
        try:
            new, distances = self._stepped(parts, weights, optimizer, rate, defence)
            companions = self._accompanied(parts, weights)
            ahead = optimizer.lookahead({name: new.get(name, state[name]) for name in self._learnable})
            for name, tensor in [*ahead.items(), *((f"{k}/{n}", t) for k, section in companions.items() for n, t in section.items())]:
                if not _fits(tensor, state[name].dtype if name in state else tensor.dtype):
                    raise NotFinite(name)
            self._load_all(new | _named(statistics))
        except NotFinite:
            optimizer.restore(before)
            raise
        self.companions |= companions
        return distances

    def _stepped(
        self, parts: Sequence[Contribution], weights: Sequence[float], optimizer: ServerOptimizer, rate: float, defence: Defence
    ) -> tuple[dict[str, Tensor], list[float]]:
        section, distances = "gradients" if "gradients" in parts[0].payload else "weights", list[float]()
        state, tensors = self.model.state_dict(), [to_tensors(part.payload[section]) for part in parts]
        if not tensors[0]:
            return {}, distances  # all weights stay home
        if defence.updates == "mean":
            mean = average(tensors, weights)
        else:
            mean, report = defence.update(tensors, None if section == "gradients" else state)
            distances = [float(distance) for distance in report.distances]
        if section == "gradients":
            return optimizer.step(state, mean, rate), distances
        pseudo = pseudo_gradient(state, {name: mean[name] for name in mean if name in self._learnable})
        return {name: mean[name] for name in mean if name not in self._learnable} | optimizer.step(state, pseudo), distances

    def combined(self, parts: Sequence[Contribution], phase: Phase, defence: Defence, pace: float = 1.0) -> dict[str, Running]:
        """The shared statistics after this round's reports, float64. ``pace``: see ``LayerReports``."""
        shared, report = self.statistics(), self.method.reports(phase)
        if report is Report.NOTHING:
            return shared
        if report is Report.RUNNING:
            reports = [self._running(to_tensors(part.payload.get("statistics", {})), part.weight) for part in parts]
        else:
            reports = [decode_moments(part.payload["moments"]) for part in parts]
        return combine(self.method.combine, shared, reports, [part.steps for part in parts], self.layers, defence, pace)

    def undercut(self, parts: Sequence[Contribution], phase: Phase) -> dict[int, str]:
        """Contributions, by position, whose running variances no honest training can have left, with the reason."""
        if self.method.reports(phase) is not Report.RUNNING:
            return {}
        reports = [self._running(to_tensors(part.payload.get("statistics", {})), part.weight) for part in parts]
        running = [{layer: Running(m.mean, m.var) for layer, m in report.items()} for report in reports]
        wrong = {
            i: f"metrics/updates: expected one number for each of {len(self.layers)} layers, but got {len(part.updates)}"
            for i, part in enumerate(parts)
            if part.updates and len(part.updates) != len(self.layers)
        }
        updates = [{} if i in wrong else dict(zip(self.layers, part.updates, strict=False)) for i, part in enumerate(parts)]
        return undercut(self.statistics(), running, [part.steps for part in parts], self.layers, updates) | wrong

    def measured(self, parts: Sequence[Contribution], defence: Defence) -> dict[str, Running]:
        """The shared statistics that a statistics-only exchange found under the present weights."""
        reports = [decode_moments(part.payload["moments"]) for part in parts]
        return combine(replace_by_pooled, self.statistics(), reports, [1] * len(parts), self.layers, defence)

    def _running(self, statistics: Mapping[str, Tensor], weight: int) -> dict[str, Moments]:
        return {
            layer: Moments(weight, statistics[mean].double(), statistics[tensor_name(layer, "running_var")].double())
            for layer in self.layers
            if (mean := tensor_name(layer, "running_mean")) in statistics
        }


def _named(statistics: Mapping[str, Running]) -> dict[str, Tensor]:
    means = {tensor_name(layer, "running_mean"): running.mean for layer, running in statistics.items()}
    return means | {tensor_name(layer, "running_var"): running.var for layer, running in statistics.items()}


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point or bool(tensor.to(dtype).isfinite().all())
