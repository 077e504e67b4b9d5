"""Hold a loaded data set: uint8 images and their targets, in a training and a test split.

Legend: N samples, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fl_bn.support.names import names_of
from fl_bn.task import LABEL_SETS, LABELS, VALUES, kind_of

CLASSES = 65_536  # the most classes, as many as a client may count for the server (``flower.wire.messages``)
SPLITS = (TEST, TRAINING) = ("test", "training")  # the splits that a run may evaluate
_RESIZE_CHUNK = 1024  # images turned into floats at a time: a whole set as float32 takes four times its size


def evaluated_on(validation_share: float, evaluate_on: str) -> str:
    """Return which samples a run with these values of ``validation-share`` and ``evaluate-on`` evaluates.

    Returns:
        ``test``, ``training`` or ``validation``. Validation samples are meant wherever a run has some.
    """
    return "validation" if validation_share else evaluate_on


class DataNotFound(FileNotFoundError):
    """Signal that a file of a data set is missing on this machine and cannot be downloaded."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Hold a labelled set of square images, in a training and a test split.

    All callers in a process share the tensors: do not write into them.

    Attributes:
        name: name of the set.
        x_train: uint8 (N, C, H, H).
        y_train: labels, int64 (N,) in ``[0, classes)``; sets of labels, int64 0 or 1 (N, classes); or finite
            values, float32 (N,) or (N, classes).
        x_test: as ``x_train``.
        y_test: as ``y_train``.
        classes: number of a network's outputs.
        domain_train: int64 (N,) indices into ``domains``, if the samples come from several sources (such
            as cameras or hospitals); else None.
        domain_test: as ``domain_train``.
        domains: names of the sources; empty without any.

    Raises:
        ValueError: a dtype or shape is wrong, lengths differ, a split is empty, a label or a domain is out of
            range, or images are not square.
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    domain_train: Tensor | None = None
    domain_test: Tensor | None = None
    domains: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_split("train", self.x_train, self.y_train, self.domain_train)
        self._check_split("test", self.x_test, self.y_test, self.domain_test)
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise ValueError(
                f"dataset {self.name!r}: training and test images must have one shape (C, H, W), "
                f"but got {tuple(self.x_train.shape[1:])} and {tuple(self.x_test.shape[1:])}"
            )
        check_alike(f"dataset {self.name!r}", self.y_train, self.y_test)

    @property
    def channels(self) -> int:
        """Return the number of channels, C: colour channels of an image, or features of a table row."""
        return self.x_train.shape[1]

    @property
    def image_size(self) -> int:
        """Return the height of an image in pixels, which is also its width."""
        return self.x_train.shape[2]

    def _check_split(self, split: str, x: Tensor, y: Tensor, domain: Tensor | None) -> None:
        where = f"dataset {self.name!r}"
        if x.dtype != torch.uint8 or x.ndim != 4:
            raise ValueError(f"{where}: x_{split} must be uint8 (N, C, H, W), but got {x.dtype} {tuple(x.shape)}")
        if x.shape[0] == 0:
            raise ValueError(f"{where}: x_{split} must have at least one sample, but has none")
        if x.shape[2] != x.shape[3]:
            raise ValueError(
                f"{where}: images must be square, but those of x_{split} are {x.shape[2]} high and {x.shape[3]} wide; "
                "crop or pad them first"
            )
        self._check_targets(f"y_{split}", y, x.shape[0])
        self._check_domain(split, domain, x.shape[0])

    def _check_targets(self, what: str, y: Tensor, samples: int) -> None:
        if (kind := kind_of(y)) not in (VALUES, LABEL_SETS):
            self._check_indices(what, y, samples, self.classes)
            return
        fits = y.dtype == torch.float32 if kind == VALUES else y.dtype == torch.int64 and not bool(((y != 0) & (y != 1)).any())
        if not fits or y.shape not in {(samples, self.classes), *([(samples,)] if self.classes == 1 and kind == VALUES else [])}:
            wanted = "float32" if kind == VALUES else "int64, 0 or 1,"
            raise ValueError(
                f"dataset {self.name!r}: {what} must be {wanted} of shape {(samples, self.classes)}, but got {y.dtype} {tuple(y.shape)}"
            )
        if not bool(y.isfinite().all()):
            raise ValueError(f"dataset {self.name!r}: {what} must be finite, but sample {int((~y.isfinite()).nonzero()[0, 0])} is not")

    def _check_domain(self, split: str, domain: Tensor | None, samples: int) -> None:
        if (domain is None) != (not self.domains):
            raise ValueError(
                f"dataset {self.name!r}: domain_{split} and domains must both be given, or neither, "
                f"but domain_{split} is {'absent' if domain is None else 'given'} and domains is {self.domains}"
            )
        if domain is not None:
            self._check_indices(f"domain_{split}", domain, samples, len(self.domains))

    def _check_indices(self, what: str, indices: Tensor, samples: int, limit: int) -> None:
        if indices.dtype != torch.int64 or indices.shape != (samples,):
            raise ValueError(
                f"dataset {self.name!r}: {what} must be int64 ({samples},), one for each sample, "
                f"but got {indices.dtype} {tuple(indices.shape)}"
            )
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= limit:
            raise ValueError(f"dataset {self.name!r}: {what} must lie in 0..{limit - 1}, but spans {low}..{high}")


def paths(text: str) -> list[Path]:
    """Return the files or folders that ``text`` names, separated by commas."""
    return [Path(part) for part in names_of(text) if part]


def domains_of(sites: Sequence[Path], train: Sequence[int], test: Sequence[int]) -> dict[str, Any]:
    """Return the fields of ``Dataset`` that say which samples come from which file or folder; empty for a single one.

    Args:
        sites: the files or folders, each of which is a domain with its name.
        train: number of training samples of each. They are in the same order.
        test: number of test samples of each.

    Raises:
        ValueError: two files or folders have the same name.
    """
    names = tuple(site.stem for site in sites)
    if len(set(names)) < len(names):
        raise ValueError(f"a domain has the name of its file, so names must differ, but got {', '.join(names)}: rename one of them")
    if len(sites) == 1:
        return {}
    domain_train, domain_test = (torch.arange(len(sites)).repeat_interleave(torch.tensor(counts)) for counts in (train, test))
    return {"domain_train": domain_train, "domain_test": domain_test, "domains": names}


def to_input(images_uint8: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert uint8 images to the input of a network: 0..255 becomes -1..1.

    The constants are fixed. The data's own mean and deviation would centre better. But they are statistics of the
    clients' data, and would have to leave the clients before training starts.

    >>> to_input(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([-1.,  1.])

    Args:
        images_uint8: images, a tensor of any shape.
        dtype: dtype of the result.

    Returns:
        A tensor of the same shape.

    Raises:
        ValueError: the images are not uint8. Floats in 0..1 would otherwise be divided by 255 again, without
            notice.
    """
    if images_uint8.dtype != torch.uint8:
        raise ValueError(f"to_input expects uint8 images (0..255), but got {images_uint8.dtype}")
    return images_uint8.to(dtype).div_(255).sub_(0.5).div_(0.5)


def targets(where: str, key: str, y: NDArray[np.generic], samples: int) -> Tensor:
    """Convert an array of targets to a tensor.

    Args:
        where: source of the array, for the message.
        key: name of the array, for the message.
        y: (N,) or (N, K).
        samples: N.

    Returns:
        Labels int64 (N,), sets of labels int64 (N, K), or values float32 (N,) or (N, D).

    Raises:
        ValueError: the array is none of these kinds of targets.
    """
    whole, number = np.issubdtype(y.dtype, np.integer), np.issubdtype(y.dtype, np.floating)
    if y.shape[:1] != (samples,) or not (y.ndim in (1, 2) and (whole or number)) and not (y.ndim == 2 and y.dtype == bool):
        raise ValueError(
            f"{where}: {key} is {y.dtype} {y.shape}, but {samples} samples need labels: integers of shape ({samples},). task='regression' "
            f"needs floats of shape ({samples},) or ({samples}, D). task='multi-label' needs zeros and ones of shape ({samples}, K)"
        )
    if number:
        with np.errstate(over="ignore"):  # infinities are refused later
            return torch.from_numpy(y.astype(np.float32))
    labels = y.astype(np.int64)
    if y.ndim == 1 and len(y) and labels.min() < 0:
        raise ValueError(f"{where}: {key} must count classes from 0, but holds {labels.min()}")
    if y.ndim == 1 and len(y) and labels.max() >= CLASSES:
        raise ValueError(f"{where}: {key} must count classes from 0, up to {CLASSES - 1}, but holds {labels.max()}: renumber the classes")
    if y.ndim == 2 and len(y) and not np.isin(labels, (0, 1)).all():
        spans = f"{y.min()}..{y.max()}"
        raise ValueError(f"{where}: {key} of shape {y.shape} must be 0 or 1 (1: the sample has the label), but spans {spans}")
    return torch.from_numpy(labels)


def check_alike(where: str, *parts: Tensor) -> None:
    """Check that all ``parts`` of a data set's targets have the same kind, dtype and number of values per sample.

    Raises:
        ValueError: two parts differ.
    """
    forms = {(y.dtype, y.shape[1:]): f"{kind_of(y)}, {y.dtype} (N{''.join(f', {n}' for n in y.shape[1:])})" for y in parts}
    if len(forms) > 1:
        raise ValueError(f"{where}: y_train and y_test must be of one kind, but got {' and '.join(forms.values())}")


def without_class_0(data: Dataset) -> str:
    """Return a sentence if no sample has label 0, since labels are then probably counted from 1.

    Empty: a sample has label 0, or the targets are no labels.
    """
    if kind_of(data.y_train) != LABELS or not bool((data.y_train != 0).all() and (data.y_test != 0).all()):
        return ""
    least = min(int(y.min()) for y in (data.y_train, data.y_test) if len(y))
    return (
        f"dataset {data.name!r}: no sample has label 0; the labels span {least}..{data.classes - 1}, which would make {data.classes} "
        f"classes. If the labels count from {least}, subtract {least} from every label. If a first class has no samples, remove the class"
    )


def outputs(where: str, *parts: Tensor) -> int:
    """Return how many outputs a network needs for these targets.

    For labels it is the largest label plus one. Else it is the number of labels or values per sample.

    Raises:
        ValueError: see ``check_alike``.
    """
    check_alike(where, *parts)
    if kind_of(parts[0]) == LABELS:
        return 1 + max((int(y.max()) for y in parts if len(y)), default=0)
    return 1 if parts[0].ndim == 1 else parts[0].shape[1]


def describe(y: Tensor, classes: int) -> str:
    """Describe the targets in words: ``10 classes``, ``3 values per sample``, ``5 labels, any of them per sample``."""
    kind = kind_of(y)
    if kind == VALUES:
        return f"{classes} value{'s' if classes > 1 else ''} per sample"
    return f"{classes} labels, any of them per sample" if kind == LABEL_SETS else f"{classes} classes"


def images_to_tensor(array: NDArray[np.uint8]) -> Tensor:
    """Convert an array (N, H, W) or (N, H, W, C) to a contiguous uint8 tensor (N, C, H, W)."""
    array = array[..., None] if array.ndim == 3 else array
    return torch.from_numpy(np.array(array.transpose(0, 3, 1, 2), order="C"))


def how_to_bytes(x: NDArray[np.generic]) -> str:
    """Return advice on how to convert images (N, ...) of another dtype to uint8. The advice depends on the values of the images.

    >>> how_to_bytes(np.array([0.0, 0.5, 1.0]))
    "its values lie in 0..1: save np.rint(x * 255).astype('uint8') (astype alone would make nearly every pixel 0)"
    """
    numbers = x.astype(np.float64) if np.issubdtype(x.dtype, np.number) and not np.iscomplexobj(x) else np.full(1, np.nan)
    low, high = (float(numbers.min()), float(numbers.max())) if numbers.size else (np.nan, np.nan)
    if low >= 0 and high <= 1 and not np.issubdtype(x.dtype, np.integer):
        return "its values lie in 0..1: save np.rint(x * 255).astype('uint8') (astype alone would make nearly every pixel 0)"
    if low >= -1 and high <= 1 and not np.issubdtype(x.dtype, np.integer):
        return "its values lie in -1..1: save np.rint((x + 1) * 127.5).astype('uint8')"
    if low >= 0 and high <= 255:
        return "its values lie in 0..255: save np.rint(x).astype('uint8')"
    return "scale its values to 0..255, round them, and save them with .astype('uint8')"


def resize(images: Tensor, image_size: int) -> Tensor:
    """Resize square uint8 images (N, C, H, H) bilinearly with antialiasing.

    The last bit may differ between processors, as floats are rounded.

    Args:
        images: (N, C, H, H).
        image_size: pixels along each side. 0 keeps the size.

    Returns:
        (N, C, image_size, image_size).

    Raises:
        ValueError: the size is negative, or images are not square, so that resizing would distort them.
    """
    if image_size < 0:
        raise ValueError(f"image_size must be positive, or 0 for the native size, but got {image_size}")
    if images.shape[2] != images.shape[3]:
        raise ValueError(
            f"images must be square to be resized without distortion, but are {images.shape[2]} high and "
            f"{images.shape[3]} wide; crop or pad them first"
        )
    if image_size in (0, images.shape[2]):
        return images
    resized = [
        functional.interpolate(chunk.float(), size=(image_size, image_size), mode="bilinear", antialias=True)
        .round_()
        .clamp_(0, 255)
        .to(torch.uint8)
        for chunk in torch.split(images, _RESIZE_CHUNK)
    ]
    return torch.cat(resized)
