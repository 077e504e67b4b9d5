"""Make the vector that a client adds to a secure sum, and read the average of all clients' vectors at the server.

The vector (d,) holds these parts in the order of ``layout``:

* the weights minus those that were sent, or the gradients,
* the statistics as standardised deviations from a reference that all clients know (``secure.additive``),
* the training loss,
* two flags: whether statistics, and whether values of the update, were cut off to fit the quantiser,
* two constants (``CHECK``).

The vector travels without names. Both sides derive the layout from model, method and phase.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fl_bn.bn.moments import Moments, Running
from fl_bn.federation.payload import Named, Sections, decode_moments, tensor_name
from fl_bn.federation.schema import Schema
from fl_bn.secure.additive import deviations, from_deviations, from_running_deviations, running_deviations, running_within, within
from fl_bn.support.wire import WireError

Layout = dict[str, dict[str, tuple[int, ...]]]
STATISTICS = ("statistics", "moments")
LOSS_RANGE = 64.0  # the largest loss in a sum; larger ones are cut off
# constants that every client sends, as shares of the quantiser's range: their means are right only if the masks cancelled
CHECK = (0.5, -0.25)
REFERENCE = "reference"  # section of a message with a reference for deviations, if it is not the message's own statistics


@dataclass(frozen=True)
class Plan:
    """Hold the counts of one client's work in a round. The client sends them unmasked, before the round.

    Attributes:
        samples: the number of different samples. 0: the client takes no part.
        passes: the number of samples behind the client's statistics. A sample that is used twice counts twice.
        steps: the number of batches.
    """

    samples: int
    passes: int
    steps: int


@dataclass(frozen=True)
class Weighting:
    """Hold, for each part of the vector, the number of samples at which a client's weight is 1.

    This number is the largest number of samples of a client in the cohort. A client's weight is its own number of samples
    divided by the largest, so no weight is above 1. With differential privacy, all updates and statistics have weight 1.

    Attributes:
        update: the number of samples at which an update has weight 1. 0: all updates have weight 1.
        statistics: the number of samples at which statistics have weight 1 (for moments: ``Plan.passes``). 0: all
            statistics have weight 1.
        samples: the number of samples at which a loss has weight 1.
    """

    update: int
    statistics: int
    samples: int

    def of(self, section: str, plan: Plan) -> float:
        """Return the weight that a client with the counts ``plan`` has in ``section``, in (0, 1]."""
        if section in ("cut", "check"):
            return 1.0
        if section in STATISTICS:
            share, whole = plan.passes if section == "moments" else plan.samples, self.statistics
        else:
            share, whole = plan.samples, self.samples if section == "loss" else self.update
        return share / whole if whole else 1.0


def layout(expected: Schema, loss: bool, cut: bool = True) -> Layout:
    """Return the shapes of all summed values, by section and name.

    Counts are not summed. Clients send them unmasked, and they serve as weights.

    Args:
        expected: the tensors of a plain reply.
        loss: whether the loss is summed.
        cut: whether the flags of cut values are summed.
    """
    shapes: Layout = {}
    for section, specs in expected.sections.items():
        counts = {name for name in specs if section == "moments" and name.rpartition(".")[2] == "count"}
        shapes[section] = {name: spec.shape for name, spec in specs.items() if name not in counts}
    return (
        shapes
        | ({"loss": {"loss": (1,)}} if loss else {})
        | ({"cut": {"statistics": (1,), "update": (1,)}} if cut else {})
        | {"check": {"check": (2,)}}
    )


def releases(shapes: Layout) -> int:
    """Return the number of vectors in a sum that get noise of their own: the update and the statistics. Constants get none."""
    return len({"statistics" if section in STATISTICS else "update" for section in shapes if section != "check"})


def length(shapes: Layout) -> int:
    """Return the length d of a client's vector, which holds all tensors of ``shapes``, one after the other."""
    return sum(math.prod(shape) for section in shapes.values() for shape in section.values())


def references(tensors: Named) -> dict[str, Running]:
    """Return layer -> its running statistics, from ``tensors``, which have the names of the state_dict."""
    layers = [name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] == "running_mean"]
    return {k: Running(tensors[tensor_name(k, "running_mean")], tensors[tensor_name(k, "running_var")]) for k in layers}


def additive(reply: Sections, weights: Named, reference: Mapping[str, Running], limit: float) -> tuple[Sections, dict[str, int]]:
    """Convert a client's reply to values that can be summed.

    Args:
        reply: the tensors of the plain reply.
        weights: the weights that were sent to the client.
        reference: the statistics from which all clients measure deviations, by layer.
        limit: the quantiser's range is ``[-limit, limit]``.

    Returns:
        First, in float64 by section of ``layout`` and name: the weights minus ``weights``, the gradients, and the deviations
            of the statistics from ``reference``. Second, layer -> the number of channels whose statistics were cut off to
            fit the range.

    Raises:
        WireError: a value is not finite, or the server sent no reference for a layer.
    """
    parts: Sections = {}
    cut: dict[str, int] = {}
    for section, tensors in reply.items():
        if section == "weights":
            parts[section] = {name: tensor.double() - weights[name].double() for name, tensor in tensors.items()}
        elif section == "gradients":
            parts[section] = {name: tensor.double() for name, tensor in tensors.items()}
        else:
            parts[section] = _statistics(section, tensors, reference, limit, cut)
    for section, part in parts.items():
        for name, tensor in part.items():
            if not bool(tensor.isfinite().all()):
                raise WireError(section, name, "not all values are finite (training diverged?), so they cannot be part of a sum")
    return parts, cut


def _statistics(section: str, tensors: Named, reference: Mapping[str, Running], limit: float, cut: dict[str, int]) -> dict[str, Tensor]:
    parts: dict[str, Tensor] = {}
    if section == "moments":
        for layer, moments in decode_moments(tensors).items():
            first, second, cut[layer] = within(*deviations(moments, _reference(section, layer, reference)), limit)
            parts |= {tensor_name(layer, "mean"): first, tensor_name(layer, "var"): second}
        return parts
    for layer, running in references(tensors).items():
        mean, var, cut[layer] = running_within(*running_deviations(running, _reference(section, layer, reference)), limit)
        parts |= {tensor_name(layer, "running_mean"): mean, tensor_name(layer, "running_var"): var}
    return parts


def _reference(section: str, layer: str, reference: Mapping[str, Running]) -> Running:
    if layer not in reference:
        raise WireError(section, layer, "expected the shared statistics from which deviations are measured, but the server sent none")
    return reference[layer]


def activations(reply: Sections, plan: Plan) -> dict[str, int]:
    """Return layer -> number of activations per channel and sample, from a client's moments. 0: the layer did not run.

    Raises:
        WireError: a count is no multiple of the number of samples.
    """
    per_sample: dict[str, int] = {}
    for layer, moments in decode_moments(reply.get("moments", {})).items():
        per_sample[layer], rest = divmod(moments.count, max(plan.passes, 1))
        if rest:
            raise WireError(
                "moments",
                tensor_name(layer, "count"),
                f"expected equally many activations of every sample, but got {moments.count} activations of {plan.passes} samples: in "
                "secure aggregation all inputs must have one size, and every layer must run equally often for each sample",
            )
    return per_sample


def flags(loss: float, weight: float, statistics: bool, update: bool, limit: float) -> Sections:
    """Return the numbers that each client adds to a secure sum beside its tensors.

    They are the loss, two flags (whether values were cut off to fit the quantiser), and the constants ``CHECK``. The
    mean of the constants shows whether the masks cancelled. All numbers are scaled to the quantiser's range.

    Args:
        loss: the training loss.
        weight: the client's weight for the loss.
        statistics: whether statistics were cut off.
        update: whether the update was cut off.
        limit: the quantiser's range is ``[-limit, limit]``.
    """
    share = min(loss / LOSS_RANGE, 1.0) * limit * weight
    cut = {"statistics": limit * statistics, "update": limit * update}
    check = torch.tensor(CHECK, dtype=torch.float64) * limit
    return {"loss": {"loss": torch.tensor([share])}, "cut": {k: torch.tensor([v]) for k, v in cut.items()}, "check": {"check": check}}


def to_vector(parts: Sections, shapes: Layout) -> np.ndarray:
    """Return ``parts`` as one float64 vector (d,), in the order of ``shapes``."""
    flat = [parts[section][name].double().reshape(-1).numpy() for section, names in shapes.items() for name in names]
    return np.concatenate(flat) if flat else np.zeros(0)


def from_vector(vector: np.ndarray, shapes: Layout) -> Sections:
    """Return the tensors in ``vector``, the inverse of ``to_vector``."""
    parts: Sections = {}
    start = 0
    for section, names in shapes.items():
        parts[section] = {}
        for name, shape in names.items():
            end = start + math.prod(shape)
            parts[section][name] = torch.from_numpy(vector[start:end].copy()).reshape(shape)
            start = end
    return parts


def update_of(average: Sections, weights: Named) -> Sections:
    """Compute the average of the clients' weights, or of their gradients, from a secure average.

    Args:
        average: the average vector, by section and name. Weights in it are differences from ``weights``.
        weights: the weights that were sent to the clients.

    Returns:
        The section ``weights`` or ``gradients``, with float64 tensors by name. Empty if all weights stay at the clients.
    """
    if "weights" in average:
        return {"weights": {name: weights[name].double() + difference for name, difference in average["weights"].items()}}
    return {"gradients": dict(average["gradients"])} if "gradients" in average else {}


def moments_of(
    average: Sections, reference: Mapping[str, Running], samples: int, counts: Mapping[str, int], limit: float
) -> tuple[dict[str, Moments], int]:
    """Compute the moments of all clients together from an average of deviations.

    Args:
        average: the average vector, by section and name.
        reference: the statistics from which all clients measured deviations, by layer.
        samples: the ``count`` of the returned moments in layers whose clients send running statistics.
        counts: the ``count`` of the returned moments in layers whose clients send moments, by layer.
        limit: the quantiser's range is ``[-limit, limit]``.

    Returns:
        The moments by layer, and the number of channels whose variance was negative and was set to 0.
    """
    merged: dict[str, Moments] = {}
    negative = 0
    for layer, about in reference.items():
        if (name := tensor_name(layer, "mean")) in average.get("moments", {}):
            first, second = average["moments"][name], average["moments"][tensor_name(layer, "var")]
            merged[layer], below = from_deviations(counts[layer], first, limit * second, about)
        elif (name := tensor_name(layer, "running_mean")) in average.get("statistics", {}):
            mean, var = average["statistics"][name], average["statistics"][tensor_name(layer, "running_var")]
            running, below = from_running_deviations(mean, limit * var, about)
            merged[layer] = Moments(samples, running.mean, running.var)
        else:
            continue
        negative += below
    return merged, negative


def dump(counts: Mapping[str, int]) -> str:
    """Return ``counts`` as JSON, since a metric of Flower's ``FitRes`` is a single value."""
    return json.dumps(counts)
