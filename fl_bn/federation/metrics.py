"""What an evaluation measures: one table of counts, and all that is read off it.

The confusion counts are a sufficient statistic of accuracy, accuracy per class and mean IoU, and those of two sets of data add up to those
of their union. Plain torch: torchmetrics, which is the tests' oracle, takes longer to import than many an evaluation takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_bn.data.segmentation import IGNORE

MEAN_IOU = "mean-iou"
_CLASS = "accuracy-class-"


@dataclass(frozen=True, eq=False)
class Evaluation:
    """``loss``: mean over labels; ``confusion``: int64 (C, C) on the CPU, how often a label (row) was predicted as a class (column).

    With ``segmentation`` labels are those of pixels, without the unlabelled ones; else those of images.
    """

    loss: float
    confusion: Tensor
    segmentation: bool = False

    @property
    def labels(self) -> int:
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """Of segmentation, pixel accuracy. NaN without a label."""
        return int(self.confusion.trace()) / self.labels if self.labels else math.nan

    @property
    def per_class(self) -> Tensor:
        """Accuracy of each class, float64 (C,): NaN where the data have none of it."""
        return self.confusion.diagonal().double() / self.confusion.sum(1)

    @property
    def mean_iou(self) -> float:
        """Intersection over union, mean over the classes that occur in labels or predictions (torchmetrics' macro JaccardIndex).

        >>> Evaluation(0.0, torch.tensor([[3, 1], [0, 2]])).mean_iou  # (3/4 + 2/3) / 2
        0.7083333333333333
        """
        hits = self.confusion.diagonal().double()
        union = self.confusion.sum(0) + self.confusion.sum(1) - hits
        return float((hits / union)[union > 0].mean())

    def metrics(self) -> dict[str, float]:
        """By the names that records and messages have; ``mean-iou`` of segmentation alone."""
        found = {"accuracy": self.accuracy, "loss": self.loss}
        if self.segmentation:
            found[MEAN_IOU] = self.mean_iou
        return found | named_per_class(self.per_class.tolist())

    @classmethod
    def union(cls, parts: Iterable[Evaluation]) -> Evaluation:
        """The evaluation of the union of the parts' data. Raises ValueError where there is no part."""
        parts = list(parts)
        if not parts:
            raise ValueError("no evaluation to unite: there are no parts")
        labels = max(1, sum(part.labels for part in parts))
        loss = sum(part.loss * part.labels for part in parts) / labels
        return cls(loss, torch.stack([part.confusion for part in parts]).sum(0), parts[0].segmentation)


def confusion_counts(out: Tensor, y: Tensor) -> Tensor:
    """Int64 (C, C), rows: labels, of scores ``out`` (B, C) and labels (B,), or of scores (B, C, H, W) and masks (B, H, W)."""
    classes, predicted = out.shape[1], out.argmax(1)
    if y.ndim > 1:
        labelled = y != IGNORE
        predicted, y = predicted[labelled], y[labelled]
    return torch.bincount(y * classes + predicted, minlength=classes**2).view(classes, classes)


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """Mean over labels; of masks (B, H, W), over labelled pixels, and 0 where there is none (torch's is NaN then)."""
    if y.ndim == 1:
        return F.cross_entropy(out, y)
    return F.cross_entropy(out, y, ignore_index=IGNORE, reduction="sum") / (y != IGNORE).sum().clamp(min=1)


def per_class(metrics: Mapping[str, float]) -> list[float]:
    """The accuracies per class among ``metrics``, in order; empty if it has none."""
    names = (f"{_CLASS}{index}" for index in count())
    return [metrics[name] for name in takewhile(metrics.__contains__, names)]


def named_per_class(accuracies: Sequence[float]) -> dict[str, float]:
    """The inverse of ``per_class``."""
    return {f"{_CLASS}{index}": value for index, value in enumerate(accuracies)}


def mean_over_clients(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean IoU and accuracy per class, where clients sent them: mean over the clients that have such pixels, or images.

    A value that is none (outside 0..1) counts as absent; NaN where all are.
    """
    names = [*([MEAN_IOU] if any(MEAN_IOU in m for m in measured) else []), *_class_names(measured)]
    means = {}
    for name in names:
        values = [m[name] for m in measured if 0 <= m.get(name, math.nan) <= 1]
        means[name] = sum(values) / len(values) if values else math.nan
    return means


def _class_names(measured: Sequence[Mapping[str, float]]) -> list[str]:
    return list(takewhile(lambda name: any(name in m for m in measured), (f"{_CLASS}{index}" for index in count())))
