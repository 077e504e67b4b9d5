"""Data sets by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from fl_bn.data import connectomes, digits, digits_five, folder, image_folders, npz, public, segmentation
from fl_bn.data.function import load_function
from fl_bn.data.record import DataNotFound, Dataset
from fl_bn.data.record import to_input as images_to_input
from fl_bn.support.names import expected
from fl_bn.support.user_code import Modules

__all__ = ["DATASETS", "DataNotFound", "Dataset", "load", "to_input"]

DATASETS: dict[str, Callable[[str, int], Dataset]] = {
    "digits": digits.load_digits,
    "digits-plain": digits.load_digits_plain,
    "cifar10": partial(public.load_public, "CIFAR10"),
    "cifar100": partial(public.load_public, "CIFAR100"),
    "mnist": partial(public.load_public, "MNIST"),
    "svhn": partial(public.load_public, "SVHN"),
    "usps": partial(public.load_public, "USPS"),
    "mnist-m": digits_five.load_mnist_m,
    "synth-digits": digits_five.load_synth_digits,
    "digits-five": digits_five.load_digits_five,
    "digits-five-pooled": digits_five.load_digits_five_pooled,
    **{name: partial(image_folders.load_images, name) for name in image_folders.LAYOUTS},
    "cityscapes": segmentation.load_cityscapes,
    "abide": connectomes.load_abide,
    "npz": npz.load_npz,
    "folder": folder.load_folder,
}


def load(name: str, path: str = "", image_size: int = 0, modules: Modules | None = None) -> Dataset:
    """The data set ``name``, one of ``DATASETS`` or one's own function "package.module:function"; read once per process, then shared.

    ``path`` is the files of ``npz``, the folder of ``folder`` or of a published data set (``data`` where it is empty), or what
    one's own function makes of it. ``image_size`` is in pixels; 0 keeps the native size or, where a set has many, takes that
    of its papers; any other resizes bilinearly with antialiasing. Which files go where: docs/data.md. ``modules``: where one's own
    function may come from, if not from anywhere.

    Raises:
        ValueError: for an unknown name, a negative size, or data that are not what they should be.
        DataNotFound: where files are missing and cannot be downloaded.
    """
    return _load(name, path, image_size, modules)


# Apart from load(), whose callers leave out defaults or name arguments: each spelling would be cached anew. A few sets
# suffice, as one process rarely works on more.
@lru_cache(maxsize=4)
def _load(name: str, path: str, image_size: int, modules: Modules | None) -> Dataset:
    if name not in DATASETS and ":" not in name:
        others = ", or your own function as package.module:function ('npz' and 'folder' read your own files)"
        raise ValueError(expected("dataset", name, DATASETS, others))
    if image_size < 0:
        raise ValueError(f"image_size must be positive, or 0 for the native size, but got {image_size}")
    if ":" in name:
        return load_function(name, path, image_size, modules)
    return DATASETS[name](path, image_size)


def to_input(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Network input of a data set's samples: uint8 images as -1..1, measurements (floats) as they are; both in ``dtype``."""
    return x.to(dtype) if x.is_floating_point() else images_to_input(x, dtype)
