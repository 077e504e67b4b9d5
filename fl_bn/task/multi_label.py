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
from fl_bn.task.targets import LABEL_SETS, alike
from fl_bn.task.task import SHARE, Range, Task


class MultiLabel(Task):
    """Define a task with any of K labels per sample: logits (B, K), targets 0 or 1 (B, K).

    The loss is binary cross-entropy. The metrics are ``mean-average-precision`` (of
    logits in ``BINS`` bins), ``f1-micro`` and ``f1-macro`` (of probabilities above 1/2).

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
    # The exact average precision needs the order of all scores, which no sum of fixed size holds. So logits are counted in equal bins
    # between -16 and 16, each 1/32 wide. Labels that never occur are left out; for F1, labels in neither targets nor predictions.
    BINS: ClassVar[int] = 1024

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean binary cross-entropy of logits and targets (B, K)."""
        output, targets = alike(self.name, output, targets)
        if targets.device.type == "cpu" and not targets.is_floating_point() and not inside_transform():
            check_labels(targets)
        return F.binary_cross_entropy_with_logits(output, targets.to(output.dtype))

    def sums(self, output: Tensor, targets: Tensor) -> dict[str, Tensor | float]:
        """Count hits, misses and false alarms (3, K), and make histograms (K, 2, BINS) of logits by target."""
        output, y = alike(self.name, output, targets)
        check_labels(y)
        if output.ndim == 1:  # one label
            output, y = output.unsqueeze(1), y.unsqueeze(1)
        y, labels = y.long(), output.shape[1]
        predicted = (output > 0).long()
        binned = ((output.double() + 16) * (self.BINS / 32)).nan_to_num().long().clamp(0, self.BINS - 1)
        place = (torch.arange(labels, device=y.device) * 2 + y) * self.BINS + binned
        scores = torch.bincount(place.flatten(), minlength=labels * 2 * self.BINS).view(labels, 2, self.BINS)
        hits, missed, too_many = predicted * y, (1 - predicted) * y, predicted * (1 - y)
        return {"counts": torch.stack([hits.sum(0), missed.sum(0), too_many.sum(0)]), "scores": scores}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Compute the mean average precision and both F1 scores."""
        hits, missed, too_many = sums["counts"].double()
        either = 2 * hits + missed + too_many
        f1 = (2 * hits / either)[either > 0]
        wrong, right = sums["scores"].flip(2).cumsum(2).double().unbind(1)  # above each threshold, from the highest one down
        recall = right / right[:, -1:]
        steps = recall.diff(dim=1, prepend=torch.zeros(len(recall), 1, dtype=torch.float64))
        precision = (steps * (right / (right + wrong).clamp(min=1))).sum(1)
        micro = float(2 * hits.sum() / either.sum())
        return {"mean-average-precision": float(precision.nanmean()), "f1-micro": micro, "f1-macro": float(f1.mean())}


def check_labels(targets: Tensor) -> None:
    """Check that all targets are 0 or 1.

    Raises:
        ValueError: one is another number, such as -1 for an uncertain label.
    """
    if bool(((targets != 0) & (targets != 1)).any()):
        other = targets[(targets != 0) & (targets != 1)].flatten()[0].item()
        raise ValueError(f"task multi-label: each target is 0 or 1, but one is {other:g}: replace it, or give a task of your own")
