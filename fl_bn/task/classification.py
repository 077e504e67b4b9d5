"""Define tasks with one of C classes, per sample or per pixel.

Legend: B samples, C classes, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_bn.bn.moments import inside_transform
from fl_bn.support.wire import excerpt
from fl_bn.task.ranking import counted, tables
from fl_bn.task.targets import LABELS, MASKS
from fl_bn.task.task import SHARE, Range, Task

IGNORE = 255  # a mask's value for a pixel without a label: it counts neither in the loss nor in the metrics
UNLABELLED = -100  # the label that torch's losses leave out
NO_SCORE = "the network scores the classes 0..{}, but a label is {}: -100 says that there is none"
MEAN_IOU, CLASS = "mean-iou", "accuracy-class-"


class Classification(Task):
    """Define a task with one of C classes per sample.

    Outputs are scores (B, C), targets int64 labels (B,). The loss is cross-entropy. The
    metrics are ``accuracy``, and ``accuracy-class-0`` and so on for one class each.

    >>> from fl_bn import Classification
    >>> state = Classification().state()
    >>> state.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    >>> state["accuracy"], state["accuracy-class-0"]
    (0.5, 0.5)

    Attributes:
        target_key: see ``Task``.
        input_keys: see ``Task``.
        output_key: see ``Task``.
    """

    name, metric = "classification", "accuracy"
    ranges: ClassVar[Mapping[str, Range]] = {"accuracy": SHARE, MEAN_IOU: SHARE, CLASS: SHARE}
    takes = (LABELS,)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean cross-entropy of scores (B, C) over labels (B,); 0 without labels."""
        labels = labels_of(output, targets)
        known = labels.is_floating_point() or (labels.is_cpu and labels.numel() and not inside_transform() and int(labels.min()) >= 0)
        try:
            return F.cross_entropy(output, labels) if known else _cross_entropy_of_labelled(output, labels)
        except IndexError:
            raise ValueError(NO_SCORE.format(output.shape[1] - 1, labels.max())) from None

    def count(self, targets: Tensor) -> int:
        """Count the labels; those below 0 are none."""
        if not isinstance(targets, Tensor) or targets.is_floating_point():
            return super().count(targets)
        return int((targets >= 0).sum())

    def sums(self, output: Tensor, targets: Tensor) -> dict[str, Tensor | float]:
        """Count the confusion matrix (C, C) of one batch."""
        labels = labels_of(output, targets)
        is_class = output.ndim > 1 and output.shape[1] > IGNORE
        return {"confusion": confusion_counts(output, labels, UNLABELLED if is_class else IGNORE)}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Compute the accuracies over all samples and each class, NaN for an empty one."""
        confusion = sums["confusion"]
        labels = int(confusion.sum())
        accuracy = int(confusion.trace()) / labels if labels else math.nan
        per_class = confusion.diagonal().double() / confusion.sum(1)  # NaN where the data have none of a class
        return {"accuracy": accuracy} | {f"{CLASS}{index}": value for index, value in enumerate(per_class.tolist())}

    def samples_behind(self, targets: Tensor) -> dict[str, int]:
        """Return ``accuracy-class-N`` -> number of samples of class N."""
        return {f"{CLASS}{index}": n for index, n in enumerate(torch.bincount(targets[targets >= 0]).tolist())}


class ClassificationAUC(Classification):
    """Define classification whose metric is ``auc``, the area under the ROC curve.

    It is the mean over the classes, each against all others: scikit-learn's
    ``multi_class="ovr"``. A class of no or all
    samples is left out. If none remains, the AUC is NaN. The accuracies of
    ``Classification`` are further metrics.

    >>> from fl_bn.task import ClassificationAUC
    >>> state = ClassificationAUC().state()
    >>> state.update(torch.tensor([[0.0, -3.0], [0.0, -1.0], [0.0, -2.0]]), torch.tensor([0, 1, 1]))
    >>> state["auc"], round(state["accuracy"], 3)
    (1.0, 0.333)

    Attributes:
        target_key: see ``Task``.
        input_keys: see ``Task``.
        output_key: see ``Task``.
    """

    name, metric = "classification-auc", "auc"
    ranges: ClassVar[Mapping[str, Range]] = {"auc": SHARE, "accuracy": SHARE, CLASS: SHARE}

    def sums(self, output: Tensor, targets: Tensor) -> dict[str, Tensor | float]:
        """Count confusions (C, C), and each class's log odds by value."""
        confusions = super().sums(output, targets)
        targets, classes = labels_of(output, targets), output.shape[1]
        known = targets >= 0  # torch's losses leave out -100
        own = F.one_hot(targets.clamp(min=0), classes)
        return confusions | {"scores": counted(log_odds(output.double())[known], own[known])}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Compute the area under the ROC curve and the accuracies."""
        area = torch.stack([_area(*table) for table in tables(sums["scores"])])
        return {"auc": float(area.nanmean())} | super().metrics(sums)


def _area(others: Tensor, own: Tensor) -> Tensor:
    """Compute the area under the ROC curve from counts by score, in ascending order.

    It is NaN where either has no sample.
    """
    # samples of other classes that score less; those of the same score count half
    below = others.cumsum(0) - others / 2
    return (own * below).sum() / (own.sum() * others.sum())


class Segmentation(Classification):
    """Define ``Classification`` per pixel, over labelled pixels.

    Outputs are scores (B, C, [D,] H, W), targets int64 masks (B, [D,] H, W), 255 for no
    label. ``mean-iou`` is torchmetrics' macro JaccardIndex of the classes that occur.

    >>> from fl_bn import Segmentation
    >>> state = Segmentation().state()
    >>> state.update(torch.eye(2)[None, :, None], torch.tensor([[[0, 255]]]))
    >>> state["mean-iou"]
    1.0

    Attributes:
        target_key: see ``Task``.
        input_keys: see ``Task``.
        output_key: see ``Task``.
    """

    name = "segmentation"
    takes = (MASKS,)

    def sums(self, output: Tensor, targets: Tensor) -> dict[str, Tensor | float]:
        """Count the confusion matrix (C, C) of the labelled pixels of one batch."""
        return {"confusion": confusion_counts(output, labels_of(output, targets))}

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean cross-entropy over labelled pixels; 0 without any."""
        masks = masks_of(output, targets)
        return F.cross_entropy(output, masks, ignore_index=IGNORE, reduction="sum") / (masks != IGNORE).sum().clamp(min=1)

    def count(self, targets: Tensor) -> int:
        """Count the labelled pixels."""
        return int(((targets != IGNORE) & (targets >= 0)).sum())

    def samples_behind(self, targets: Tensor) -> dict[str, int]:
        """Return ``accuracy-class-N`` -> number of images with class N."""
        images = torch.zeros(IGNORE + 1, dtype=torch.int64)
        for mask in targets:
            images += mask[mask >= 0].bincount(minlength=IGNORE + 1) > 0
        return {f"{CLASS}{index}": n for index, n in enumerate(images[:IGNORE].tolist())}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Compute the accuracies over pixels, and the mean intersection over union."""
        hits = sums["confusion"].diagonal().double()
        union = sums["confusion"].sum(0) + sums["confusion"].sum(1) - hits
        return super().metrics(sums) | {MEAN_IOU: float((hits / union)[union > 0].mean())}


def labels_of(output: Tensor, targets: Tensor) -> Tensor:
    """Return the labels for scores (B, C, ...), without an axis of size 1 in place of C.

    MONAI's masks (B, 1, H, W) and MedMNIST's labels (B, 1) have such an axis.

    Raises:
        ValueError: the labels are no tensor, floats, or of another shape than the scores
            without C.
    """
    if not isinstance(targets, Tensor):
        raise ValueError(f"expected a tensor of whole numbers as labels, one for each class, but got {excerpt(targets)}")
    if targets.ndim == output.ndim > 1 and targets.shape[1] == 1 < output.shape[1]:
        targets = targets.squeeze(1)
    soft = targets.shape == output.shape and targets.is_floating_point()
    if not soft and (targets.is_floating_point() or targets.shape != (*output.shape[:1], *output.shape[2:])):
        raise ValueError(f"expected labels for scores {tuple(output.shape)}, but got {_form(targets)}: see targets.long(), MultiLabel()")
    return targets if soft else targets.long()


def _form(targets: Tensor) -> str:
    return f"{tuple(targets.shape)} {str(targets.dtype).removeprefix('torch.')}"


def _cross_entropy_of_labelled(output: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean cross-entropy over labels of at least 0; 0 without any, where torch gives NaN."""
    unlabelled = labels < 0
    if output.shape[1] == 2 and labels.ndim == 1 and not inside_transform():
        _check_two_classes(labels)
    loss = F.cross_entropy(output, labels.masked_fill(unlabelled, UNLABELLED))
    return torch.where(unlabelled.all(), 0.0, loss)


def _check_two_classes(labels: Tensor) -> None:
    """Raise ValueError if one of two classes' labels is -1, which may mean class or none."""
    if bool((labels == -1).any()):
        raise ValueError("expected the labels 0 and 1 of two classes, but one is -1: write 0, or -100 where there is no label")


def masks_of(output: Tensor, targets: Tensor) -> Tensor:
    """Return ``labels_of``, with ``IGNORE`` for labels below 0, such as torch's -100."""
    masks = labels_of(output, targets)
    return masks.masked_fill(masks < 0, IGNORE)


def confusion_counts(output: Tensor, targets: Tensor, ignore: int = IGNORE) -> Tensor:
    """Count how often each class is predicted for each label.

    Args:
        output: scores (B, C), (B, C, H, W) or (B, C, D, H, W).
        targets: labels (B,), or masks (B, H, W) or (B, D, H, W). Those below 0, such as
            torch's -100, are left out.

        ignore: a label of masks that is left out, too.

    Returns:
        Int64 (C, C): labels in rows, predictions in columns.

    Raises:
        ValueError: scores are of fewer than two classes, ``targets`` are not one whole
            number per sample or pixel, or a label has no score.
    """
    if output.ndim < 2 or output.shape[1] < 2 or targets.is_floating_point() or targets.shape != (len(output), *output.shape[2:]):
        raise ValueError(f"expected scores (B, C) of 2 classes or more and labels (B,), but got {tuple(output.shape)} and {_form(targets)}")
    classes, predicted = output.shape[1], output.argmax(1)
    if classes == 2 and targets.ndim == 1:
        _check_two_classes(targets)
    if targets.ndim > 1 or bool((targets < 0).any()):
        labelled = (targets >= 0) & (targets != ignore) if targets.ndim > 1 else targets >= 0
        predicted, targets = predicted[labelled], targets[labelled]
    if targets.numel() and (highest := int(targets.max())) >= classes:
        raise ValueError(NO_SCORE.format(classes - 1, highest))
    return torch.bincount(targets * classes + predicted, minlength=classes**2).view(classes, classes)


def log_odds(scores: Tensor) -> Tensor:
    """Compute each class's log odds (B, C), ``log(p / (1 - p))`` of its softmax ``p``.

    They are exact even where ``p`` rounds to 1. There are at least two classes.
    """
    whole, best = scores.logsumexp(1, keepdim=True), scores.argmax(1, keepdim=True)
    others = whole + torch.log1p(-(scores - whole).exp())  # exact for p up to 1/2; the best class, whose p may be larger, follows
    second = scores.scatter(1, best, -torch.inf).logsumexp(1, keepdim=True)
    return scores - others.scatter(1, best, second)
