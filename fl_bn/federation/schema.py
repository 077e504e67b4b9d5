"""A schema says what a payload must hold. The receiver derives it from its own model, method and phase, and refuses all else by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import nn

from fl_bn.exchange.session import LARGEST_COUNT
from fl_bn.federation.auxiliary import Auxiliary, has_auxiliary
from fl_bn.federation.blocks import dtype_name, extremes
from fl_bn.federation.payload import Payload, tensor_name
from fl_bn.methods import MOMENTS, Method, Phase, Report
from fl_bn.moments import bounds
from fl_bn.roles import Role, batch_norms, roles
from fl_bn.wire import WireError, said

FLOATS = ("float32", "float64")
SMALL = 1 << 14  # values of a tensor that is looked at together with others


@dataclass(frozen=True)
class Spec:
    """One tensor: its shape, its dtype's name as in NumPy, and the smallest and the largest value it may hold."""

    shape: tuple[int, ...]
    dtype: str
    at_least: float = -np.inf
    at_most: float = np.inf

    @cached_property
    def any_number(self) -> bool:
        """Whether every finite number may be in it."""
        return self.dtype in FLOATS and self.at_least == -np.inf and self.at_most == np.inf

    def shaped(self, array: np.ndarray) -> bool:
        """Whether shape and dtype are as they should be."""
        return array.shape == self.shape and dtype_name(array.dtype) == self.dtype

    def check(self, section: str, name: str, array: np.ndarray) -> float:
        """The largest size of a number in ``array``, 0 if it holds whole numbers. Raises WireError where it is not as the spec says."""
        if array.shape != self.shape:
            raise WireError(section, name, f"expected shape {self.shape}, but got {array.shape}")
        if dtype_name(array.dtype) != self.dtype:
            raise WireError(section, name, f"expected dtype {self.dtype}, but got {array.dtype}")
        if array.size == 0:
            return 0.0
        least, most = extremes(array)
        if array.dtype.kind == "f" and not (np.isfinite(least) and np.isfinite(most)):
            wrong = int(array.size - np.isfinite(array).sum())
            raise WireError(section, name, f"{wrong} of {array.size} values are not finite (NaN or Inf)")
        if least < self.at_least:
            raise WireError(section, name, f"expected values >= {self.at_least:.3g}, but the smallest is {least:.3g}")
        if most > self.at_most:
            raise WireError(section, name, f"expected values <= {self.at_most:.3g}, but the largest is {most:.3g}")
        return max(-least, most) if array.dtype.kind == "f" else 0.0


@dataclass(frozen=True)
class Schema:
    """The sections of a payload, and in each the tensors that must be there, no more and no less.

    ``optional``: sections that may be absent.
    """

    sections: dict[str, dict[str, Spec]]
    optional: dict[str, dict[str, Spec]] = field(default_factory=dict)

    def check(self, payload: Payload) -> float:
        """The largest size of a number in ``payload``.

        Raises:
            WireError: for the first section or tensor that is missing, extra, ill-shaped, ill-typed or out of range.
        """
        largest = 0.0
        for section, specs in [*self.sections.items(), *((k, specs) for k, specs in self.optional.items() if k in payload)]:
            if section not in payload:
                raise WireError(section, "", f"missing: expected {len(specs)} tensors, but got sections {said(sorted(payload))}")
            arrays = payload[section]
            for name in specs:
                if name not in arrays:
                    raise WireError(section, name, "missing")
            for name in arrays:
                if name not in specs:
                    raise WireError(section, name, "extra: nothing of that name was asked for")
            usual, size = _usual(specs, arrays)
            largest = max([largest, size, *(specs[name].check(section, name, arrays[name]) for name in specs if name not in usual)])
        for section in payload:
            if section not in self.sections and section not in self.optional:
                raise WireError(section, "", f"extra: expected only {sorted(self.sections)}")
        return largest


def _usual(specs: Mapping[str, Spec], arrays: Mapping[str, np.ndarray]) -> tuple[set[str], float]:
    """The names of small tensors that may hold any number, and are as their specs say; and the largest size of a number in them.

    They are looked at together, which takes a fraction of the time. No names where one of the numbers is not finite.
    """
    free = {name: arrays[name] for name, spec in specs.items() if spec.any_number and spec.shaped(arrays[name])}
    small = {name: array for name, array in free.items() if 0 < array.size <= SMALL}
    if len(small) < 2 or len({array.dtype for array in small.values()}) > 1:
        return set(), 0.0
    least, most = extremes(np.concatenate([array.ravel() for array in small.values()]))
    return (set(small), max(-least, most)) if np.isfinite(least) and np.isfinite(most) else (set(), 0.0)


def names(model: nn.Module, method: Method, *wanted: Role) -> list[str]:
    """State_dict names of the tensors in ``wanted`` roles that travel under ``method``."""
    return [name for name, role in roles(model).items() if role in wanted and method.shares(role)]


KEPT = "kept"  # section, and query, of layers that stay at home
START = "start"  # section of the same layers as the run starts with, for a client that keeps none yet
WEIGHTS = (Role.WEIGHT, Role.AFFINE, Role.OTHER_AFFINE, Role.BUFFER)


def instruction(model: nn.Module, method: Method, auxiliary: Sequence[Auxiliary] = ()) -> Schema:
    """Describe what the server sends: weights, statistics that are shared, and, for training, what accompanies the weights.

    A client that keeps nothing yet may also be sent the start of what it will keep, section ``START``.
    """
    state = model.state_dict()
    start = {START: {name: _spec(name, state[name]) for name in at_home(model, method)}}
    return Schema(_shared(model, method, True, _spec) | _auxiliary(model, method, auxiliary), start if start[START] else {})


def at_home(model: nn.Module, method: Method) -> list[str]:
    """Return the names of the tensors that clients keep and that a run may start with: all local ones but HBN's mixing logits, which start
    at 0 everywhere."""
    wanted = method.local - {Role.MIXING}
    return [name for name, role in roles(model).items() if role in wanted]


def reply(model: nn.Module, method: Method, phase: Phase, update: str = "weights", auxiliary: Sequence[Auxiliary] = ()) -> Schema:
    """Describe what a client sends in ``phase``: weights or gradients, what accompanies them, and its report of statistics."""
    report = method.reports(phase)
    sections: dict[str, dict[str, Spec]] = {}
    if phase is not Phase.MEASURE:
        sections = _shared(model, method, report is Report.RUNNING, _reported)
        if update == "gradients":
            learnable = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
            sections["gradients"] = {name: spec for name, spec in sections.pop("weights").items() if name in learnable}
        sections |= _auxiliary(model, method, auxiliary)
    if report in MOMENTS:
        sections["moments"] = {}
        for layer, module in batch_norms(model).items():
            if (mean := module.running_mean) is None:
                continue  # keeps no statistics, so none are asked for
            sections["moments"] |= {
                tensor_name(layer, "count"): Spec((1,), "int64", 0, LARGEST_COUNT),  # 0: the layer did not run
                tensor_name(layer, "mean"): _reported(tensor_name(layer, "mean"), mean),
                tensor_name(layer, "var"): _reported(tensor_name(layer, "var"), mean),
            }
    return Schema(sections)


def kept_layers(model: nn.Module, method: Method) -> Schema:
    """Describe what a client that is asked for it sends of its own layers: the scale, shift and statistics that ``method`` keeps there."""
    state, wanted = model.state_dict(), method.local & {Role.AFFINE, Role.STATISTIC}
    return Schema({KEPT: {name: _spec(name, state[name]) for name, role in roles(model).items() if role in wanted}})


def _spec(name: str, tensor: torch.Tensor) -> Spec:
    return Spec(tuple(tensor.shape), _dtype(tensor), 0.0 if name.rpartition(".")[2] == "running_var" else -np.inf)


def _reported(name: str, like: torch.Tensor) -> Spec:
    """A statistic that a client reports: bounded, so that what is made of several is finite."""
    mean, var = bounds(like.dtype)
    limits = (0.0, var) if name.endswith("var") else (-mean, mean)
    return Spec(tuple(like.shape), _dtype(like), *limits)


def _shared(model: nn.Module, method: Method, statistics: bool, of: Callable[[str, torch.Tensor], Spec]) -> dict[str, dict[str, Spec]]:
    state = model.state_dict()
    sections = {"weights": {k: Spec(tuple(state[k].shape), _dtype(state[k])) for k in names(model, method, *WEIGHTS)}}
    if statistics and (shared := names(model, method, Role.STATISTIC)):
        sections["statistics"] = {k: of(k, state[k]) for k in shared}
    return sections


def _auxiliary(model: nn.Module, method: Method, auxiliary: Sequence[Auxiliary]) -> dict[str, dict[str, Spec]]:
    like = has_auxiliary(model, method) if auxiliary else {}
    return {c.section: {k: Spec(tuple(c.like(p).shape), _dtype(p), c.at_least) for k, p in like.items()} for c in auxiliary}


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
