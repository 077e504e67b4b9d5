"""Compute metrics from sums that add up over batches and clients, or by objects.

Metric objects have ``update``, ``compute`` and ``reset``, as those of torchmetrics.
"""

from __future__ import annotations

import copy
import logging
import math
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor

from fl_bn.bn.moments import ordinary
from fl_bn.support.names import noted
from fl_bn.task.targets import changed, to_device

if TYPE_CHECKING:
    from fl_bn.task.task import Task

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*-?")
"""A metric's name. One that ends in "-" stands for a series, such as one value per class."""
LOWER = re.compile(r"loss|error|perplexity|nll|brier|distance|(?<![a-z])(r?mse|mae)(?![a-z])", re.IGNORECASE)
"""Matches metrics of which lower values are better."""
Own = TypeVar("Own", bound="Task")
PLACE = "in metric {!r}, a {}".format
LOGGER = logging.getLogger("flwr")
UNDEFINED = re.compile(r".*(undefined|ill-defined|not defined|meaningless|Returns 0|No positive|0/0)", re.DOTALL)
"""Matches warnings that data do not define a metric, with which torchmetrics and scikit-learn return a placeholder."""
_WATCHING = threading.RLock()  # Python's filters of warnings are those of all threads


def lower_is_better(metric: str) -> bool:
    """Return whether lower values of ``metric`` are better, by its name.

    >>> [lower_is_better(name) for name in ("accuracy", "eval_loss", "val_MSE")]
    [False, True, True]
    """
    return LOWER.search(metric) is not None


class MetricState:
    """Hold the sums from which the loss and a task's metrics are computed.

    ``update`` adds a batch. ``+`` and ``union`` join states of different data.

    Attributes:
        total: sum of the losses of ``count`` samples.
        count: sum of ``task.count``: samples, or labelled pixels for ``Segmentation``.
        sums: the task's sums, by name.
        objects: the task's metric objects, by name.
        parts: (count, values of the metric objects) of each state that ``union`` joined,
            if any.
    """

    def __init__(self, task: Task, total: float = 0.0, count: int = 0, sums: Mapping[str, Tensor] | None = None) -> None:
        self.task, self.total, self.count, self.sums = task, total, count, dict(sums or {})
        self.objects = fresh(task)
        self.parts: list[tuple[int, dict[str, float]]] = []

    @torch.no_grad()
    def update(self, output: Any, targets: Any) -> None:
        """Add one batch.

        Args:
            output: the prediction, as ``task.output`` returns it.
            targets: the targets of the batch.
        """
        count = self.task.count(targets)
        self.total += float(self.task.loss(output, targets)) * count if count else 0.0  # the mean over no label may be NaN
        self.count += count
        output, targets = changed((output, targets), ordinary)
        for name, value in self.task.sums(output, targets).items():
            value = torch.as_tensor(value)
            value = value.to(torch.float64 if value.is_floating_point() else torch.int64)
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        if self.objects:
            update(self.objects, output, targets)

    @property
    def loss(self) -> float:
        """Return the mean loss over the samples, or 0 if no sample has a label."""
        return self.total / max(self.count, 1)

    def result(self) -> dict[str, float]:
        """Return ``loss`` and the task's metrics, by name.

        Raises:
            ValueError: no batch was added.
        """
        if not self.sums:
            raise ValueError(f"task {self.task.name}: metrics need at least one batch, but none was added: call update(output, targets)")
        return {"loss": self.loss, **self.task.metrics({name: value.cpu() for name, value in self.sums.items()}), **self._values()}

    def _values(self) -> dict[str, float]:
        """Return name -> value of each metric object, or its weighted mean over parts."""
        if not self.objects or not self.parts:
            return compute(self.objects)
        return {name: weighted_mean([(count, values[name]) for count, values in self.parts]) for name in self.objects}

    def __getitem__(self, name: str) -> float:
        """Return the loss or one metric, by name."""
        return self.result()[name]

    def __add__(self, other: MetricState) -> MetricState:
        return self.union([self, other])

    @classmethod
    def union(cls, parts: Iterable[MetricState]) -> Self:
        """Return the state of all parts' data together.

        Sums are added. The parts' mean losses, and values of metric objects, are weighted
        by counts.

        Raises:
            ValueError: there is no part, or the parts are of several tasks.
        """
        parts = list(parts)
        if len({part.task for part in parts}) != 1:
            raise ValueError(f"a union needs parts of one task, but got {[part.task.name for part in parts] or 'no parts'}")
        count = sum(part.count for part in parts)
        total = sum(part.loss * part.count for part in parts)
        filled = [part.sums for part in parts if part.sums]
        names = filled[0] if filled else {}
        sums = {name: torch.stack([part[name].cpu() for part in filled]).sum(0) for name in names}
        made = cls(parts[0].task, total, count, sums)
        made.parts = [own for part in parts if part.count for own in part.parts or [(part.count, part._values())]]
        return made


def weighted_mean(values: Sequence[tuple[int, float]]) -> float:
    """Return the weighted mean of the finite values among pairs (weight, value), or NaN."""
    finite = [(weight, value) for weight, value in values if math.isfinite(value)]
    total = sum(weight for weight, _ in finite)
    return sum(weight * value for weight, value in finite) / total if total else math.nan


@runtime_checkable
class MetricObject(Protocol):
    """Describe a metric over any number of batches, such as torchmetrics'."""

    def update(self, preds: Any, target: Any, /) -> None:
        """Add a batch of predictions (``Task.output``) and targets."""

    def compute(self) -> Any:
        """Return the metric over all batches since ``reset``, as one number."""

    def reset(self) -> None:
        """Forget all batches."""


def extended(task: Own, loss: Callable[[Any, Any], torch.Tensor] | None = None, metrics: Mapping[str, MetricObject] | None = None) -> Own:
    """Return a copy of ``task`` with another loss, or with further metrics.

    Args:
        task: the original.
        loss: takes an output and the targets, and returns the batch's mean loss. None:
            that of ``task``.
        metrics: further metrics by name.

    Raises:
        ValueError: a metric's name is not valid, or not new.
    """
    made, further = copy.copy(task), {**task.objects(), **(metrics or {})}
    for name in metrics or {}:
        if not NAME.fullmatch(name) or name.endswith("-") or name == "loss" or name in task.declared() or name in task.objects():
            raise ValueError(f"metrics: {name!r} is taken, or is not in lower-case letters, digits and single hyphens: choose another name")
    if loss is not None:
        vars(made)["loss"] = loss  # in place of the method of the class
    if metrics:
        vars(made)["objects"] = further.copy
    return made


def fresh(task: Task) -> dict[str, MetricObject]:
    """Return copies of a task's metric objects, without any batch.

    Raises:
        ValueError: a metric is a class, or lacks ``update``, ``compute`` or ``reset``.
    """
    made = {}
    for name, metric in task.objects().items():
        if isinstance(metric, type) or not isinstance(metric, MetricObject):
            what = f"the class {metric.__name__}" if isinstance(metric, type) else f"a {type(metric).__name__}"
            raise ValueError(f"metric {name!r} must be an object with update, compute and reset, such as torchmetrics has, but is {what}")
        made[name] = copy.deepcopy(metric)
        made[name].reset()
    return made


def update(objects: Mapping[str, MetricObject], output: Any, targets: Any) -> None:
    """Add a batch, copied to the CPU, to every metric object."""
    cpu = torch.device("cpu")
    output, targets = to_device(output, cpu), to_device(targets, cpu)
    for name, metric in objects.items():
        with noted(PLACE, name, type(metric).__name__):
            metric.update(output, targets)


def compute(objects: Mapping[str, MetricObject]) -> dict[str, float]:
    """Return name -> value of every metric object; NaN where it is undefined.

    Raises:
        ValueError: A value is not one number.
    """
    values = {}
    for name, metric in objects.items():
        computed = _computed(name, metric)
        try:
            values[name] = float(torch.as_tensor(computed))
        except (RuntimeError, TypeError, ValueError) as error:
            what = f"a tensor {tuple(computed.shape)}" if isinstance(computed, Tensor) else type(computed).__name__
            raise ValueError(f"metric {name!r} must compute one real number (math.nan: there is none), but computed {what}") from error
    return values


def _computed(name: str, metric: MetricObject) -> Any:
    """Return the metric's value; NaN if it warns that it is undefined (``UNDEFINED``)."""
    with _WATCHING, warnings.catch_warnings(record=True) as caught, noted(PLACE, name, type(metric).__name__):
        warnings.simplefilter("always")
        value = metric.compute()
    undefined = [str(warning.message) for warning in caught if UNDEFINED.match(str(warning.message))]
    for warning in caught:
        if str(warning.message) not in undefined:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if not undefined:
        return value
    _say(name, undefined[0])
    return math.nan


@cache
def _say(name: str, why: str) -> None:
    """Log why a metric is NaN, once in a process."""
    LOGGER.warning("metric %r is NaN, and counts in no mean, where its object warns: %s", name, why)
