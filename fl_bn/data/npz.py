"""Load data of your own: numpy archives with ``x_train``, ``y_train``, ``x_test`` and ``y_test``."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_bn.data.record import DataNotFound, Dataset, domains_of, how_to_bytes, images_to_tensor, outputs, paths, resize, targets

SPLITS = ("train", "test")


def load_npz(path: str, image_size: int) -> Dataset:
    """Load the data set ``npz`` from one archive, or from several archives, each of which is a domain.

    Images are uint8 (N, H, W, C) or (N, H, W) and square. Labels are integers (N,) that count from 0. The
    number of classes is the largest label, plus one. For other tasks, ``y_train`` and ``y_test`` are floats
    (N,) or (N, D) (regression), or 0 or 1 (N, K) (multi-label). If some images are in colour, the grey images get
    three equal channels. A domain is named after its file. Pickled objects are never loaded.

    Args:
        path: the archives, separated by commas.
        image_size: pixels along each side. 0: the largest size of all images.

    Raises:
        DataNotFound: there is no such file.
        ValueError: there is no path, two files have the same name, a file is not an archive, or an array is missing or
            has another form, or ``x_train`` and ``x_test`` of a file differ in size or channels.
    """
    files = paths(path)
    if not files:
        raise ValueError("dataset 'npz' needs a path: one .npz file, or several separated by commas")
    archives = [_read(file) for file in files]
    images = _one_shape([archive[f"x_{split}"] for archive in archives for split in SPLITS], image_size)
    train, test = torch.cat(images[0::2]), torch.cat(images[1::2])
    classes = outputs(path, *(archive[f"y_{split}"] for archive in archives for split in SPLITS))
    labels = {split: torch.cat([archive[f"y_{split}"] for archive in archives]) for split in SPLITS}
    domains = domains_of(files, *([len(archive[f"y_{split}"]) for archive in archives] for split in SPLITS))
    return Dataset("npz", train, labels["train"], test, labels["test"], classes=classes, **domains)


def _one_shape(images: list[Tensor], image_size: int) -> list[Tensor]:
    """Bring the images (N, C, H, H) of all arrays to one number of channels and one size.

    Where some images are in colour, the grey ones get three equal channels. The size is ``image_size``. 0: the largest size.
    """
    channels = max(x.shape[1] for x in images)
    size = image_size or max(x.shape[2] for x in images)
    return [resize(x.expand(-1, channels, -1, -1) if x.shape[1] == 1 else x, size).contiguous() for x in images]


def _read(file: Path) -> dict[str, Tensor]:
    """Read and check the four arrays of one archive. Images become (N, C, H, W)."""
    if not file.is_file():
        raise DataNotFound(
            f"dataset 'npz': there is no file {str(file)!r} (a relative path starts at the current folder, {str(Path.cwd())!r})"
        )
    try:
        archive = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file}: expected a .npz archive as np.savez writes it, but could not read it: {error}") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError(f"{file}: expected a .npz archive of several arrays, but got a single array; use np.savez")
    with archive:
        arrays: dict[str, Tensor] = {}
        for split in SPLITS:
            x, y = (_array(file, archive, f"{letter}_{split}") for letter in "xy")
            arrays[f"x_{split}"] = _checked_images(file, f"x_{split}", x)
            arrays[f"y_{split}"] = targets(str(file), f"y_{split}", y, len(x))
    train, test = (tuple(arrays[f"x_{split}"].shape[1:]) for split in SPLITS)
    if train != test:
        raise ValueError(
            f"{file}: x_train has images of {train[1]} x {train[1]} pixels in {train[0]} channels, but x_test of {test[1]} x {test[1]} in "
            f"{test[0]}: give both the same form"
        )
    return arrays


def _array(file: Path, archive: np.lib.npyio.NpzFile, key: str) -> NDArray[np.generic]:
    if key not in archive.files:
        raise ValueError(f"{file}: expected an array {key!r}, but the file holds {', '.join(archive.files) or 'nothing'}")
    try:
        array: NDArray[np.generic] = archive[key]
    except (ValueError, EOFError, zipfile.BadZipFile) as error:  # an object array is a ValueError, without pickles
        raise ValueError(
            f"{file}: expected {key} as an array of numbers, but could not read it: {error}. Save it by np.savez, without dtype=object"
        ) from error
    return array


def _checked_images(file: Path, key: str, x: NDArray[np.generic]) -> Tensor:
    if x.dtype != np.uint8:
        raise ValueError(f"{file}: {key} must be uint8 (0..255), but is {x.dtype}; {how_to_bytes(x)}")
    if x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] not in (1, 3)) or len(x) == 0:
        raise ValueError(
            f"{file}: {key} must be (N, H, W) or (N, H, W, C) with 1 or 3 channels C last and at least one image, but is {x.shape}"
        )
    if x.shape[1] != x.shape[2]:
        raise ValueError(f"{file}: {key} must hold square images, but is {x.shape}; crop or pad them first")
    return images_to_tensor(x.astype(np.uint8, copy=False))
