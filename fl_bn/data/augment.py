"""Random changes of a batch of training images, as the papers make them.

They work on uint8 images before these are scaled, and draw from a generator that the caller seeds, so that a client's batch
is the same in every process and when FedTAN plays it again. Draw once per batch: a second call draws anew.

Legend: B images of a batch, C channels, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fl_bn.support.names import check_name

PADDING = 4  # pixels, of crop-flip
FIXBN_PADDING = 2  # of crop-flip-2
DEGREES = 30.0  # at most, either way, of flip-rotate
SCALE = (0.08, 1.0)  # share of the area that resized-crop keeps
RATIO = (3 / 4, 4 / 3)  # width by height of what it keeps

Augmentation = Callable[[Tensor, Tensor, np.random.Generator], tuple[Tensor, Tensor]]
Augment = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def augmenter(name: str, rng: np.random.Generator) -> Augment | None:
    """The change that ``Samples.batch`` applies to images (B, C, H, W) and labels or masks; None for "none". Each call draws from ``rng``.

    Raises:
        ValueError: for a name that is not in ``AUGMENTATIONS``; when called, for samples that are no uint8 images.
    """
    check_name("augment", name, AUGMENTATIONS)
    if name == "none":
        return None
    change = AUGMENTATIONS[name]

    def augment(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if x.dtype != torch.uint8 or x.ndim != 4:
            raise ValueError(
                f"augment {name!r} changes uint8 images (B, C, H, W), but got {x.dtype} {tuple(x.shape)}; use 'none' for measurements"
            )
        if name != "segmentation" and y.ndim != 1:
            raise ValueError(f"augment {name!r} would leave the masks behind that belong to the images; use 'segmentation' or 'none'")
        return change(x, y, rng)

    return augment


def _flipped(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Each image mirrored left to right, or not, with equal probability."""
    chosen = torch.from_numpy(rng.random(len(x)) < 0.5).to(x.device)
    return torch.where(chosen.view(-1, *[1] * (x.ndim - 1)), x.flip(-1), x)


def none(x: Tensor, y: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """The same batch; draws nothing."""
    return x, y


def flip(x: Tensor, y: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Each image mirrored left to right with probability 1/2."""
    return _flipped(x, rng), y


def crop_flip(x: Tensor, y: Tensor, rng: np.random.Generator, padding: int = PADDING) -> tuple[Tensor, Tensor]:
    """Padded by ``padding`` black pixels on every side, cropped back at random, then ``flip``: CIFAR by 4, but in FixBN (A.1) by 2."""
    batch, _, height, width = x.shape
    padded = functional.pad(x, (padding,) * 4)
    tops, lefts = (rng.integers(0, 2 * padding + 1, batch).tolist() for _ in range(2))
    windows = zip(padded, tops, lefts, strict=True)  # slices: an index for every pixel takes several times as long
    return _flipped(torch.stack([image[:, top : top + height, left : left + width] for image, top, left in windows]), rng), y


def flip_rotate(x: Tensor, y: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """``flip``, then turned about the centre by -30 to 30 degrees, to the nearest pixel, black beyond: FedBN's Office and DomainNet."""
    height, width = x.shape[2:]
    angle = np.deg2rad(rng.uniform(-DEGREES, DEGREES, len(x)))
    cos, sin, zero = np.cos(angle), np.sin(angle), np.zeros(len(x))
    # Coordinates run from -1 to 1 on both axes, so a turn of pixels needs the sides' proportions.
    turn = np.stack([np.stack([cos, -sin * height / width, zero], 1), np.stack([sin * width / height, cos, zero], 1)], 1)
    return _sampled(_flipped(x, rng), turn, "nearest"), y


def resized_crop(x: Tensor, y: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """A box of 8 to 100 % of the area and of 3:4 to 4:3, enlarged to the whole (bilinearly), then ``flip``: ImageNet.

    Area and proportions are torchvision's draws; a side that would be too long is cut to the image's.
    """
    area, log_ratio = rng.uniform(*SCALE, len(x)), rng.uniform(math.log(RATIO[0]), math.log(RATIO[1]), len(x))
    height, width = x.shape[2:]
    wide = np.minimum(np.sqrt(area * np.exp(log_ratio) * height / width), 1.0)  # as shares of the sides
    high = np.minimum(np.sqrt(area / np.exp(log_ratio) * width / height), 1.0)
    right, down = ((2 * rng.random(len(x)) - 1) * (1 - share) for share in (wide, high))  # where the box has its centre
    zero = np.zeros(len(x))
    box = np.stack([np.stack([wide, zero, right], 1), np.stack([zero, high, down], 1)], 1)
    return _flipped(_sampled(x, box, "bilinear"), rng), y


def segmentation(x: Tensor, y: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Each image and its mask (B, H, W) mirrored together, with probability 1/2.

    Raises:
        ValueError: ``y`` holds no masks of the images' size.
    """
    if y.shape != (x.shape[0], *x.shape[2:]):
        raise ValueError(
            f"augment 'segmentation' needs a mask of each image's size, {(x.shape[0], *x.shape[2:])}, but got labels {tuple(y.shape)}; use "
            "'flip' for labels"
        )
    chosen = torch.from_numpy(rng.random(len(x)) < 0.5)
    mirrored_x, mirrored_y = chosen.to(x.device).view(-1, 1, 1, 1), chosen.to(y.device).view(-1, 1, 1)
    return torch.where(mirrored_x, x.flip(-1), x), torch.where(mirrored_y, y.flip(-1), y)


def _sampled(x: Tensor, affine: np.ndarray[tuple[int, ...], np.dtype[np.float64]], mode: str) -> Tensor:
    """Each image read at where ``affine`` (B, 2, 3) sends the coordinates of its pixels, in -1..1; black beyond its edges."""
    theta = torch.from_numpy(affine).to(x.device, torch.float32)
    grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
    padding = "zeros" if mode == "nearest" else "border"
    read = functional.grid_sample(x.float(), grid, mode=mode, padding_mode=padding, align_corners=False)
    return read.round_().clamp_(0, 255).to(torch.uint8)


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": none,
    "crop-flip": crop_flip,
    "crop-flip-2": partial(crop_flip, padding=FIXBN_PADDING),
    "flip": flip,
    "flip-rotate": flip_rotate,
    "resized-crop": resized_crop,
    "segmentation": segmentation,
}
