"""Make the vector that a client adds to a secure sum, and read the average of all clients' vectors.

The vector (d,) holds these parts in the order of ``layout``:

* the weights minus those that were sent, or the gradients,
* the statistics as standardised deviations from a reference that all clients know
  (``secure.additive``),
* the training loss,
* flags: whether statistics, and whether values of the update, were cut off to fit
  the quantiser, and whether the loss does not fit.

It travels without names: both sides derive the layout from model, method and phase.

In a sum of evaluations, the vector holds the client's loss and the task's own
metric, scaled to the declared ranges. An open end of a range is ``-LOSS_RANGE`` or
``LOSS_RANGE``. Of a value outside, the vector holds a flag. The server learns the means, to which
each client counts once. Other figures are not reported: with three clients, mean
and standard deviation nearly reveal each client's number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from fl_bn.bn.moments import Moments, Running
from fl_bn.federation.schema import Schema
from fl_bn.federation.values import Named, Sections, decode_moments, tensor_name
from fl_bn.secure.additive import deviations, from_deviations, within
from fl_bn.support.wire import WireError
from fl_bn.task import Task

Layout = dict[str, dict[str, tuple[int, ...]]]
STATISTICS = ("statistics", "moments")
EVALUATION, LOSS = "evaluation", "loss"
LOSS_RANGE = 64.0  # the largest loss in a sum
REFERENCE = "reference"  # section of a message with a reference for deviations, if it is not the message's own statistics


@dataclass(frozen=True)
class Plan:
    """Hold the counts of one client's work in a round, which it sends unmasked before the round.

    Attributes:
        samples: the number of different samples. 0: the client takes no part.
        passes: the number of samples behind its statistics. A sample that is used
            twice counts twice.
        steps: the number of batches.
    """

    samples: int
    passes: int
    steps: int


@dataclass(frozen=True)
class Weighting:
    """Hold, for each part of the vector, the number of samples at which a client's weight is 1.

    It is the largest number of a client in the cohort, by which each client's own
    is divided. 0 means that all have weight 1, as updates and statistics do with
    differential privacy. Moments are weighted by ``Plan.passes``.
    """

    update: int
    statistics: int
    samples: int

    def of(self, section: str, plan: Plan) -> float:
        """Return the weight, in (0, 1], of a client with the counts ``plan`` in ``section``."""
        if section == "cut":
            return 1.0
        if section in STATISTICS:
            share, whole = plan.passes if section == "moments" else plan.samples, self.statistics
        else:
            share, whole = plan.samples, self.samples if section == "loss" else self.update
        return share / whole if whole else 1.0


def layout(expected: Schema, loss: bool, cut: bool = True) -> Layout:
    """Return the shapes of all summed values: a plain reply's but counts, loss and flags."""
    numbers: Layout = {"loss": {"loss": (1,)}} if loss else {}
    numbers |= {"cut": {"statistics": (1,), "update": (1,), LOSS: (1,)}} if cut else {}
    tensors = {
        section: {name: spec.shape for name, spec in specs.items() if (section, name.rpartition(".")[2]) != ("moments", "count")}
        for section, specs in expected.sections.items()
    }
    return {**tensors, **numbers}


def releases(shapes: Layout) -> int:
    """Return how many vectors in a sum get noise of their own: update and statistics."""
    return len({"statistics" if section in STATISTICS else "update" for section in shapes})


def length(shapes: Layout) -> int:
    """Return the length d of a client's vector."""
    return sum(math.prod(shape) for section in shapes.values() for shape in section.values())


def references(tensors: Named) -> dict[str, Running]:
    """Return each layer's running statistics, from ``tensors`` by state_dict name."""
    layers = [name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] == "running_mean"]
    return {k: Running(tensors[tensor_name(k, "running_mean")], tensors[tensor_name(k, "running_var")]) for k in layers}


def additive(reply: Sections, weights: Named, reference: Mapping[str, Running], limit: float) -> tuple[Sections, dict[str, int]]:
    """Convert a client's reply to values that can be summed, with ``limit`` as the quantiser's range.

    Return, in float64 by section of ``layout`` and name, differences from the
    ``weights`` that were sent, gradients, and deviations of the statistics from
    ``reference``. And each layer's number of channels whose statistics were cut
    off. A value that is not finite raises ``WireError``.
    """
    parts: Sections = {}
    cut: dict[str, int] = {}
    for section, tensors in reply.items():
        if section in STATISTICS:
            parts[section] = {}
            names = ("mean", "var") if section == "moments" else ("running_mean", "running_var")
            reported = decode_moments(tensors) if section == "moments" else references(tensors)
            for layer, own in reported.items():
                pooled = section == "moments"
                first, second, cut[layer] = within(*deviations(own, reference[layer], pooled), limit, pooled)
                ran = not isinstance(own, Moments) or own.count > 0
                both = (first, second) if ran else (torch.zeros_like(first), torch.zeros_like(second))
                parts[section] |= {tensor_name(layer, name): tensor for name, tensor in zip(names, both, strict=True)}
        else:
            sent = weights if section == "weights" else {}
            parts[section] = {k: t.double() - sent[k].double() if k in sent else t.double() for k, t in tensors.items()}
        if wrong := [name for name, tensor in parts[section].items() if not bool(tensor.isfinite().all())]:
            raise WireError(section, wrong[0], "not all values are finite (training diverged?), so they cannot be part of a sum")
    return parts, cut


def activations(reply: Sections, plan: Plan) -> dict[str, int]:
    """Return each layer's activations per channel and sample; 0: it did not run."""
    per_sample: dict[str, int] = {}
    for layer, moments in decode_moments(reply.get("moments", {})).items():
        per_sample[layer], rest = divmod(moments.count, max(plan.passes, 1))
        if rest:
            problem = f"expected equally many activations of every sample, but got {moments.count} of {plan.passes} samples"
            raise WireError("moments", tensor_name(layer, "count"), problem)
    return per_sample


def flags(loss: float, weight: float, statistics: bool, update: bool, limit: float) -> Sections:
    """Return the numbers that each client adds to a sum beside its tensors, scaled to the quantiser's range.

    They are the loss times the ``weight``, and whether statistics or values of the
    update were cut off, or the loss does not fit.
    """
    fits = abs(loss) <= LOSS_RANGE  # NaN does not
    share = torch.tensor([loss / LOSS_RANGE * limit * weight if fits else 0.0])
    flagged = {"statistics": statistics, "update": update, LOSS: not fits}
    cut = {name: torch.tensor([limit * flag]) for name, flag in flagged.items()}
    return {"loss": {"loss": share}, "cut": cut}


def evaluation_layout(task: type[Task] | Task) -> Layout:
    """Return the shapes of a secure sum of evaluations, by section and name."""
    return {section: {LOSS: (1,), task.metric: (1,)} for section in (EVALUATION, "cut")}


def evaluation_parts(metrics: Mapping[str, float], task: Task, limit: float) -> Sections:
    """Scale a client's metrics to the quantiser's range, with flags for those outside their own range."""
    shares, cut = {}, {}
    for name in (LOSS, task.metric):
        low, high = range_of(name, task)
        fits = low <= metrics[name] <= high  # NaN does not
        share = (metrics[name] - low) / (high - low) if fits else 0.0
        shares[name] = torch.tensor([share * limit], dtype=torch.float64)
        cut[name] = torch.tensor([limit * (not fits)])
    return {EVALUATION: shares, "cut": cut}


def evaluation_means(average: Sections, task: Task, limit: float) -> dict[str, float]:
    """Convert an average over clients back to metrics, within their declared ranges."""
    values = {}
    for name, mean in average[EVALUATION].items():
        low, high = range_of(name, task)
        values[name] = low + float((mean / limit).clamp(0.0, 1.0)) * (high - low)
    return values


def range_of(name: str, task: Task) -> tuple[float, float]:
    """Return the lowest and the highest value of a metric in a sum."""
    low, high = (-math.inf, math.inf) if name == LOSS else task.declared()[name]
    return max(low, -LOSS_RANGE), min(high, LOSS_RANGE)


def to_vector(parts: Sections, shapes: Layout) -> np.ndarray:
    """Return ``parts`` as one float64 vector (d,), in the order of ``shapes``."""
    flat = [parts[section][name].double().reshape(-1).numpy() for section, names in shapes.items() for name in names]
    return np.concatenate(flat) if flat else np.zeros(0)


def from_vector(vector: np.ndarray, shapes: Layout) -> Sections:
    """Invert ``to_vector``."""
    lengths = [math.prod(shape) for names in shapes.values() for shape in names.values()]
    flat = iter(torch.from_numpy(vector.copy()).split(lengths))
    return {section: {name: next(flat).reshape(shape) for name, shape in names.items()} for section, names in shapes.items()}


def update_of(average: Sections, weights: Named) -> Sections:
    """Return the averaged updates in float64: differences from ``weights``, or gradients."""
    if "weights" in average:
        return {"weights": {name: weights[name].double() + difference for name, difference in average["weights"].items()}}
    return {"gradients": dict(average["gradients"])} if "gradients" in average else {}


def moments_of(
    average: Sections, reference: Mapping[str, Running], samples: int, counts: Mapping[str, int], limit: float
) -> tuple[dict[str, Moments], int]:
    """Compute the moments of all clients together from an average of deviations from ``reference``.

    Their counts are ``counts`` where clients send moments, and ``samples`` where
    they send running statistics. Return the moments by layer, and the number of
    channels whose variance was negative (now 0).
    """
    merged: dict[str, Moments] = {}
    negative = 0
    for layer, about in reference.items():
        for section, mean, var in (("moments", "mean", "var"), ("statistics", "running_mean", "running_var")):
            if (part := average.get(section, {})) and (name := tensor_name(layer, mean)) in part:
                first, second = part[name], limit * part[tensor_name(layer, var)]
                pooled = section == "moments"
                running, below = from_deviations(first, second, about, pooled)
                merged[layer] = Moments(counts[layer] if pooled else samples, running.mean, running.var)
                negative += below
    return merged, negative
