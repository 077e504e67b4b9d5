"""Hold the server's model: shared weights and statistics, and auxiliary tensors."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_bn.bn.conversion import convert
from fl_bn.bn.derived import load_tensors, plain_names, recompute
from fl_bn.bn.modules import copied, held_layers
from fl_bn.bn.moments import Moments, Running
from fl_bn.bn.roles import Role, batch_norms
from fl_bn.exchange.call import Layer
from fl_bn.exchange.session import exchanged_layers
from fl_bn.federation import schema
from fl_bn.federation.aggregation import Defence, WeightedSum, average, combine, difference, fits, running_statistics
from fl_bn.federation.auxiliary import Auxiliary
from fl_bn.federation.network import Copy
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.recalibration import epsilons
from fl_bn.federation.unit_scale import producers, rescaled
from fl_bn.federation.values import Instruction, Named, Reply, Sections, decode_moments, tensor_name
from fl_bn.methods import INPUTS, Method, Phase, Place, Refresh, StatisticsReport, replace_by_pooled

LOGGER = logging.getLogger("flwr")


class NotFinite(Exception):
    """Report that a tensor of the shared model would not be finite. The model is unchanged."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name}: the combination of the clients' replies is not finite")


@dataclass(frozen=True)
class ServerStep:
    """Hold the inputs of a server step.

    Attributes:
        rate: The clients' learning rate, which multiplies the server's step if
            clients send gradients.
        sum: The weighted sum of the replies, if each was added when it arrived.
        phase: The phase of the round, which decides what is frozen.
    """

    parts: Sequence[Reply]
    weights: Sequence[float]
    optimizer: ServerOptimizer
    rate: float
    defence: Defence | None = None
    sum: WeightedSum | None = None
    phase: Phase = Phase.TRAIN


def median_steps(steps: Iterable[int]) -> int:
    """Return the median of clients' numbers of steps, at least 1: no single claim decides it.

    Zeros are left out. Of two middle numbers, the smaller is taken.
    """
    return median_low([made for made in steps if made > 0] or [1])


class SharedModel:
    """Hold the server's ``model``, converted for ``method``, and clients' initial values.

    Attributes:
        buffers: Floating-point buffers outside of norm layers, averaged like
            weights.
        personal: Whether every client evaluates its own model, because clients keep
            tensors.
        scales: Layer -> the deviation to which its input was rescaled before round
            1.
        reported: The statistics of ``Method.renew``, for ``Refresh.REPORTED``.
        reached: Layers that statistics passes have reached at some client; None
            before.
        unseen: Layers of which no client reported a batch in the newest round.
        said_unmeasured: Whether this run has warned of unreached layers.
    """

    def __init__(self, model: nn.Module, method: Method, auxiliary: Sequence[Auxiliary] = (), clients: int = 1) -> None:
        self.method, self._auxiliary_kinds, self._clients = method, auxiliary, clients
        self._plain = plain_names(model)
        self.model = convert(model, method).cpu()
        self._copy = Copy.of(self.model, method)
        self.signature = self._copy.network.signature
        layers, state = self.model.named_modules(remove_duplicate=False), model.state_dict()
        counters = [tensor_name(name, "num_batches_tracked") for name, layer in layers if isinstance(layer, _BatchNorm)]
        self._counters = {name: state[name].clone() for name in counters if name in state}
        self.locality = self._copy.network.locality
        self.layers = batch_norms(self.model)
        self._learnable = {name for name, p in self.model.named_parameters(remove_duplicate=False) if p.requires_grad}
        self.scales: dict[str, float] = {}
        self.reported: dict[str, Running] = {}
        self.reached: set[str] | None = None
        self.unseen: list[str] = []
        self.said_unmeasured = False
        role, sent_down = self.locality.role, self.locality.names(Place.DOWN_ONLY)
        self._frozen = {name for name in self._learnable if role[name] in method.frozen}
        self.buffers = {name for name, r in role.items() if r is Role.BUFFER}
        self._cumulative = [name for name in sent_down if role[name] is Role.BATCHES]
        self._recomputes = any(role[name] is Role.RECOMPUTED for name in sent_down)
        self.personal = method.personal or any(r is Role.KEPT for r in role.values())
        like = self.locality.trained(self.model)
        self.auxiliary = {c.section: {name: c.like(p.detach()) for name, p in like.items()} for c in auxiliary}

    def learnable(self, phase: Phase) -> set[str]:
        """Return the names of parameters that learn in ``phase``."""
        return self._learnable - self._frozen if phase is Phase.FROZEN else self._learnable

    def held(self, phase: Phase) -> set[str]:
        """Return the names of parameters frozen in ``phase`` by method or owner."""
        return {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - self.learnable(phase)

    def expected(self, phase: Phase, update: str) -> schema.Schema:
        """Return the schema of a reply of ``weights`` or ``gradients`` in ``phase``."""
        if update == "gradients":  # which parameters learn can change
            return schema.reply(self.model, self.locality, phase, update, self._auxiliary_kinds)
        return self._copy.network.reply(phase, update, self._auxiliary_kinds)

    def instruction(self, round: int, phase: Phase, **fields: Any) -> Instruction:
        """Return the instruction to measure or evaluate, with further ``fields``."""
        return Instruction(round, phase, self.sections(), signature=self.signature, **fields)

    def sections(self) -> Sections:
        """Return copies of the shared tensors, by section."""
        state = self._copy.state
        wanted = self._copy.network.instruction().sections
        return {section: {name: state[name].detach().clone() for name in names} for section, names in wanted.items()}

    def start(self) -> Sections:
        """Return section ``START``: initial values of tensors that clients keep."""
        state, names = self._copy.state, self.locality.started_by_server()
        return {schema.START: {name: state[name].detach().clone() for name in names}} if names else {}

    def instruction_to_train(self, round: int, phase: Phase, optimizer: ServerOptimizer, **fields: Any) -> Instruction:
        """Return the instruction to train, also with auxiliary tensors.

        The optimiser's ``lookahead`` may change the weights.
        """
        instruction, state = self.instruction(round, phase, **fields), self._copy.state
        sections = instruction.sections
        ahead = optimizer.lookahead({name: state[name] for name in self.learnable(phase)})
        sections["weights"] |= {name: tensor.to(state[name].dtype) for name, tensor in ahead.items()}
        if ahead and self._recomputes:
            other = copied(self.model)
            load_tensors(other, sections["weights"])
            recompute(other)
            sections["weights"] = {name: other.state_dict()[name] for name in sections["weights"]}
        sections |= {section: dict(tensors) for section, tensors in self.auxiliary.items()}
        return instruction

    def tensors(self) -> dict[str, Tensor]:
        """Return all shared tensors, by state_dict name."""
        return {name: tensor for section in self.sections().values() for name, tensor in section.items()}

    def whole(self, tensors: Named, batches: int = 0, kept: Collection[str] = ()) -> dict[str, Tensor]:
        """Return a ``load_state_dict`` file's tensors: ``kept``, and all not kept by clients.

        The names are those of the unconverted network without wrappers, or, if the
        method replaces BatchNorm, of the converted one. ``batches`` adds to
        ``num_batches_tracked``.
        """
        state, place = self._copy.state, self.locality.place
        saved = {name: tensors.get(name, state[name]) for name in state if name in kept or place[name] is not Place.HOME}
        saved |= {name: count + batches for name, count in self._counters.items() if name in saved and name not in self._cumulative}
        plain = self._plain | plain_names(self.model)
        return {plain[name]: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in saved.items()}

    def counters(self, batches: int) -> dict[str, Tensor]:
        """Return the shared ``num_batches_tracked``: initial values plus ``batches``."""
        return {name: count + batches for name, count in self._counters.items() if self.locality.place[name] is not Place.HOME}

    def load(self, tensors: Named) -> None:
        """Load ``tensors`` (name -> tensor) into the model."""
        self._copy.load(tensors)

    def to_unit_scale(self) -> None:
        """Rescale weights so that BatchNorm's inputs have deviation ``Method.scale``.

        If torch.fx cannot trace the network, only warn.
        """
        try:
            sources = self._rescaled()
        except ValueError as error:
            LOGGER.warning("unit-scale has no effect: %s. If training diverges, lower the learning rate", error)
            return
        LOGGER.info("unit scale: the layers before %d of %d BatchNorm layers are rescaled", len(sources), len(self.layers))
        eps, self.scales = epsilons(self.model), dict.fromkeys(sources, self.method.scale)
        self._copy.load(rescaled(self._copy.state, self.statistics(), eps, sources, self.method.scale))

    def was_at_unit_scale(self) -> None:
        """Set ``scales`` as before round 1, in a run that continues."""
        with suppress(ValueError):  # a network that cannot be traced was not rescaled
            self.scales = dict.fromkeys(self._rescaled(), self.method.scale)

    def _rescaled(self) -> dict[str, str]:
        """Return the BatchNorm layers to rescale, with shared statistics -> the layer before."""
        rescaled = set(self.locality.shared_statistics) - held_layers(self.model)
        return {norm: source for norm, source in producers(self.model).items() if norm in rescaled}

    def restore(self, tensors: Mapping[str, Tensor], auxiliary: Mapping[str, Tensor]) -> None:
        """Load a checkpoint's tensors, ``auxiliary`` ones by ``section/name``.

        Raises:
            ValueError: They differ from the server's in a name, shape or dtype.
        """
        mine = self.tensors() | self.auxiliary_tensors()
        saved = {**tensors, **auxiliary}
        for name in mine.keys() | saved.keys():
            ours, theirs = (f"{tuple(t[name].shape)} {t[name].dtype}" if name in t else "nothing" for t in (mine, saved))
            if ours != theirs:
                raise ValueError(f"{name}: the run shares {ours}, but the checkpoint has {theirs}: use a checkpoint of this run")
        self._copy.load(tensors)
        self.auxiliary = {k: {name: auxiliary[f"{k}/{name}"] for name in section} for k, section in self.auxiliary.items()}

    def auxiliary_tensors(self) -> dict[str, Tensor]:
        """Return ``section/name`` -> auxiliary tensor."""
        return {f"{k}/{name}": tensor for k, section in self.auxiliary.items() for name, tensor in section.items()}

    def statistics(self) -> dict[str, Running]:
        """Return layer -> shared running statistics; empty if clients keep their own."""
        return running_statistics(self.model, self.locality.shared_statistics)

    def exchanged(self) -> dict[str, Layer]:
        """Return the layers with shared statistics, which clients may exchange one by one."""
        return exchanged_layers(self.model, self.locality.shared_statistics)

    def store(self, statistics: Mapping[str, Running]) -> None:
        """Store shared statistics, or raise NotFinite and store none."""
        self._load_all(_named(statistics))

    def _load_all(self, tensors: Mapping[str, Tensor]) -> None:
        state = self._copy.state
        for name, tensor in tensors.items():
            if not fits(tensor, state[name].dtype):
                raise NotFinite(name)
        self._copy.load(tensors)

    def change(self, step: ServerStep, statistics: Mapping[str, Running]) -> list[float]:
        """Make one server step on the weights, and store the new shared ``statistics``.

        The step goes along the pseudo-gradient, or the averaged gradients. Return
        the distance (L2) of each update to a robust rule's, if there is one.

        Raises:
            NotFinite: The model's dtype cannot hold a new tensor, also after the
                look-ahead. Nothing changes.
        """
        before, state = step.optimizer.buffers(), self._copy.state
        try:
            new, distances = self._stepped(step)
            auxiliary = dict[str, dict[str, Tensor]]()
            for extra in self._auxiliary_kinds:
                sent = [part.sections[extra.section] for part in step.parts]
                auxiliary[extra.section] = extra.combine(self.auxiliary[extra.section], sent, step.weights, self._clients)
            ahead = step.optimizer.lookahead({name: new.get(name, state[name]) for name in self.learnable(step.phase)})
            for name, tensor in [*ahead.items(), *((f"{k}/{n}", t) for k, section in auxiliary.items() for n, t in section.items())]:
                if not fits(tensor, state[name].dtype if name in state else tensor.dtype):
                    raise NotFinite(name)
            self._load_all(new | _named(statistics))
            if self._recomputes:
                recompute(self.model)
        except NotFinite:
            step.optimizer.restore(before)
            raise
        self.auxiliary |= auxiliary
        self._copy.load({name: state[name] + median_steps(part.steps for part in step.parts) for name in self._cumulative})
        return distances

    def _stepped(self, step: ServerStep) -> tuple[dict[str, Tensor], list[float]]:
        """Compute new weights in float64, and updates' distances to a robust update."""
        parts, weights, defence = step.parts, step.weights, step.defence
        section, distances = "gradients" if "gradients" in parts[0].sections else "weights", list[float]()
        state, tensors = self._copy.state, [part.sections[section] for part in parts]
        if not tensors[0]:
            return {}, distances  # clients keep all weights
        names = self.learnable(step.phase)
        if step.sum is not None:
            mean = step.sum.mean()
        elif defence is None or defence.updates == "mean":
            mean = average(tensors, weights)
        else:
            mean, report = defence.update(tensors, None if section == "gradients" else state)
            distances = [float(distance) for distance in report.distances]
        for name in (self._frozen - names) & mean.keys():
            mean[name].copy_(state[name])
        learnable = {name: tensor for name, tensor in mean.items() if name in names}
        if section == "gradients":
            step.optimizer.step(state, learnable, None, step.rate)
            return learnable, distances
        step.optimizer.step(state, learnable, difference)
        return mean, distances

    def combined(self, parts: Sequence[Reply], phase: Phase, defence: Defence | None, pace: float = 1.0) -> dict[str, Running]:
        """Combine replies' statistics by the method's rule, in float64, by layer."""
        shared, report = self.statistics(), self.method.reports(phase)
        if report is StatisticsReport.NOTHING:
            return shared
        if report is StatisticsReport.RUNNING:
            reports = [self._running(part.sections.get("statistics", {}), part.weight) for part in parts]
        else:
            reports = [decode_moments(part.sections["moments"]) for part in parts]
        if report is StatisticsReport.PASS:
            self._note_reached(parts, reports)
        elif report is not StatisticsReport.RUNNING:
            self.unseen = [layer for layer in shared if not any(one[layer].count for one in reports if layer in one)]
        steps = [part.steps for part in parts]
        if self.method.refresh is Refresh.REPORTED:
            self.reported = combine(self.method.renew, shared, reports, steps, defence)
        return self.by_rule(reports, steps, pace, defence)

    def by_rule(
        self, reports: Sequence[Mapping[str, Moments]], steps: Sequence[float], pace: float, defence: Defence | None = None
    ) -> dict[str, Running]:
        """Combine moments, or reported running statistics with counts of samples, by the method's rule."""
        least = 1 if self.method.report is StatisticsReport.RUNNING else 2
        return combine(self.method.combine, self.statistics(), reports, steps, defence, pace, self.scales, least)

    def measured(self, parts: Sequence[Reply], defence: Defence | None, what: str = INPUTS) -> dict[str, Running]:
        """Combine the replies of a statistics-only exchange into shared statistics.

        ``inputs`` give those of all clients' data, ``normalisers`` those of
        ``Method.renew``.
        """
        rule = replace_by_pooled if what == INPUTS else self.method.renew
        reports = [decode_moments(part.sections["moments"]) for part in parts]
        self._note_reached(parts, reports)
        return combine(rule, self.statistics(), reports, [1] * len(parts), defence)

    def _note_reached(self, parts: Sequence[Reply], reports: Sequence[Mapping[str, Moments]]) -> None:
        if any(part.samples for part in parts):
            now = {layer for report in reports for layer, moments in report.items() if moments.count}
            self.reached = now | (self.reached or set())

    def _running(self, statistics: Mapping[str, Tensor], weight: int) -> dict[str, Moments]:
        return {
            layer: Moments(weight, statistics[mean].double(), statistics[tensor_name(layer, "running_var")].double())
            for layer in self.layers
            if (mean := tensor_name(layer, "running_mean")) in statistics
        }


def _named(statistics: Mapping[str, Running]) -> dict[str, Tensor]:
    means = {tensor_name(layer, "running_mean"): running.mean for layer, running in statistics.items()}
    return means | {tensor_name(layer, "running_var"): running.var for layer, running in statistics.items()}
