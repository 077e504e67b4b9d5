"""Describe the tensors that a payload must have. The receiver derives the description from its own model, method and phase.

A payload with other tensors is refused, and the error names the first wrong tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import nn

from fl_bn.bn.moments import bounds
from fl_bn.bn.roles import Role
from fl_bn.exchange.session import LARGEST_COUNT
from fl_bn.federation.aggregation import SMALL, dtype_name, extremes
from fl_bn.federation.auxiliary import Auxiliary, has_auxiliary
from fl_bn.federation.locality import Locality
from fl_bn.federation.payload import Payload, tensor_name
from fl_bn.methods import MOMENTS, Phase, Place, StatisticsReport
from fl_bn.support.wire import WireError, excerpt, printable

FLOATS = ("float32", "float64")


@dataclass(frozen=True)
class Spec:
    """Describe one tensor.

    Attributes:
        shape: Its shape.
        dtype: The name of its dtype, as in NumPy.
        at_least: The smallest allowed value.
        at_most: The largest allowed value.
        any_value: Whether every value is allowed, including infinity and NaN.
        sent: The server's values, if some are infinite or NaN. A value with the same bits as the server's is
            allowed, because training did not change it.
    """

    shape: tuple[int, ...]
    dtype: str
    at_least: float = -np.inf
    at_most: float = np.inf
    any_value: bool = False
    sent: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def a_range(self) -> bool:
        """Tell whether exactly the numbers from ``at_least`` to ``at_most`` are allowed."""
        return self.dtype in (*FLOATS, "int64") and not self.any_value and self.sent is None

    def check(self, section: str, name: str, array: np.ndarray) -> float:
        """Check that ``array`` is as described.

        Args:
            section: The section of the payload, for the error message.
            name: The name of the tensor, for the error message.
            array: The received array.

        Returns:
            The largest absolute value in ``array``, without values that equal those in ``sent``. 0 for integers, with
            ``any_value``, and if no value is left.

        Raises:
            WireError: The array has another shape or dtype, or a value that is not allowed.
        """
        if array.shape != self.shape:
            raise WireError(section, name, f"expected shape {self.shape}, but got {array.shape}")
        if dtype_name(array.dtype) != self.dtype:
            raise WireError(section, name, f"expected dtype {self.dtype}, but got {array.dtype}")
        if array.size == 0 or self.any_value:
            return 0.0
        if self.sent is not None:
            array = array[~_same_bits(array, self.sent)]
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
    """Describe which sections a payload has, and which tensors each section has. Other tensors are not allowed.

    Attributes:
        sections: Section -> name -> tensor.
        optional: Sections that may be absent.
    """

    sections: dict[str, dict[str, Spec]]
    optional: dict[str, dict[str, Spec]] = field(default_factory=dict)

    @cached_property
    def _groups(self) -> dict[str, list[_Group]]:
        return {section: _groups(specs) for section, specs in [*self.sections.items(), *self.optional.items()]}

    def check(self, payload: Payload) -> dict[str, float]:
        """Check that ``payload`` is as described. Return section -> the largest absolute value in it, see ``Spec.check``.

        Raises:
            WireError: A section or tensor is missing, extra, of a wrong shape or dtype, or out of range. The message
                names the first one.
        """
        largest: dict[str, float] = {}
        for section, specs in [*self.sections.items(), *((k, specs) for k, specs in self.optional.items() if k in payload)]:
            if section not in payload:
                raise WireError(section, "", f"missing: expected {len(specs)} tensors, but got sections {excerpt(sorted(payload))}")
            arrays = payload[section]
            if arrays.keys() != specs.keys():
                for name in specs:
                    if name not in arrays:
                        raise WireError(section, name, "missing tensor: expected a tensor of this name")
                for name in arrays:
                    if name not in specs:
                        raise WireError(section, name, "extra tensor: no tensor of this name was expected")
            sizes, others = [0.0], dict(specs)
            for group in self._groups[section]:
                if (size := group.check(arrays)) is not None:  # otherwise one by one, so that the error names the tensor
                    sizes.append(size)
                    for name in group.names:
                        del others[name]
            largest[section] = max([*sizes, *(spec.check(section, name, arrays[name]) for name, spec in others.items())])
        for section in payload:
            if section not in self.sections and section not in self.optional:
                raise WireError(section, "", f"extra section: expected only the sections {sorted(self.sections | self.optional)}")
        return largest


def _same_bits(array: np.ndarray, sent: np.ndarray) -> np.ndarray:
    bits = np.dtype(f"u{array.dtype.itemsize}")
    mine, theirs = (np.ascontiguousarray(one).reshape(-1).view(bits) for one in (sent, array))
    same: np.ndarray = (mine == theirs).reshape(array.shape)
    return same


@dataclass(frozen=True)
class _Group:
    """Describe small tensors of one dtype and one range, whose values are checked in one call, which is faster.

    Attributes:
        names: The names of the tensors.
        shapes: Their shapes, in the order of ``names``.
        like: The description that all share, except for the shape.
    """

    names: list[str]
    shapes: list[tuple[int, ...]]
    like: Spec

    def check(self, arrays: Mapping[str, np.ndarray]) -> float | None:
        """Return the largest absolute value, 0 for integers; None if a tensor is not as described."""
        own = [arrays[name] for name in self.names]
        dtypes = {array.dtype for array in own}
        if [array.shape for array in own] != self.shapes or len(dtypes) > 1 or dtype_name(dtypes.pop()) != self.like.dtype:
            return None
        least, most = extremes(np.concatenate([array.ravel() for array in own]))
        if not (np.isfinite(least) and np.isfinite(most) and self.like.at_least <= least and most <= self.like.at_most):
            return None
        return max(-least, most) if self.like.dtype in FLOATS else 0.0


def _groups(specs: Mapping[str, Spec]) -> list[_Group]:
    """Return the groups of tensors among ``specs`` that can be checked in one call."""
    found: dict[tuple[str, float, float], list[str]] = {}
    for name, spec in specs.items():
        if spec.a_range and 0 < math.prod(spec.shape) <= SMALL:
            found.setdefault((spec.dtype, spec.at_least, spec.at_most), []).append(name)
    return [_Group(names, [specs[name].shape for name in names], specs[names[0]]) for names in found.values() if len(names) > 1]


def difference(expected: Schema, payload: Payload, dtypes: bool = True) -> str:
    """Name the first tensor in which two sides differ.

    Args:
        expected: The tensors of this side.
        payload: The arrays of the other side.
        dtypes: Whether to compare dtypes, too.

    Returns:
        A sentence with the difference. If all names, shapes and dtypes agree, it names the other possible differences
        and the command that shows them.
    """
    for section, ours in expected.sections.items():
        theirs = payload.get(section, {})
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            here = _form(ours[name].shape, ours[name].dtype, dtypes) if name in ours else "nothing"
            there = _form(theirs[name].shape, dtype_name(theirs[name].dtype), dtypes) if name in theirs else "nothing"
            if here != there:
                return f"{printable(name)} is {here} here, and {there} there"
    return (
        "all tensors in messages have equal names, shapes and dtypes, so a role, an integer buffer, the method, or an option of the "
        f"method differs. {COMPARE}"
    )


COMPARE = "To compare, run on both sides: fl-bn layers MODEL --method METHOD --tensors"


def _form(shape: tuple[int, ...], dtype: str, dtypes: bool) -> str:
    return f"{tuple(shape)} {dtype}" if dtypes else f"{tuple(shape)}"


KEPT = "kept"  # the section, and the query, of layers that clients keep
START = "start"  # the section with the initial values of these layers, for a client that keeps none yet


def instruction(model: nn.Module, locality: Locality, auxiliary: Sequence[Auxiliary] = ()) -> Schema:
    """Describe the tensors of the server's instruction: weights, buffers that only the server sends, and shared statistics.

    An instruction to train also has the auxiliary tensors. For a client that has kept no tensors yet, it may have the
    section ``START``: the initial values of the tensors that the client will keep.

    Args:
        model: The converted network.
        locality: Where its tensors live.
        auxiliary: The kinds of auxiliary tensors; empty if the instruction is only to measure.
    """
    state = model.state_dict()
    sections = {"weights": {k: _weight(state[k], locality, k, False) for k in locality.names(Place.SHARED, Place.DOWN_ONLY)}}
    if statistics := locality.names(Place.STATISTIC):
        sections["statistics"] = {k: _spec(k, state[k]) for k in statistics}
    start = {START: {k: _spec(k, state[k]) for k in locality.started_by_server()}}
    return Schema(sections | _auxiliary(model, locality, auxiliary), start if start[START] else {})


def reply(model: nn.Module, locality: Locality, phase: Phase, update: str = "weights", auxiliary: Sequence[Auxiliary] = ()) -> Schema:
    """Describe the tensors of a client's reply: weights or gradients, auxiliary tensors, and statistics or moments.

    Args:
        model: The converted network.
        locality: Where its tensors live.
        phase: The phase of the round. In phase MEASURE, a reply has moments only.
        update: ``weights`` or ``gradients``.
        auxiliary: The kinds of auxiliary tensors.
    """
    report, state = locality.method.reports(phase), model.state_dict()
    sections: dict[str, dict[str, Spec]] = {}
    if phase is not Phase.MEASURE:
        sections["weights"] = {k: _weight(state[k], locality, k, True) for k in locality.names(Place.SHARED)}
        if report is StatisticsReport.RUNNING and (statistics := locality.names(Place.STATISTIC)):
            sections["statistics"] = {k: _reported(k, state[k]) for k in statistics}
        if update == "gradients":
            learnable = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
            sections["gradients"] = {name: spec for name, spec in sections.pop("weights").items() if name in learnable}
        sections |= _auxiliary(model, locality, auxiliary)
    if report in MOMENTS:
        sections["moments"] = {}
        for layer in locality.shared_statistics:
            mean = state[tensor_name(layer, "running_mean")]
            sections["moments"] |= {
                tensor_name(layer, "count"): Spec((1,), "int64", 0, LARGEST_COUNT),  # 0: the layer did not run
                tensor_name(layer, "mean"): _reported(tensor_name(layer, "mean"), mean),
                tensor_name(layer, "var"): _reported(tensor_name(layer, "var"), mean),
            }
    return Schema(sections)


def kept_layers(model: nn.Module, locality: Locality) -> Schema:
    """Describe the section ``KEPT``, in which a client sends the BatchNorm tensors that it keeps: affine and statistics."""
    state = model.state_dict()
    return Schema({KEPT: {name: _spec(name, state[name]) for name in locality.kept_by_clients()}})


def _spec(name: str, tensor: torch.Tensor) -> Spec:
    return Spec(tuple(tensor.shape), _dtype(tensor), 0.0 if name.rpartition(".")[2] == "running_var" else -np.inf)


def _reported(name: str, like: torch.Tensor) -> Spec:
    """Describe a statistic that a client reports. Its values are bounded, so that a sum over clients stays finite."""
    mean, var = bounds(like.dtype)
    limits = (0.0, var) if name.endswith("var") else (-mean, mean)
    return Spec(tuple(like.shape), _dtype(like), *limits)


def _weight(tensor: torch.Tensor, locality: Locality, name: str, reply: bool) -> Spec:
    shape, dtype = tuple(tensor.shape), _dtype(tensor)
    if locality.place[name] is Place.DOWN_ONLY:
        return Spec(shape, dtype, any_value=True)
    if locality.role[name] is not Role.BUFFER or tensor.is_meta or bool(tensor.isfinite().all()):
        return Spec(shape, dtype)
    if not reply:  # extremes of an observer before its first batch, for example
        return Spec(shape, dtype, any_value=True)
    return Spec(shape, dtype, sent=tensor.detach().cpu().numpy().copy())


def _auxiliary(model: nn.Module, locality: Locality, auxiliary: Sequence[Auxiliary]) -> dict[str, dict[str, Spec]]:
    like = has_auxiliary(model, locality) if auxiliary else {}
    return {c.section: {k: Spec(tuple(c.like(p).shape), _dtype(p), c.at_least) for k, p in like.items()} for c in auxiliary}


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
