"""Hold data whose labels are masks: one class per pixel.

Legend: N samples, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_bn.data.record import Dataset
from fl_bn.task import IGNORE


@dataclass(frozen=True, eq=False)
class Segmentation(Dataset):
    """Hold images with a class for each pixel.

    ``x_train`` and ``x_test`` are uint8 (N, C, H, W), square or not. ``y_train`` and ``y_test`` are masks,
    int64 (N, H, W) in ``[0, classes)`` or ``IGNORE``. A loss leaves out pixels of ``IGNORE``:
    ``cross_entropy(out, y, ignore_index=IGNORE)``.
    """

    @property
    def width(self) -> int:
        """Return the width of an image in pixels. ``image_size`` is its height."""
        return self.x_train.shape[3]

    def _check_split(self, split: str, x: Tensor, y: Tensor, domain: Tensor | None) -> None:
        where = f"dataset {self.name!r}"
        if x.dtype != torch.uint8 or x.ndim != 4 or x.shape[0] == 0:
            raise ValueError(f"{where}: x_{split} must be uint8 (N, C, H, W) of at least one image, but got {x.dtype} {tuple(x.shape)}")
        masks = (x.shape[0], *x.shape[2:])
        if y.dtype != torch.int64 or y.shape != masks:
            raise ValueError(f"{where}: y_{split} must be int64 {masks}, a mask for each image, but got {y.dtype} {tuple(y.shape)}")
        for i, mask in enumerate(y):  # one by one: a comparison of all takes as much memory again
            if bool(((mask < 0) | (mask >= self.classes)).logical_and_(mask != IGNORE).any()):
                raise ValueError(f"{where}: y_{split} must lie in 0..{self.classes - 1} or be {IGNORE} (ignored), but mask {i} does not")
        self._check_domain(split, domain, x.shape[0])
