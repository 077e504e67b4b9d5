"""Change a batch of training images at random, as in the papers.

The changes work on uint8 images before scaling, and draw from a generator that the
caller seeds. So a client's batch is the same in every process, and when FedTAN
repeats a step. A second call draws again.

Legend: B images, C channels, H height, W width.
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
DEGREES = 30.0  # largest angle of flip-rotate, to either side
SCALE = (0.08, 1.0)  # share of the area that resized-crop keeps
RATIO = (3 / 4, 4 / 3)  # width by height of the part that resized-crop keeps

Augmentation = Callable[[Tensor, Tensor, np.random.Generator], tuple[Tensor, Tensor]]
Augment = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def augmenter(name: str, rng: np.random.Generator) -> Augment | None:
    """Return the function that ``Samples.batch`` applies to images (B, C, H, W) and targets.

    Args:
        name: one of ``AUGMENTATIONS``.
        rng: the generator from which each call draws.

    Returns:
        The function, or None for "none". It raises ValueError unless inputs are
        uint8 images, and labels or masks suit.

    Raises:
        ValueError: the name is unknown.
    """
    check_name("augment", name, AUGMENTATIONS)
    change = AUGMENTATIONS[name]
    if change is None:
        return None

    def augment(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if x.dtype != torch.uint8 or x.ndim != 4:
            raise ValueError(f"augment {name!r} changes uint8 images (B, C, H, W), but got {x.dtype} {tuple(x.shape)}: use 'none'")
        if name != "segmentation" and y.ndim != 1:
            raise ValueError(f"augment {name!r} needs one label per image, but got {tuple(y.shape)}: use 'segmentation' for masks")
        return change(x, y, rng)

    return augment


def flip(x: Tensor, y: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Mirror each image left to right with probability 1/2."""
    chosen = torch.from_numpy(rng.random(len(x)) < 0.5).to(x.device)
    return torch.where(chosen.view(-1, 1, 1, 1), x.flip(-1), x), y


def crop_flip(x: Tensor, y: Tensor, rng: np.random.Generator, padding: int = PADDING) -> tuple[Tensor, Tensor]:
    """Pad images by black pixels, cut out their size at a random place, then ``flip``.

    The usual padding for CIFAR is 4, that of FixBN 2 (A.1).
    """
    batch, _, height, width = x.shape
    padded = functional.pad(x, (padding,) * 4)
    tops, lefts = (rng.integers(0, 2 * padding + 1, batch).tolist() for _ in range(2))
    windows = zip(padded, tops, lefts, strict=True)  # slices: an index for every pixel takes several times as long
    cut = torch.stack([image[:, top : top + height, left : left + width] for image, top, left in windows])
    return flip(cut, y, rng)


def flip_rotate(x: Tensor, y: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Apply ``flip``, then rotate by -30 to 30 degrees, as FedBN does.

    Pixels get the nearest pixel's value, or black outside the image.
    """
    height, width = x.shape[2:]
    angle = np.deg2rad(rng.uniform(-DEGREES, DEGREES, len(x)))
    cos, sin, zero = np.cos(angle), np.sin(angle), np.zeros(len(x))
    # Coordinates run from -1 to 1 on both axes, so a turn of pixels needs the sides' proportions.
    turn = np.stack([np.stack([cos, -sin * height / width, zero], 1), np.stack([sin * width / height, cos, zero], 1)], 1)
    return _sampled(flip(x, y, rng)[0], turn, "nearest"), y


def resized_crop(x: Tensor, y: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Cut out a random box, enlarge it to the image's size, then ``flip``.

    It has 8 to 100 % of the area, and a width of 3/4 to 4/3 of its height, drawn as
    in torchvision. No side is longer than the image's.
    """
    area, log_ratio = rng.uniform(*SCALE, len(x)), rng.uniform(math.log(RATIO[0]), math.log(RATIO[1]), len(x))
    height, width = x.shape[2:]
    wide = np.minimum(np.sqrt(area * np.exp(log_ratio) * height / width), 1.0)  # as shares of the sides
    high = np.minimum(np.sqrt(area / np.exp(log_ratio) * width / height), 1.0)
    right, down = ((2 * rng.random(len(x)) - 1) * (1 - share) for share in (wide, high))  # where the box has its centre
    zero = np.zeros(len(x))
    box = np.stack([np.stack([wide, zero, right], 1), np.stack([zero, high, down], 1)], 1)
    return flip(_sampled(x, box, "bilinear"), y, rng)


def segmentation(x: Tensor, y: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Mirror images with their masks (B, H, W), with probability 1/2.

    Raises:
        ValueError: ``y`` does not hold one mask of an image's size for each.
    """
    if y.shape != (wanted := (x.shape[0], *x.shape[2:])):
        raise ValueError(f"augment 'segmentation' needs masks {wanted}, but got {tuple(y.shape)}: use 'flip' for labels")
    chosen = torch.from_numpy(rng.random(len(x)) < 0.5)
    mirrored_x, mirrored_y = chosen.to(x.device).view(-1, 1, 1, 1), chosen.to(y.device).view(-1, 1, 1)
    return torch.where(mirrored_x, x.flip(-1), x), torch.where(mirrored_y, y.flip(-1), y)


def _sampled(x: Tensor, affine: np.ndarray[tuple[int, ...], np.dtype[np.float64]], mode: str) -> Tensor:
    """Transform images by matrices ``affine`` (B, 2, 3), as torch's ``affine_grid``.

    A matrix maps a pixel's coordinates in the result to those in the image, in
    -1..1. ``mode`` is the interpolation. Outside, the image is black for "nearest",
    else its border is repeated.
    """
    theta = torch.from_numpy(affine).to(x.device, torch.float32)
    grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
    padding = "zeros" if mode == "nearest" else "border"
    read = functional.grid_sample(x.float(), grid, mode=mode, padding_mode=padding, align_corners=False)
    return read.round_().clamp_(0, 255).to(torch.uint8)


AUGMENTATIONS: dict[str, Augmentation | None] = {
    "none": None,
    "crop-flip": crop_flip,
    "crop-flip-2": partial(crop_flip, padding=FIXBN_PADDING),
    "flip": flip,
    "flip-rotate": flip_rotate,
    "resized-crop": resized_crop,
    "segmentation": segmentation,
}
