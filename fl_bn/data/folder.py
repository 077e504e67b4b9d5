"""Load your own images, in a folder per class below ``train`` and ``test``."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fl_bn.data.arrays import joined
from fl_bn.data.images import images_to_tensor, resize
from fl_bn.data.record import DataError, DataNotFound, Dataset, expect, paths

SPLITS = ("train", "test")
CLASSES = "classes.txt"
_DEEP = ("I", "F")  # Pillow's modes of more than 8 bits a channel begin so; converting them would saturate, not scale

Picture = NDArray[np.uint8]  # (H, W) grey or (H, W, 3)


def load_folder(path: str, image_size: int) -> Dataset:
    """Load ``folder``: the images ``path/train/CLASS/*`` and ``path/test/CLASS/*``.

    Several folders, separated by commas, are domains of these names.

    A class's label is the position of its name in ``path/classes.txt`` (one name
    per line), or else among the sorted names of class folders in all given folders.
    A class folder may be empty, or missing in a split. A classes.txt must list
    every class folder, and be the same everywhere.

    **Sites of one run must share one classes.txt.** Without it, a site of cat and
    dog and a site of dog and fox number their classes differently, and the model
    learns contradictory labels, unseen.

    With ``image_size`` 0 a folder's images must be squares of one size, and are
    resized to the largest folder's. Otherwise each image's largest centred square
    is resized to ``image_size``. Images have 1 channel if all are grey, else 3.
    Transparency is dropped, and pixels are used as stored. Hidden files and folders
    (``.name``) are skipped. All other files of a class folder must be images.

    Raises:
        DataNotFound: ``path``, ``train`` or ``test`` is not a folder.
        DataError: there is no path, two folders have one name, a split has no
            images, classes.txt is wrong, or a file is no image of 8 bits a channel.
            Or ``image_size`` is 0, and images differ.
    """
    roots = paths(path)
    expect(bool(roots), "folder", "data-path", "a folder that holds train/CLASS/* and test/CLASS/*, or several such folders", "none")
    for root in roots:
        for folder in (root, *(root / split for split in SPLITS)):
            if not folder.is_dir():
                raise DataNotFound(f"dataset 'folder': there is no {str(folder)!r} with train/CLASS/* and test/CLASS/* in {Path.cwd()}")
    classes = _classes(roots)
    return joined("folder", roots, [_site(root, classes, image_size) for root in roots], image_size)


def _site(root: Path, classes: dict[str, int], image_size: int) -> Dataset:
    """Load the images of one folder."""
    train, test = (_files(root / split, classes) for split in SPLITS)
    files = [file for file, _ in (*train, *test)]
    pictures = [read_picture(file) for file in files]
    if image_size == 0:
        _check_one_size(files, pictures)
    channels = 1 if all(picture.ndim == 2 for picture in pictures) else 3
    images = torch.cat([fit(picture, channels, image_size) for picture in pictures])
    labels = torch.tensor([label for _, label in (*train, *test)])
    cut = len(train)
    return Dataset("folder", images[:cut], labels[:cut], images[cut:], labels[cut:], classes=len(classes))


def visible(folder: Path) -> list[Path]:
    """List the entries of ``folder`` that are not hidden, by name."""
    return sorted((entry for entry in folder.iterdir() if not entry.name.startswith(".")), key=lambda entry: entry.name)


def _classes(roots: Sequence[Path]) -> dict[str, int]:
    """Return class -> label, from classes.txt or the class folders' names."""
    folders = [entry for root in roots for split in SPLITS for entry in visible(root / split) if entry.is_dir()]
    file, *others = (root / CLASSES for root in roots)
    names = _listed_in(file)
    for other in others:
        expect(_listed_in(other) == names, other, "", f"the same {CLASSES} in all folders, or in none", "others")
    for folder in folders:
        expect(not names or folder.name in names, folder, "", f"a class that {file} lists", folder.name)
    return {name: label for label, name in enumerate(names or sorted({folder.name for folder in folders}))}


def _listed_in(file: Path) -> list[str]:
    """Return the classes of a classes.txt; empty without one."""
    if not file.exists():
        return []
    try:
        names = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(file, f"expected one class name per line in UTF-8, but could not read it: {error}") from error
    expect(0 < len(names) == len(set(names)), file, "", "a class name per line, each once", ", ".join(names) or "none")
    return names


def _files(split: Path, classes: dict[str, int]) -> list[tuple[Path, int]]:
    """Return a split's image files with their labels."""
    files = [(file, classes[folder.name]) for folder in visible(split) if folder.is_dir() for file in visible(folder)]
    expect(bool(files), split, "", "images in a folder for each class, CLASS/*", "none")
    return files


def read_picture(file: Path) -> Picture:
    """Read an image's pixels, grey (H, W) or in colour (H, W, 3).

    Raises:
        DataError: Pillow cannot read the file, or it has several frames or more
            than 8 bits.
    """
    try:
        with Image.open(file) as image:
            deep = image.mode.startswith(_DEEP) or ";16" in str(image.tile)
            expect(not deep, file, "", "an image of 8 bits per pixel and channel", f"{image.tile} in Pillow's mode {image.mode}")
            frames = getattr(image, "n_frames", 1)
            expect(frames == 1, file, "", "one frame per file", f"{frames} frames")
            if "transparency" in image.info:
                return np.asarray(image.convert("RGBA").convert("RGB"))
            return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
    except DataError:
        raise
    # For damaged files, Pillow's decoders raise any of these.
    except (OSError, ValueError, TypeError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise DataError(file, f"expected an image that Pillow reads, but {error}: remove the file, or begin its name with a dot") from error


def _check_one_size(files: list[Path], pictures: list[Picture]) -> None:
    sizes = [picture.shape[:2] for picture in pictures]
    usual, _ = Counter(sizes).most_common(1)[0]
    for file, (height, width) in zip(files, sizes, strict=True):
        same = height == width and (height, width) == usual
        expect(same, file, "", "square images of one size, or image-size, to which they are resized", f"{height} x {width} pixels")


def fit(picture: Picture, channels: int, image_size: int) -> Tensor:
    """Cut the largest centred square out of a picture, and resize it to (1, channels, S, S)."""
    side = min(picture.shape[:2])
    top, left = (picture.shape[0] - side) // 2, (picture.shape[1] - side) // 2
    image = resize(images_to_tensor(picture[None, top : top + side, left : left + side]), image_size)
    return image.expand(-1, channels, -1, -1)
