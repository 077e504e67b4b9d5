"""One of C classes, per sample or per pixel. Legend: B samples of a batch, C classes, H height, W width."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_bn.task.targets import LABELS, MASKS
from fl_bn.task.task import SHARE, Range, Task

IGNORE = 255  # what a mask says of a pixel that counts neither in the loss nor in the score
MEAN_IOU, CLASS = "mean-iou", "accuracy-class-"


class Classification(Task):
    """One of C classes per sample: scores (B, C), labels int64 (B,). Cross-entropy; accuracy, of all and of each class.

    >>> from fl_bn import Classification
    >>> state = Classification().state()
    >>> state.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    >>> state["accuracy"], state["accuracy-class-0"]
    (0.5, 0.5)
    """

    name, metric = "classification", "accuracy"
    ranges: ClassVar[Mapping[str, Range]] = {"accuracy": SHARE, MEAN_IOU: SHARE, CLASS: SHARE}
    takes = (LABELS,)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets)

    def sums(self, output: Tensor, targets: Tensor) -> dict[str, Tensor | float]:
        return {"confusion": confusion_counts(output, targets)}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        confusion = sums["confusion"]
        labels = int(confusion.sum())
        accuracy = int(confusion.trace()) / labels if labels else math.nan
        per_class = confusion.diagonal().double() / confusion.sum(1)  # NaN where the data have none of a class
        return {"accuracy": accuracy} | {f"{CLASS}{index}": value for index, value in enumerate(per_class.tolist())}

    def samples_behind(self, targets: Tensor) -> dict[str, int]:
        return {f"{CLASS}{index}": n for index, n in enumerate(torch.bincount(targets.flatten()).tolist())}


class Segmentation(Classification):
    """One of C classes per pixel: scores (B, C, H, W), masks int64 (B, H, W) with ``IGNORE`` where a pixel has no label.

    Over labelled pixels: the metrics of ``Classification``, and ``mean-iou``, the mean over classes that occur (torchmetrics' macro
    JaccardIndex).

    >>> from fl_bn import Segmentation
    >>> state = Segmentation().state()
    >>> state.update(torch.eye(2)[None, :, None], torch.tensor([[[0, 255]]]))
    >>> state["mean-iou"]
    1.0
    """

    name = "segmentation"
    takes = (MASKS,)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Mean over labelled pixels; 0 where there is none (torch's is NaN then)."""
        return F.cross_entropy(output, targets, ignore_index=IGNORE, reduction="sum") / (targets != IGNORE).sum().clamp(min=1)

    def count(self, targets: Tensor) -> int:
        return int((targets != IGNORE).sum())

    def samples_behind(self, targets: Tensor) -> dict[str, int]:
        """Images that have a class."""
        images = torch.zeros(IGNORE + 1, dtype=torch.int64)
        for mask in targets:
            images += mask.flatten().bincount(minlength=IGNORE + 1) > 0
        return {f"{CLASS}{index}": n for index, n in enumerate(images[:IGNORE].tolist())}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        hits = sums["confusion"].diagonal().double()
        union = sums["confusion"].sum(0) + sums["confusion"].sum(1) - hits
        return super().metrics(sums) | {MEAN_IOU: float((hits / union)[union > 0].mean())}


def confusion_counts(output: Tensor, targets: Tensor) -> Tensor:
    """Int64 (C, C), rows: labels, of scores (B, C) and labels (B,), or of scores (B, C, H, W) and masks (B, H, W)."""
    classes, predicted = output.shape[1], output.argmax(1)
    if targets.ndim > 1:
        labelled = targets != IGNORE
        predicted, targets = predicted[labelled], targets[labelled]
    return torch.bincount(targets * classes + predicted, minlength=classes**2).view(classes, classes)
