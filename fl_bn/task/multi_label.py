"""Define a task with a set of labels per sample.

Legend: B samples of a batch, K labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_bn.bn.moments import inside_transform
from fl_bn.task.ranking import counted, tables
from fl_bn.task.targets import LABEL_SETS, alike
from fl_bn.task.task import SHARE, Range, Task


class MultiLabel(Task):
    """Define a task with any of K labels per sample: logits (B, K), targets 0 or 1 (B, K).

    The loss is binary cross-entropy. The metrics are ``mean-average-precision``
    (scikit-learn's, without labels that never occur), ``f1-micro`` and ``f1-macro`` (of probabilities above 1/2).

    >>> from fl_bn import MultiLabel
    >>> state = MultiLabel().state()
    >>> state.update(torch.tensor([[3.0, -1.0], [1.0, 2.0]]), torch.tensor([[1, 0], [0, 1]]))
    >>> state["mean-average-precision"], state["f1-micro"]
    (1.0, 0.8)

    Attributes:
        target_key: see ``Task``.
        input_keys: see ``Task``.
        output_key: see ``Task``.
    """

    name, metric = "multi-label", "mean-average-precision"
    ranges: ClassVar[Mapping[str, Range]] = {"mean-average-precision": SHARE, "f1-micro": SHARE, "f1-macro": SHARE}
    takes = (LABEL_SETS,)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean binary cross-entropy of logits and targets (B, K)."""
        output, targets = alike(self.name, output, targets)
        if targets.device.type == "cpu" and not targets.is_floating_point() and not inside_transform():
            check_labels(targets)
        return F.binary_cross_entropy_with_logits(output, targets.to(output.dtype))

    def sums(self, output: Tensor, targets: Tensor) -> dict[str, Tensor | float]:
        """Count hits, misses and false alarms (3, K), and count logits by value."""
        output, y = alike(self.name, output, targets)
        check_labels(y)
        if output.ndim == 1:  # one label
            output, y = output.unsqueeze(1), y.unsqueeze(1)
        y, predicted = y.long(), (output > 0).long()
        hits, missed, too_many = predicted * y, (1 - predicted) * y, predicted * (1 - y)
        return {"counts": torch.stack([hits.sum(0), missed.sum(0), too_many.sum(0)]), "scores": counted(output, y)}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Compute the mean average precision and both F1 scores."""
        hits, missed, too_many = sums["counts"].double()
        either = 2 * hits + missed + too_many
        f1 = (2 * hits / either)[either > 0]  # without labels in neither targets nor predictions
        precision = torch.stack([_average_precision(*table.flip(1)) for table in tables(sums["scores"])])
        micro = float(2 * hits.sum() / either.sum())
        return {"mean-average-precision": float(precision.nanmean()), "f1-micro": micro, "f1-macro": float(f1.mean())}


def _average_precision(wrong: Tensor, right: Tensor) -> Tensor:
    """Compute it from counts by score, in descending order.

    It is NaN for a label that never occurs.
    """
    return (right / right.sum() * right.cumsum(0) / (right + wrong).cumsum(0)).sum()


def check_labels(targets: Tensor) -> None:
    """Check that all targets are 0 or 1.

    Raises:
        ValueError: one is another number, such as -1 for an uncertain label.
    """
    if bool(((targets != 0) & (targets != 1)).any()):
        other = targets[(targets != 0) & (targets != 1)].flatten()[0].item()
        raise ValueError(f"task multi-label: each target is 0 or 1, but one is {other:g}: replace it, or give a task of your own")
