"""A data set that is built in milliseconds, and a run config for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

CLASSES = 4


def small_npz(
    folder: Path, name: str = "small", light: float = 1.0, classes: int = CLASSES, side: int = 4, colours: int = 0,
    samples: tuple[int, int] = (48, 24),
) -> Path:  # fmt: skip
    """Write training and test images, 4 by 4 pixels; each class is brighter than the class before. Return the file.

    ``light`` is the brightness of the camera; without ``colours``, images are grey.
    """
    rng, shape = np.random.default_rng(0), (side, side, colours) if colours else (side, side)
    arrays: dict[str, np.ndarray] = {}
    for split, number in zip(("train", "test"), samples, strict=True):
        y = np.arange(number) % classes
        x = 50 * y.reshape(-1, *[1] * len(shape)) + rng.integers(0, 60, (number, *shape))
        arrays[f"x_{split}"], arrays[f"y_{split}"] = (light * x).astype(np.uint8), y.astype(np.int64)
    file = folder / f"{name}.npz"
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file


def small_sites(folder: Path, sites: int = 5) -> list[str]:
    """Write a file for each of several sites, each with a darker camera than the last one, and all four classes."""
    return [str(small_npz(folder, f"s{site}", 1 - site / sites)) for site in range(sites)]


def small_config(folder: Path) -> dict[str, str | int | float | bool]:
    run = {"dataset": "npz", "data-path": str(small_npz(folder)), "model": "mlp", "clients": 5}
    return {**run, "rounds": 1, "local-steps": 1, "batch-size": 4, "device": "cpu"}
