"""Write artificial data in the form of published sets that are restricted by a licence or too large.

These data serve to try settings offline, not to judge a method. Every function writes files into a folder. The loader of
the real set can read them there.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ROAD, SIDEWALK, BUILDING, VEGETATION, SKY, CAR = 7, 8, 11, 21, 23, 26  # labelIds of Cityscapes
CITIES = {
    "aachen": ((128, 64, 64), 0.0),
    "zurich": ((70, 90, 140), 55.0),
}  # light of a city: what its colours are drawn towards, and how far
COLOURS = {ROAD: (90, 90, 95), SIDEWALK: (170, 150, 150), BUILDING: (150, 110, 80), VEGETATION: (60, 120, 50), SKY: (150, 190, 230)}
ROIS = 110
FEATURES = ROIS * (ROIS - 1) // 2  # 5,995: the upper triangle of a correlation matrix
SITES = {"NYU": 48, "USM": 36, "UM": 36, "UCLA": 30}


def cityscapes(folder: Path, train: int = 24, test: int = 8, height: int = 64, seed: int = 0) -> None:
    """Write artificial street scenes of two cities under ``folder/cityscapes``, in the layout of Cityscapes.

    The cities differ in light, in the share of sky, and in the number of cars. Images have (height, 2 height)
    pixels and six of Cityscapes' classes.
    """
    rng = np.random.default_rng(np.random.SeedSequence([0xC17E, seed]))
    for split, count in (("train", train), ("val", test)):
        for place, city in enumerate(CITIES):
            for kind in ("leftImg8bit", "gtFine"):
                (folder / "cityscapes" / kind / split / city).mkdir(parents=True, exist_ok=True)
            for n in range(count):
                image, mask = _scene(height, place, rng)
                name = f"{city}_{n:06d}_000000"
                Image.fromarray(image).save(folder / "cityscapes" / "leftImg8bit" / split / city / f"{name}_leftImg8bit.png")
                Image.fromarray(mask).save(folder / "cityscapes" / "gtFine" / split / city / f"{name}_gtFine_labelIds.png")


def _scene(height: int, place: int, rng: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    width = 2 * height
    mask = np.full((height, width), SKY, dtype=np.uint8)
    horizon = int(height * rng.uniform(0.35, 0.5) - place * height * 0.1)
    edge = 0
    while edge < width:  # houses and trees along the street
        step = int(rng.integers(height // 8, height // 2))
        top = int(horizon * rng.uniform(0.2, 0.9))
        mask[top : horizon + 2, edge : edge + step] = VEGETATION if rng.random() < 0.35 else BUILDING
        edge += step
    mask[horizon:] = SIDEWALK
    rows = np.arange(horizon, height)
    half = (0.15 + 0.85 * (rows - horizon) / (height - horizon)) * width * 0.45
    road = np.abs(np.arange(width)[None] - width / 2) < half[:, None]
    mask[horizon:][road] = ROAD
    image = np.zeros((height, width, 3))
    for label, colour in COLOURS.items():
        image[mask == label] = np.array(colour) + rng.normal(0, 12, 3)
    for _ in range(int(rng.integers(1, 3)) + 2 * place):
        y = int(rng.integers(horizon + 1, height - 4))
        x, size = int(rng.integers(0, width - 8)), 3 + (y - horizon) // 3
        mask[y : y + size, x : x + 2 * size] = CAR
        image[y : y + size, x : x + 2 * size] = rng.integers(20, 220, 3)
    target, light = list(CITIES.values())[place]
    image += rng.normal(0, 10, image.shape) + (np.array(target) - 128.0) * light / 128.0 - light / 2
    return image.clip(0, 255).astype(np.uint8), mask


def abide(folder: Path, seed: int = 0) -> None:
    """Write artificial connectome vectors (N, 5,995) of four sites with two classes under ``folder/abide``.

    There is one npz per site, with ``x`` and ``y``. The classes differ in the same way at all sites. Each site
    scales and shifts the features in its own way, as scanners do.
    """
    rng = np.random.default_rng(np.random.SeedSequence([0xAB1D, seed]))
    (folder / "abide").mkdir(parents=True, exist_ok=True)
    direction = rng.normal(0, 1, FEATURES) * (rng.random(FEATURES) < 0.05)
    for site, subjects in SITES.items():
        y = rng.permutation(np.arange(subjects) % 2)
        x = rng.normal(0, 1, (subjects, FEATURES)) + 0.35 * direction * (2 * y[:, None] - 1)
        x = np.tanh(0.3 * x * rng.uniform(0.5, 2.0, FEATURES) + rng.normal(0, 0.4, FEATURES))
        np.savez_compressed(folder / "abide" / f"{site}.npz", x=x.astype(np.float32), y=y.astype(np.int64))
