"""Say where every tensor of a converted network lives, and which tensors a message has.

``Locality`` is computed once, also by a message's receiver, who derives its
``Schema``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np
import torch
from torch import nn

from fl_bn.bn.moments import bounds
from fl_bn.bn.roles import Role, batch_norms, roles
from fl_bn.exchange.session import LARGEST_COUNT
from fl_bn.federation.aggregation import dtype_name, extremes
from fl_bn.federation.auxiliary import Auxiliary
from fl_bn.federation.values import Payload, tensor_name
from fl_bn.methods import MOMENTS, Method, Phase, Place, StatisticsReport
from fl_bn.support.wire import WireError, excerpt

DIVERGED = "the client's training diverged"
COMPARE = "To compare, print method and fl_bn.convert(Net(), method) on both sides, or run: fl-bn layers MODEL --method METHOD --tensors"
KEPT = "kept"  # the section, and the query, of layers that clients keep
START = "start"  # the section with the initial values of these layers, for a client that keeps none yet


@dataclass(frozen=True)
class Locality:
    """Hold place and role of each tensor, by name and in the order of the state_dict.

    Attributes:
        norm_layers: All BatchNorm layers.
        shared_statistics: Those whose running statistics the server sends and
            combines.
        home_statistics: Those whose running statistics stay at the client.
    """

    method: Method
    place: Mapping[str, Place]
    role: Mapping[str, Role]
    norm_layers: tuple[str, ...]
    shared_statistics: tuple[str, ...]
    home_statistics: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, method: Method) -> Locality:
        """Compute the table of ``model``, converted for ``method``."""
        layers = batch_norms(model)
        local = {layers[name]: roles for name, roles in method.home(layers).items()}
        every = model.named_modules(remove_duplicate=False)  # a layer that is used twice has two names
        home = {name: local[layer] for name, layer in every if layer in local}
        role = roles(model)
        place = {name: method.place(one, home.get(name.rpartition(".")[0], frozenset())) for name, one in role.items()}
        at = {name: place.get(tensor_name(name, "running_mean")) for name in layers}  # a layer may have no running statistics
        shared, kept = (tuple(name for name in layers if at[name] is where) for where in (Place.STATISTIC, Place.HOME))
        return cls(method, place, role, tuple(layers), shared, kept)

    def names(self, *places: Place, of: Collection[Role] = tuple(Role)) -> list[str]:
        """Return the names of the tensors in ``places`` whose role is in ``of``."""
        return [name for name, place in self.place.items() if place in places and self.role[name] in of]

    @cached_property
    def home(self) -> list[str]:
        """Return the names of all tensors at home."""
        return self.names(Place.HOME)

    def started_by_server(self) -> list[str]:
        """Return the names of the tensors at home whose first values the server may send.

        Others are mixing logits, which start at 0, and buffers of the role KEPT.
        """
        return [name for name in self.home if self.role[name] not in (Role.MIXING, Role.KEPT)]

    def kept_by_clients(self) -> list[str]:
        """Return the names of affine parameters and statistics that clients keep.

        Their average serves a new client.
        """
        return self.names(Place.HOME, of=(Role.AFFINE, Role.STATISTIC))

    def trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the trained and shared parameters by name: those with auxiliary tensors."""
        return {name: p for name, p in model.named_parameters() if p.requires_grad and self.place[name] is Place.SHARED}

    def fewest(self, phase: Phase) -> int:
        """Return a batch's fewest samples: 2 if normalised by its statistics, else 1."""
        constant = len(self.shared_statistics) if self.method.constant else 0
        return 1 if self.method.freezes_statistics(phase) or constant == len(self.norm_layers) else 2

    def signature(self, model: nn.Module) -> str:
        """Return a short hash of the method, and of tensors' names, roles, shapes and dtypes.

        It includes the tensors at home if single layers stay there
        (``Method.local_in``).
        """
        parts = [f"{k} {self.role[k].value} {tuple(t.shape)} {t.dtype}" for k, t in model.state_dict().items()]
        at_home = [] if self.method.local_in is None else self.home
        return hashlib.sha256("\n".join([self.method.name, self.method.at_clients, *parts, *at_home]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Spec:
    """Describe a tensor: shape, name of its dtype as in NumPy, smallest and largest value.

    ``any_value``: also infinity and NaN.
    """

    shape: tuple[int, ...]
    dtype: str
    at_least: float = -np.inf
    at_most: float = np.inf
    any_value: bool = False

    def check(self, section: str, name: str, array: np.ndarray, limit: float = np.inf) -> float:
        """Check ``array``, also against ``limit``. Return its largest absolute value.

        This is 0 for integers, and with ``any_value``.

        Raises:
            WireError: The shape, the dtype or a value is not allowed.
        """
        wrong, least, most = "", 0.0, 0.0
        if array.shape != self.shape:
            wrong = f"expected shape {self.shape}, but got {array.shape}"
        elif dtype_name(array.dtype) != self.dtype:
            wrong = f"expected dtype {self.dtype}, but got {array.dtype}"
        elif array.size and not self.any_value:
            least, most = extremes(array)
            if array.dtype.kind == "f" and not (np.isfinite(least) and np.isfinite(most)):
                wrong = f"{int(array.size - np.isfinite(array).sum())} of {array.size} values are not finite (NaN or Inf)"
            elif least < self.at_least:
                wrong = f"expected values >= {self.at_least:.3g}, but the smallest is {least:.3g}"
            elif most > self.at_most:
                wrong = f"expected values <= {self.at_most:.3g}, but the largest is {most:.3g}"
            elif max(-least, most) > limit:
                sent = f"expected values within +-{limit:.3g}, but the largest is {max(-least, most):.3g}"
                wrong = f"{sent}: {DIVERGED}, or the client sends false values"
        if wrong:
            raise WireError(section, name, wrong)
        return max(-least, most) if array.dtype.kind == "f" else 0.0


@dataclass(frozen=True)
class Schema:
    """Describe a payload's sections, some ``optional``, and their tensors. Others are wrong."""

    sections: dict[str, dict[str, Spec]]
    optional: dict[str, dict[str, Spec]] = field(default_factory=dict)

    def check(self, payload: Payload, limits: Mapping[str, float] = MappingProxyType({}), free: Collection[str] = ()) -> float:
        """Check ``payload``. Return its largest absolute value, see ``Spec.check``.

        ``limits`` is section -> the largest allowed absolute value, except of
        tensors in ``free``.

        Raises:
            WireError: A section or tensor is missing, extra, or not as described.
        """
        if wrong := next(self._other_names(payload), None):
            raise WireError(*wrong)
        largest = 0.0
        for section in payload:
            for name, spec in (self.sections | self.optional)[section].items():
                limit = np.inf if name in free else limits.get(section, np.inf)
                largest = max(largest, spec.check(section, name, payload[section][name], limit))
        return largest

    def _other_names(self, payload: Payload) -> Iterator[tuple[str, str, str]]:
        """Yield section, name and reason for all that is missing or extra."""
        known = self.sections | self.optional
        for section in [section for section in self.sections if section not in payload]:
            yield section, "", f"missing: expected {len(known[section])} tensors, but got sections {excerpt(sorted(payload))}"
        for section, arrays in payload.items():
            if section not in known:
                yield section, "", f"extra section: expected only the sections {sorted(known)}"
            elif arrays.keys() != known[section].keys():
                for name in [*known[section], *arrays]:
                    if (name in arrays) != (name in known[section]):
                        yield section, name, "extra tensor: none of this name was expected" if name in arrays else "missing tensor"


def difference(expected: Schema, payload: Payload) -> str:
    """Name the first tensor in which this side's tensors and the other's arrays differ.

    If there is none, name other possible differences, and the command that shows
    them.
    """
    try:
        expected.check(payload)
    except WireError as error:
        return str(error)
    return f"all tensors in messages are equal, so a role, an integer buffer, the method, or an option of the method differs. {COMPARE}"


def instruction(model: nn.Module, locality: Locality, auxiliary: Sequence[Auxiliary] = ()) -> Schema:
    """Describe the instruction: weights, buffers that only the server sends, shared statistics.

    To train, it also has auxiliary tensors, and perhaps ``START``, initial values.
    """
    state = model.state_dict()
    sections = {"weights": {k: _weight(state[k], locality, k) for k in locality.names(Place.SHARED, Place.DOWN_ONLY)}}
    if statistics := locality.names(Place.STATISTIC):
        sections["statistics"] = {k: _spec(k, state[k]) for k in statistics}
    start = {START: {k: _spec(k, state[k]) for k in locality.started_by_server()}}
    return Schema(sections | _auxiliary(model, locality, auxiliary), start if start[START] else {})


def reply(model: nn.Module, locality: Locality, phase: Phase, update: str = "weights", auxiliary: Sequence[Auxiliary] = ()) -> Schema:
    """Describe a reply: weights or gradients, auxiliary tensors, statistics or moments.

    In phase MEASURE, it has moments only.
    """
    report, state = locality.method.reports(phase), model.state_dict()
    sections: dict[str, dict[str, Spec]] = {}
    if phase is not Phase.MEASURE:
        sections["weights"] = {k: _weight(state[k], locality, k) for k in locality.names(Place.SHARED)}
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
    """Describe section ``KEPT``: the affine parameters and statistics that a client keeps."""
    state = model.state_dict()
    return Schema({KEPT: {name: _spec(name, state[name]) for name in locality.kept_by_clients()}})


def _spec(name: str, tensor: torch.Tensor) -> Spec:
    return Spec(tuple(tensor.shape), _dtype(tensor), 0.0 if name.rpartition(".")[2] == "running_var" else -np.inf)


def _reported(name: str, like: torch.Tensor) -> Spec:
    """Describe a reported statistic, bounded so that a sum over clients stays finite."""
    mean, var = bounds(torch.promote_types(like.dtype, torch.float32))  # statistics are pooled in float64
    limits = (0.0, var) if name.endswith("var") else (-mean, mean)
    return Spec(tuple(like.shape), _dtype(like), *limits)


def _weight(tensor: torch.Tensor, locality: Locality, name: str) -> Spec:
    return Spec(tuple(tensor.shape), _dtype(tensor), any_value=locality.place[name] is Place.DOWN_ONLY)


def _auxiliary(model: nn.Module, locality: Locality, auxiliary: Sequence[Auxiliary]) -> dict[str, dict[str, Spec]]:
    like = locality.trained(model) if auxiliary else {}
    return {c.section: {k: Spec(tuple(c.like(p).shape), _dtype(p), c.at_least) for k, p in like.items()} for c in auxiliary}


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
