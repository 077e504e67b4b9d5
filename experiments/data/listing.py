"""List the files of published image folders with their classes and domains, and then load the images."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from experiments.data.public import ROOT
from fl_bn.data.folder import Picture, fit, read_picture, visible
from fl_bn.data.images import images_to_tensor
from fl_bn.data.record import DataNotFound, Dataset

Fit = Literal["crop", "stretch"]
Item = TypeVar("Item")
LARGE = 4.0  # GiB from which a warning is due
TEST_SHARE = 0.2  # share of each class of each domain to test on, if no split is published
_STREAM = 0x5B117  # sets these draws apart from others that start from the same seed


class LargeData(UserWarning):
    """Warn that a data set takes much memory, because all of it is held in memory."""


class Image(NamedTuple):
    """Describe one image file.

    Attributes:
        file: path of the file.
        label: index of the image's class.
        domain: index of the image's domain; 0 in a set without domains.
    """

    file: Path
    label: int
    domain: int = 0


@dataclass(frozen=True)
class Listing:
    """List the files of a data set, in two splits.

    Attributes:
        name: name of the set.
        train: the training images.
        test: the test images.
        classes: names of the classes, by label.
        domains: names of the domains, by index.

    Raises:
        ValueError: a split has no images.
    """

    name: str
    train: list[Image]
    test: list[Image]
    classes: tuple[str, ...]
    domains: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for split, images in (("train", self.train), ("test", self.test)):
            if not images:
                raise ValueError(f"dataset {self.name!r}: the {split} split has no images: experiments/data.md shows which files go where")


def find_root(name: str, path: str, needs: Sequence[str], tops: Sequence[str] = ()) -> Path:
    """Find the folder of a data set: ``path`` or one of its folders ``tops``, which must hold all of ``needs``.

    If several of these folders hold all of ``needs``, the last one is returned. ``path`` counts as the first.

    Args:
        name: name of the set, for the message.
        path: the user's ``data-path``; ``data`` if empty.
        needs: files and folders of the set.
        tops: possible names of the folder that the set's archive contains.

    Raises:
        DataNotFound: no folder holds all of ``needs``. The message names the most complete folder and what it lacks.
    """
    base = Path(path or ROOT)
    roots = [base, *(base / top for top in tops)]
    missing = [[need for need in needs if not (root / need).exists()] for root in roots]
    best = min(range(len(roots)), key=lambda i: (len(missing[i]), -i))  # of folders that lack equally many: the last of tops
    if missing[best]:
        raise DataNotFound(f"dataset {name!r}: {roots[best]} lacks {', '.join(missing[best])} (experiments/data.md)")
    return roots[best]


def class_images(name: str, folder: Path, classes: Sequence[str], domain: int = 0) -> list[Image]:
    """List the files ``folder/CLASS/*``, class by class in the order of ``classes``. Other folders are skipped.

    Raises:
        DataNotFound: the folder of a class is missing or empty.
    """
    images = []
    for label, class_name in enumerate(classes):
        files = visible(folder / class_name) if (folder / class_name).is_dir() else []
        if not files:
            raise DataNotFound(f"dataset {name!r}: there are no images in {folder / class_name}: see experiments/data.md")
        images += [Image(file, label, domain) for file in files]
    return images


def listed_images(name: str, root: Path, listing: Path, classes: Sequence[str], domain: int = 0) -> list[Image]:
    """List the files that ``listing`` names, one "DOMAIN/CLASS/FILE number" per line.

    The number is not used, as some data sets count from 0 and others from 1. Lines of other classes are skipped.

    Raises:
        DataNotFound: a listed file is missing.
        ValueError: a line has another form.
    """
    labels = {class_name: label for label, class_name in enumerate(classes)}
    images = []
    for number, line in enumerate(lines_of(listing), start=1):
        parts = line.rsplit(maxsplit=1)
        relative = Path(parts[0])
        if len(parts) != 2 or not parts[1].isdigit() or len(relative.parts) < 2 or relative.is_absolute() or ".." in relative.parts:
            raise ValueError(f"{listing}, line {number}: expected 'DOMAIN/CLASS/FILE number', but got {line!r}")
        if relative.parent.name not in labels:
            continue
        if not (root / relative).is_file():
            raise DataNotFound(f"dataset {name!r}: {listing.name}, line {number} names {root / relative}, which is not there")
        images.append(Image(root / relative, labels[relative.parent.name], domain))
    return images


def lines_of(file: Path) -> list[str]:
    """Return the lines of a text file that are not empty.

    Raises:
        DataNotFound: there is no such file.
        ValueError: the file is not UTF-8 text.
    """
    if not file.is_file():
        raise DataNotFound(f"there is no file {str(file)!r}: experiments/data.md lists the files of each set")
    try:
        return [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: expected lines of text, but could not read it: {error}") from error


def split(images: Iterable[Image], seed: int = 0) -> tuple[list[Image], list[Image]]:
    """Split images at random into training and test images.

    In each class of each domain, ``TEST_SHARE`` of the images are test images. At least one image is a test image and
    at least one is a training image. If there is only one image, it is a training image. The same files give the same
    split on every machine and in every folder.

    Returns:
        The training images, and the test images.
    """
    groups: dict[tuple[int, int], list[Image]] = {}
    for image in images:
        groups.setdefault((image.domain, image.label), []).append(image)
    train: list[Image] = []
    test: list[Image] = []
    for (domain, label), group in sorted(groups.items()):
        rng = np.random.default_rng(np.random.SeedSequence([_STREAM, seed, domain, label]))
        tested = min(max(1, round(TEST_SHARE * len(group))), len(group) - 1)
        chosen = set(rng.permutation(len(group))[:tested].tolist())
        for i, image in enumerate(group):
            (test if i in chosen else train).append(image)
    return train, test


def read_listing(listing: Listing, image_size: int, how: Fit) -> Dataset:
    """Read the listed images in colour, (N, 3, S, S).

    Args:
        listing: the list.
        image_size: S, the pixels along each side.
        how: "crop" takes the largest centred square of each image, "stretch" distorts the whole image.

    Raises:
        ValueError: a file is not an image.
    """
    shape = (3, image_size, image_size)
    warn_if_large(listing.name, (len(listing.train) + len(listing.test)) * prod(shape), "a smaller image-size needs less")

    def read(image: Image) -> Tensor:
        picture = read_picture(image.file)
        return fit(picture, 3, image_size)[0] if how == "crop" else stretch(picture, image_size, image_size)

    splits = [read_all(images, shape, torch.uint8, read) for images in (listing.train, listing.test)]
    labels = [torch.tensor([image.label for image in images]) for images in (listing.train, listing.test)]
    domains = [torch.tensor([image.domain for image in images]) for images in (listing.train, listing.test)]
    return Dataset(
        listing.name,
        splits[0],
        labels[0],
        splits[1],
        labels[1],
        classes=len(listing.classes),
        domain_train=domains[0] if listing.domains else None,
        domain_test=domains[1] if listing.domains else None,
        domains=listing.domains,
    )


def warn_if_large(name: str, size: int, hint: str) -> None:
    """Warn that a data set will take ``size`` bytes of memory, if that is ``LARGE`` GiB or more. ``hint`` says how to use less."""
    if size / 2**30 >= LARGE:
        warnings.warn(
            f"dataset {name!r} is held in memory as a whole: expect {size / 2**30:.1f} GiB in every process that loads it; {hint}",
            LargeData,
            stacklevel=3,
        )


def read_all(items: Sequence[Item], shape: Sequence[int], dtype: torch.dtype, read: Callable[[Item], Tensor]) -> Tensor:
    """Read all items into one tensor, in as many threads as torch has.

    Args:
        items: the N items to read, such as files.
        shape: shape of the tensor of one item.
        dtype: dtype of the result.
        read: function that reads one item and returns a tensor of ``shape``.

    Returns:
        A tensor (N, *shape).
    """
    out = torch.empty((len(items), *shape), dtype=dtype)

    def fill(part: range) -> None:
        for i in part:
            out[i] = read(items[i])

    workers = max(1, min(torch.get_num_threads(), len(items)))
    cuts = [len(items) * i // workers for i in range(workers + 1)]
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(fill, (range(a, b) for a, b in zip(cuts, cuts[1:], strict=False))):
            pass
    return out


def stretch(picture: Picture, height: int, width: int) -> Tensor:
    """Resize a picture bilinearly with antialiasing, whatever its proportions.

    Returns:
        One image (3, height, width).
    """
    image = images_to_tensor(picture[None]).expand(-1, 3, -1, -1)
    if image.shape[2:] == (height, width):
        return image[0]
    resized = functional.interpolate(image.float(), size=(height, width), mode="bilinear", antialias=True)
    return resized.round_().clamp_(0, 255).to(torch.uint8)[0]
