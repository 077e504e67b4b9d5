"""Hold a loaded data set: samples and targets, in a training and a test split.

Legend: N samples, C channels, H height.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from fl_bn.support.names import names_of
from fl_bn.task import IGNORE, LABEL_SETS, LABELS, MASKS, VALUES, kind_of

CLASSES = 65_536  # the most classes, as many as a client may count for the server (``flower.wire.messages``)
SPLITS = (TEST, TRAINING) = ("test", "training")  # the splits that a run may evaluate


def evaluated_on(validation_share: float, evaluate_on: str) -> str:
    """Return which samples a run of this config evaluates, ``test``, ``training`` or ``validation``."""
    return "validation" if validation_share else evaluate_on


class DataNotFound(FileNotFoundError):
    """Signal that a data file is missing on this machine and cannot be downloaded."""


class DataError(ValueError):
    """Signal that data are not as expected.

    Attributes:
        source: the file, data function or data set.
        problem: what was expected, what is there, and what to do. It may quote the
            data.
        part: the array, or line and column; empty: all of ``source``.
    """

    def __init__(self, source: object, problem: str, part: str = "") -> None:
        super().__init__(source, problem, part)
        self.source, self.problem, self.part = str(source), problem, part

    def __str__(self) -> str:
        return f"{self.source}{', ' if self.part else ''}{self.part}: {self.problem}"


def expect(holds: bool, source: object, part: str, expected: str, found: object) -> None:
    """Raise a ``DataError`` unless ``holds``: "expected ``expected``, but got ``found``"."""
    if not holds:
        raise DataError(source, f"expected {expected}, but got {found}", part)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Hold a labelled set of images or measurements, in a training and a test split.

    Images are square and uint8 (N, C, H, H). Measurements are finite float32 (N,
    ...), which the network receives unchanged. A table (N, features) counts as
    images of one pixel.

    Callers in a process share the tensors: do not write into them.

    Attributes:
        name: name of the set.
        x_train: images or measurements.
        y_train: labels, int64 (N,) in ``[0, classes)``; sets of labels, int64 0 or
            1 (N, classes); masks, int64 (N, H, W), in which 255 and labels below 0
            do not count; or finite values, float32 (N,) or (N, classes).
        x_test: as ``x_train``.
        y_test: as ``y_train``.
        classes: number of a network's outputs.
        domain_train: int64 (N,) indices into ``domains``, if there are several
            sources (cameras, hospitals); else None.
        domain_test: as ``domain_train``.
        domains: names of the sources; may be empty.
        group_train: int64 (N,); samples with one number, such as a patient's, are
            never divided between training and validation. None: each is alone.
        counted: whether ``classes`` is the largest label plus one, since nobody
            stated it.
        notes: what was left out or replaced in the files, in sentences.

    Raises:
        DataError: a tensor has another form, a split is empty, or a value is out of
            range.
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
    group_train: Tensor | None = None
    counted: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for split in ("train", "test"):
            x, y, domain = (getattr(self, f"{what}_{split}") for what in ("x", "y", "domain"))
            expect(len(x) > 0, self.name, f"x_{split}", "at least one sample", "none")
            self._check_samples(f"x_{split}", x)
            self._check_targets(f"y_{split}", y, x)
            expect((domain is None) != bool(self.domains), self.name, f"domain_{split}", "domains and their names, or neither", domain)
            if domain is not None:
                self._check_indices(f"domain_{split}", domain, (len(x),), len(self.domains))
        same_form(self.name, "x_train and x_test", [self.x_train, self.x_test])
        same_form(self.name, "y_train and y_test", [self.y_train, self.y_test])

    @property
    def channels(self) -> int:
        """Return the number of an image's colour channels, or of a row's features."""
        return self.x_train.shape[1]

    @property
    def image_size(self) -> int:
        """Return an image's height in pixels; 1 for a row of a table."""
        return self.x_train.shape[2] if self.x_train.ndim > 2 else 1

    def select(self, train: Tensor, test: Tensor, **changes: Any) -> Self:
        """Return the chosen samples, by indices or masks, with other ``changes`` of attributes."""
        splits = {"train": train, "test": test}
        names = {"group_train": train, **{f"{what}_{split}": of for split, of in splits.items() for what in ("x", "y", "domain")}}
        chosen = {name: tensor[of] for name, of in names.items() if (tensor := getattr(self, name)) is not None}
        return replace(self, **{**chosen, **changes})

    def tested_on_training(self) -> Self:
        """Return the data set with its training samples also as test samples."""
        return replace(self, x_test=self.x_train, y_test=self.y_train, domain_test=self.domain_train)

    def _check_samples(self, part: str, x: Tensor) -> None:
        if x.dtype == torch.uint8:
            square = x.ndim == 4 and x.shape[2] == x.shape[3]
            expect(square, self.name, part, "square images (N, C, H, H): crop or pad them first", tuple(x.shape))
            return
        measured = x.dtype == torch.float32 and x.ndim > 1
        expect(measured, self.name, part, "images (uint8), or float32 of at least two axes", f"{x.dtype} {tuple(x.shape)}")
        wrong = (~x.isfinite().flatten(1).all(1)).nonzero().flatten().tolist()
        expect(not wrong, self.name, part, "finite numbers: fill missing values, or drop the samples", f"NaN or infinity in {few(wrong)}")

    def _check_targets(self, part: str, y: Tensor, x: Tensor) -> None:
        kind = kind_of(y)
        if kind not in (VALUES, LABEL_SETS):
            known = y.where((y >= 0) & (y != IGNORE), 0) if kind == MASKS else y  # a task leaves out the other pixels
            self._check_indices(part, known, (len(x), *(x.shape[2:] if kind == MASKS else ())), min(self.classes, CLASSES))
            return
        shapes = {(len(x), self.classes), *([(len(x),)] if self.classes == 1 and kind == VALUES else [])}
        fits = y.dtype == (torch.float32 if kind == VALUES else torch.int64) and y.shape in shapes
        expect(fits, self.name, part, f"{kind} {(len(x), self.classes)}", f"{y.dtype} {tuple(y.shape)}")
        wrong = (~y.isfinite() if kind == VALUES else (y != 0) & (y != 1)).reshape(len(y), -1).any(1).nonzero().flatten().tolist()
        expect(not wrong, self.name, part, "finite numbers" if kind == VALUES else "0 or 1", f"others in {few(wrong)}")

    def _check_indices(self, part: str, indices: Tensor, shape: tuple[int, ...], limit: int) -> None:
        fits = indices.dtype == torch.int64 and indices.shape == shape
        expect(fits, self.name, part, f"int64 {shape}, one for each sample or pixel", f"{indices.dtype} {tuple(indices.shape)}")
        low, high = int(indices.min()), int(indices.max())
        expect(low >= 0 and high < limit, self.name, part, f"0..{limit - 1}", f"{low}..{high}")


def few(samples: Sequence[int]) -> str:
    """Name the first samples of a list: ``samples 0, 1, 2 and 7 more``."""
    more = f" and {len(samples) - 3} more" if len(samples) > 3 else ""
    return f"sample{'s' * (len(samples) > 1)} {', '.join(map(str, samples[:3]))}{more}"


def same_form(source: object, part: str, tensors: Sequence[Tensor]) -> None:
    """Check that samples, or targets, have one dtype and one shape."""
    forms = dict.fromkeys((str(one.dtype).removeprefix("torch."), tuple(one.shape[1:])) for one in tensors)
    expect(len(forms) == 1, source, part, "the same form", " and ".join(f"{dtype} (N, *{shape})" for dtype, shape in forms))


def paths(text: str) -> list[Path]:
    """Return the files or folders that ``text`` names, separated by commas."""
    return [Path(part) for part in names_of(text) if part]


def domains_of(sites: Sequence[Path], train: Sequence[int], test: Sequence[int]) -> dict[str, Any]:
    """Return the fields of ``Dataset`` about domains; empty for a single site.

    ``train`` and ``test`` are the numbers of samples of each site, in the same
    order.
    """
    names = tuple(site.stem for site in sites)
    expect(len(set(names)) == len(names), sites[0], "", "a name of its own for each file or folder", ", ".join(names))
    if len(sites) == 1:
        return {}
    domain_train, domain_test = (torch.arange(len(sites)).repeat_interleave(torch.tensor(counts)) for counts in (train, test))
    return {"domain_train": domain_train, "domain_test": domain_test, "domains": names}


def untrained_classes(data: Dataset) -> str:
    """Name the first ten classes without a training sample; empty: none."""
    if kind_of(data.y_train) != LABELS:
        return ""
    missing = (torch.bincount(data.y_train, minlength=data.classes) == 0).nonzero().flatten().tolist()
    return ", ".join(map(str, missing[:10])) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")


def describe(y: Tensor, classes: int) -> str:
    """Describe the targets: ``10 classes``, ``3 values per sample`` or so."""
    kind = kind_of(y)
    if kind == VALUES:
        return f"{classes} value{'s' if classes > 1 else ''} per sample"
    return f"{classes} labels, any of them per sample" if kind == LABEL_SETS else f"{classes} classes"
