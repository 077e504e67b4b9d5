"""A data set that is built in milliseconds, and a run config for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

CLASSES = 4


def small_npz(folder: Path, name: str = "small", light: float = 1.0) -> Path:
    """Write 48 training and 24 test images, grey, 4 by 4 pixels; each class is brighter than the class before. Return the file.

    ``light`` is the brightness of the camera.
    """
    rng = np.random.default_rng(0)
    labels = {"train": np.arange(48) % CLASSES, "test": np.arange(24) % CLASSES}
    arrays: dict[str, np.ndarray] = {}
    for split, y in labels.items():
        arrays[f"x_{split}"] = (light * (50 * y[:, None, None] + rng.integers(0, 60, (len(y), 4, 4)))).astype(np.uint8)
        arrays[f"y_{split}"] = y.astype(np.int64)
    file = folder / f"{name}.npz"
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file


def small_sites(folder: Path, sites: int = 5) -> list[str]:
    """Write a file for each of several sites, each with a darker camera than the last one, and all four classes."""
    return [str(small_npz(folder, f"s{site}", 1 - site / sites)) for site in range(sites)]


def small_config(folder: Path) -> dict[str, str | int | float | bool]:
    return {
        "dataset": "npz",
        "data-path": str(small_npz(folder)),
        "model": "mlp",
        "clients": 5,
        "rounds": 1,
        "local-steps": 1,
        "batch-size": 4,
        "device": "cpu",
    }
