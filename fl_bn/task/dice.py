"""Define segmentation trained by the Dice loss: 1 minus the overlap with the mask.

Legend: B samples, C classes, D depth, H height, W width, P labelled pixels.
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
"""Added to an overlap's numerator and denominator, so that it is 1 for a class without pixels."""


@dataclass(frozen=True)
class Dice(Segmentation):
    """Define segmentation by the soft Dice loss, for images (B, C, H, W) and volumes (B, C, D, H, W).

    The loss is 1 minus the mean over classes of 2 sum(p y) / (sum(p) + sum(y)) over an
    image's labelled pixels, plus ``cross_entropy`` times cross-entropy. p is the class's
    probability, y is 0 or 1. In ``dice``, all images are one sum, and p is 0 or 1.

    >>> import torch
    >>> from fl_bn import Dice
    >>> float(Dice().loss(40 * torch.eye(2)[None, :, None], torch.tensor([[[0, 1]]])))  # two pixels, both right
    0.0

    Attributes:
        target_key: see ``Task``.
        input_keys: see ``Task``.
        output_key: see ``Task``.
        background: whether class 0, mostly the background, counts in loss and ``dice``.
        cross_entropy: its weight in the loss, at least 0.

    Raises:
        ValueError: ``cross_entropy`` is negative or NaN.

    References:
        Sudre et al., "Generalised Dice overlap as a deep learning loss function", DLMIA
        2017, eq. 1 and the two-class form before it. Here all classes have one weight.
    """

    name, metric = "dice", DICE
    ranges: ClassVar[Mapping[str, Range]] = {DICE: SHARE, "accuracy": SHARE, MEAN_IOU: SHARE, CLASS: SHARE}

    background: bool = False
    cross_entropy: float = 0.0

    def __post_init__(self) -> None:
        if not self.cross_entropy >= 0:
            raise ValueError(f"task dice: cross_entropy must be >= 0, but got {self.cross_entropy}")

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss over images, of scores (B, C, ...) and masks (B, ...)."""
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
        """Compute ``dice`` and the metrics of ``Segmentation``."""
        confusion = sums["confusion"]
        first = self._first(len(confusion))
        hits, sizes = confusion.diagonal().double()[first:], (confusion.sum(0) + confusion.sum(1)).double()[first:]
        return {DICE: float((2 * hits / sizes)[sizes > 0].mean())} | super().metrics(sums)

    def _first(self, classes: int) -> int:
        """Return the first class that counts."""
        if classes < 2:
            raise ValueError(f"task dice: the network needs an output for every class, background included, but has {classes} output")
        return 0 if self.background else 1
