"""Load public data sets that torchvision reads and, if there is internet access, downloads."""

from __future__ import annotations

from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_bn.data.images import images_to_tensor, resize
from fl_bn.data.record import DataNotFound, Dataset
from fl_bn.support.extras import need

ROOT = "data"  # the default path, relative to the current folder


CLASSES = {"CIFAR10": 10, "CIFAR100": 100, "MNIST": 10, "SVHN": 10, "USPS": 10}  # by the names of torchvision's classes


def load_public(kind: str, path: str, image_size: int) -> Dataset:
    """Load the data set that torchvision calls ``kind``, one of ``CLASSES``, from the folder ``path``; ``data`` if empty.

    | kind | train + test | image | citation |
    |---|---|---|---|
    | CIFAR10, CIFAR100 | 50,000 + 10,000 | 3, 32, 32 | Krizhevsky 2009 |
    | MNIST | 60,000 + 10,000 | 1, 28, 28 | LeCun et al. 1998 |
    | SVHN | 73,257 + 26,032 | 3, 32, 32 | Netzer et al. 2011 |
    | USPS | 7,291 + 2,007 | 1, 16, 16 | Hull 1994 |

    Raises:
        DataNotFound: files are missing and cannot be downloaded.
        ImportError: torchvision is not installed.
    """
    need(f"data set {kind.lower()!r}", "torchvision")
    from torchvision import datasets  # imported here because it takes a second, and other data sets do not need it

    read = getattr(datasets, kind)
    root = Path(path or ROOT)
    x_train, y_train = _arrays(_split(read, root, train=True), image_size)
    x_test, y_test = _arrays(_split(read, root, train=False), image_size)
    return Dataset(kind.lower(), x_train, y_train, x_test, y_test, classes=CLASSES[kind])


def _split(kind: Any, root: Path, *, train: bool) -> Any:
    """Return one split as torchvision's data set object."""
    # SVHN has a third split, so torchvision takes the split's name.
    arguments: dict[str, Any] = {"split": "train" if train else "test"} if kind.__name__ == "SVHN" else {"train": train}
    try:
        return kind(root, download=True, **arguments)
    except (OSError, HTTPException, RuntimeError) as error:  # torchvision raises RuntimeError for missing or wrong files
        raise DataNotFound(f"{kind.__name__.lower()!r} could not be downloaded ({error}): put its files below {str(root)!r}") from error


def _arrays(split: Any, image_size: int) -> tuple[Tensor, Tensor]:
    """Return images (N, C, H, H) and labels (N,) of one of torchvision's objects."""
    images, labels = np.asarray(split.data), split.labels if hasattr(split, "labels") else split.targets
    if type(split).__name__ == "SVHN":
        images = images.transpose(0, 2, 3, 1)  # torchvision stores only SVHN as (N, C, H, W)
    return resize(images_to_tensor(images), image_size), torch.from_numpy(np.asarray(labels).astype(np.int64))
