"""Hold the sums from which a task's metrics are computed. The sums add up over batches, clients and domains (torchmetrics' merge rule)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from fl_bn.bn.moments import ordinary
from fl_bn.task.objects import compute, fresh, update
from fl_bn.task.targets import changed

if TYPE_CHECKING:
    from fl_bn.task.task import Task


class MetricState:
    """Hold the sums from which the loss and a task's metrics over some data are computed.

    ``update`` adds a batch. ``+`` and ``union`` join the states of different data.

    Attributes:
        task: the task.
        total: sum of the losses of ``count`` samples.
        count: sum of ``task.count`` over the batches: usually the number of samples; labelled pixels for ``Segmentation``.
        sums: the task's sums, by name.
        objects: the task's metric objects, by name, with the batches of this state.
        parts: (count, values of the metric objects) of each state that ``union`` joined. Empty if this is no union.
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
        """Return name -> value of each metric object. For a union, it is the mean over the parts, weighted by their counts."""
        if not self.objects or not self.parts:
            return compute(self.objects)
        return {name: weighted_mean([(count, values[name]) for count, values in self.parts]) for name in self.objects}

    def __getitem__(self, name: str) -> float:
        """Return the loss or one metric: the entry ``name`` of ``result``."""
        return self.result()[name]

    def __add__(self, other: MetricState) -> MetricState:
        return self.union([self, other])

    @classmethod
    def union(cls, parts: Iterable[MetricState]) -> Self:
        """Return the state of all parts' data together.

        The sums are added. The parts' mean losses, and the values of metric objects, are weighted by their
        counts.

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

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole state as tensors on the CPU, which can be sent and added up.

        Returns:
            ``total`` (float64), ``count`` (int64), and ``sums/NAME`` for every sum.

        Raises:
            ValueError: the task has metric objects, which have no sums.
        """
        if self.objects:
            raise ValueError(
                f"task {self.task.name}: {', '.join(self.objects)} cannot be sent: metric objects have no sums; write a Task of your own "
                "whose sums() and metrics() compute these metrics"
            )
        numbers = {"total": torch.tensor(self.total, dtype=torch.float64), "count": torch.tensor(self.count)}
        return numbers | {f"sums/{name}": value.cpu() for name, value in self.sums.items()}

    @classmethod
    def from_tensors(cls, task: Task, tensors: Mapping[str, Tensor]) -> Self:
        """Restore a state from the tensors that ``tensors()`` returned."""
        sums = {name.removeprefix("sums/"): value for name, value in tensors.items() if name.startswith("sums/")}
        return cls(task, float(tensors["total"]), int(tensors["count"]), sums)


def weighted_mean(values: Sequence[tuple[int, float]]) -> float:
    """Return the weighted mean of the finite values among pairs (weight, value); NaN if no value is finite."""
    finite = [(weight, value) for weight, value in values if math.isfinite(value)]
    total = sum(weight for weight, _ in finite)
    return sum(weight * value for weight, value in finite) / total if total else math.nan
