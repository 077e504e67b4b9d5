"""Data sets by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

from fl_bn.data import digits, npz, public
from fl_bn.data.record import DataNotFound, Dataset, to_input

__all__ = ["DATASETS", "DataNotFound", "Dataset", "load", "to_input"]

DATASETS: dict[str, Callable[[str, int], Dataset]] = {
    "digits": digits.load_digits,
    "digits-plain": digits.load_digits_plain,
    "cifar10": partial(public.load_public, "CIFAR10"),
    "cifar100": partial(public.load_public, "CIFAR100"),
    "mnist": partial(public.load_public, "MNIST"),
    "svhn": partial(public.load_public, "SVHN"),
    "usps": partial(public.load_public, "USPS"),
    "npz": npz.load_npz,
}


def load(name: str, path: str = "", image_size: int = 0) -> Dataset:
    """The data set ``name``, one of ``DATASETS``; read once per process, then shared.

    ``path`` is the files of ``npz``, or the folder of a public data set (``data`` where it is empty). ``image_size`` is
    in pixels; 0 keeps the native size, any other resizes bilinearly with antialiasing.

    Raises:
        ValueError: for an unknown name, a negative size, or data that are not what they should be.
        DataNotFound: where files are missing and cannot be downloaded.
    """
    return _load(name, path, image_size)


# Apart from load(), whose callers leave out defaults or name arguments: each spelling would be cached anew. A few sets
# suffice, as one process rarely works on more.
@lru_cache(maxsize=4)
def _load(name: str, path: str, image_size: int) -> Dataset:
    if name not in DATASETS:
        raise ValueError(f"dataset must be one of {', '.join(DATASETS)}, but got {name!r}; 'npz' reads your own files")
    if image_size < 0:
        raise ValueError(f"image_size must be positive, or 0 for the native size, but got {image_size}")
    return DATASETS[name](path, image_size)
