"""Define a task with a class per pixel or voxel, trained by the Dice loss: 1 minus the overlap of predictions and masks.

Legend: B samples of a batch, C classes, D depth, H height, W width, P labelled pixels of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_bn.task.classification import CLASS, IGNORE, MEAN_IOU, Segmentation, masks_of
from fl_bn.task.task import SHARE, Range

DICE = "dice"
SMOOTH = 1e-5
"""Added to the numerator and the denominator of an overlap. A class without predicted and true pixels then has an overlap of 1."""


@dataclass(frozen=True)
class Dice(Segmentation):
    """Define segmentation by the soft Dice loss, for images (B, C, H, W) and volumes (B, C, D, H, W).

    An image's loss is 1 minus the mean over classes of 2 sum(p y) / (sum(p) + sum(y)), plus its cross-entropy times ``cross_entropy``.
    Sums are over labelled pixels. At a pixel, p is the class's probability, and y is 1 if the class is the label, else 0. In the
    metric ``dice``, sums are over all images, and p is 1 if the class is the predicted one, else 0.

    >>> import torch
    >>> from fl_bn import Dice
    >>> float(Dice().loss(40 * torch.eye(2)[None, :, None], torch.tensor([[[0, 1]]])))  # two pixels, both right
    0.0

    Attributes:
        target_key: key of the masks, if batches are dicts. Empty: see ``Task.read``.
        input_keys: keys of the inputs, if batches are dicts. Empty: see ``Task.read``.
        output_key: key or index of the scores in a network's output. None: see ``Task.output``.
        background: whether class 0 counts in loss and ``dice``; it is the background of most masks.
        cross_entropy: weight of the cross-entropy in the loss, at least 0.

    Raises:
        ValueError: ``cross_entropy`` is negative or NaN.

    References:
        Sudre et al., "Generalised Dice overlap as a deep learning loss function", DLMIA 2017, eq. 1 and the
        two-class form before it. Here every class has the same weight.
    """

    name, metric = "dice", DICE
    ranges: ClassVar[Mapping[str, Range]] = {DICE: SHARE, "accuracy": SHARE, MEAN_IOU: SHARE, CLASS: SHARE}

    background: bool = False
    cross_entropy: float = 0.0

    def __post_init__(self) -> None:
        if not self.cross_entropy >= 0:
            raise ValueError(f"task dice: cross_entropy must be >= 0, but got {self.cross_entropy}")

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss over the images, of scores (B, C, ...) and masks (B, ...).

        Raises:
            ValueError: The network has outputs for fewer than two classes.
        """
        first, targets = self._first(output.shape[1]), masks_of(output, targets)
        labelled = targets != IGNORE
        kept = labelled.unsqueeze(1).to(output.dtype)
        probability = output.softmax(1) * kept
        truth = torch.zeros_like(output).scatter(1, targets.masked_fill(~labelled, 0).unsqueeze(1), 1.0) * kept
        hits_BC, sizes_BC = (probability * truth).flatten(2).sum(2), (probability + truth).flatten(2).sum(2)
        loss = 1 - ((2 * hits_BC + SMOOTH) / (sizes_BC + SMOOTH))[:, first:].mean()
        if not self.cross_entropy:
            return loss
        pixels_BP = F.cross_entropy(output, targets, ignore_index=IGNORE, reduction="none").flatten(1)
        return loss + self.cross_entropy * (pixels_BP.sum(1) / labelled.flatten(1).sum(1).clamp(min=1)).mean()

    def count(self, targets: Tensor) -> int:
        """Count the images."""
        return len(targets)

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Compute ``dice`` (the overlap of predictions and masks) and the metrics of ``Segmentation``."""
        confusion = sums["confusion"]
        first = self._first(len(confusion))
        hits, sizes = confusion.diagonal().double()[first:], (confusion.sum(0) + confusion.sum(1)).double()[first:]
        return {DICE: float((2 * hits / sizes)[sizes > 0].mean())} | super().metrics(sums)

    def _first(self, classes: int) -> int:
        """Return the index of the first class that counts in loss and ``dice``."""
        if classes < 2:
            raise ValueError(f"task dice: the network needs an output for every class, background included, but has {classes} output")
        return 0 if self.background else 1
