"""Load Cityscapes: street scenes whose labels are masks (one class per pixel). Its cities are its domains."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.data.listing import find_root, read_all, stretch, warn_if_large
from fl_bn.data.folder import read_picture, visible
from fl_bn.data.record import DataNotFound, Dataset, expect
from fl_bn.task import IGNORE

SPLITS = ("train", "val")  # the labels of Cityscapes' test split are not published

# labelIds of Cityscapes and their train ids, in the order of the benchmark's 19 classes; all others are ignored.
TRAIN_IDS = {
    7: "road",
    8: "sidewalk",
    11: "building",
    12: "wall",
    13: "fence",
    17: "pole",
    19: "traffic light",
    20: "traffic sign",
    21: "vegetation",
    22: "terrain",
    23: "sky",
    24: "person",
    25: "rider",
    26: "car",
    27: "truck",
    28: "bus",
    31: "train",
    32: "motorcycle",
    33: "bicycle",
}
CITYSCAPES_CLASSES = tuple(TRAIN_IDS.values())


@dataclass(frozen=True, eq=False)
class Segmentation(Dataset):
    """Hold images with a class for each pixel.

    ``x_train`` and ``x_test`` are uint8 (N, C, H, W), square or not. ``y_train`` and ``y_test`` are masks,
    int64 (N, H, W) in ``[0, classes)`` or ``IGNORE``. A loss leaves out pixels of ``IGNORE``:
    ``cross_entropy(out, y, ignore_index=IGNORE)``.
    """

    def _check_samples(self, part: str, x: Tensor) -> None:
        expect(x.dtype == torch.uint8 and x.ndim == 4, self.name, part, "uint8 (N, C, H, W)", f"{x.dtype} {tuple(x.shape)}")

    def _check_targets(self, part: str, y: Tensor, x: Tensor) -> None:
        masks = (len(x), *x.shape[2:])
        expect(y.dtype == torch.int64 and y.shape == masks, self.name, part, f"int64 {masks}", f"{y.dtype} {tuple(y.shape)}")
        for i, mask in enumerate(y):  # one by one: a comparison of all takes as much memory again
            strange = ((mask < 0) | (mask >= self.classes)).logical_and_(mask != IGNORE).any()
            expect(not bool(strange), self.name, part, f"0..{self.classes - 1}, or {IGNORE} (ignored)", f"another label in mask {i}")


class Pair(NamedTuple):
    """Hold the paths of an image and of its mask.

    Attributes:
        image: path of the image.
        mask: path of the mask.
        domain: index of the city.
    """

    image: Path
    mask: Path
    domain: int


def cityscapes_files(path: str) -> tuple[list[Pair], list[Pair], tuple[str, ...]]:
    """Return the training pairs, the validation pairs, and the names of all cities.

    Raises:
        DataNotFound: a folder or the mask of an image is missing, or a split has no images.
    """
    root = find_root("cityscapes", path, [f"{top}/{split}" for top in ("leftImg8bit", "gtFine") for split in SPLITS], ("cityscapes",))
    places = {split: [city for city in visible(root / "leftImg8bit" / split) if city.is_dir()] for split in SPLITS}
    cities = tuple(dict.fromkeys(city.name for split in SPLITS for city in places[split]))
    pairs: dict[str, list[Pair]] = {split: [] for split in SPLITS}
    for split in SPLITS:
        for city in places[split]:
            for image in (file for file in visible(city) if file.name.endswith("_leftImg8bit.png")):
                mask = root / "gtFine" / split / city.name / image.name.replace("_leftImg8bit", "_gtFine_labelIds")
                if not mask.is_file():
                    raise DataNotFound(f"dataset 'cityscapes': {image} has no mask {mask}; unpack gtFine_trainvaltest.zip, too")
                pairs[split].append(Pair(image, mask, cities.index(city.name)))
        if not pairs[split]:
            raise DataNotFound(f"dataset 'cityscapes': no CITY/*_leftImg8bit.png in {root / 'leftImg8bit' / split}")
    return pairs["train"], pairs["val"], cities


def load_cityscapes(path: str, image_size: int) -> Segmentation:
    """Load ``cityscapes``: 2,975 training and 500 test street scenes (3, H, 2 H) of 19 classes, with a domain for each city.

    The test split is the published validation split. Its three cities differ from the 18 cities of the training
    split. A resized mask takes each label from the nearest pixel.

    Args:
        path: the folder of the files; ``data`` if empty.
        image_size: H. 0: the height of the first image, 1,024 in the published files.

    Raises:
        DataNotFound: files are missing; they are not downloaded.
        ValueError: a file is not an image, or an image is not twice as wide as high.
    """
    train, test, cities = cityscapes_files(path)
    height = image_size or read_picture(train[0].image).shape[0]
    shape = (height, 2 * height)
    # An int64 mask takes 8 bytes per pixel, an image 3.
    warn_if_large("cityscapes", (len(train) + len(test)) * prod(shape) * (3 + 8), "a smaller image-size (the height) needs less")
    x = [read_all(pairs, (3, *shape), torch.uint8, lambda pair: _scene(pair.image, height)) for pairs in (train, test)]
    y = [read_all(pairs, shape, torch.int64, lambda pair: read_mask(pair.mask, height)) for pairs in (train, test)]
    domains = [torch.tensor([pair.domain for pair in pairs]) for pairs in (train, test)]
    return Segmentation("cityscapes", x[0], y[0], x[1], y[1], len(CITYSCAPES_CLASSES), domains[0], domains[1], cities)


def _scene(file: Path, height: int) -> Tensor:
    picture = read_picture(file)
    _check_wide(file, *picture.shape[:2])
    return stretch(picture, height, 2 * height)


def _check_wide(file: Path, height: int, width: int) -> None:
    expect(width == 2 * height, file, "", "the published 2048 x 1024 pixels, no crops", f"{height} high and {width} wide")


def read_mask(file: Path, height: int) -> Tensor:
    """Read a mask, int64 (height, 2 height), from a labelIds file of Cityscapes.

    A label is the position of the pixel's id in ``TRAIN_IDS``, or ``IGNORE`` for other ids.

    Raises:
        ValueError: the file is not a mask, or the mask is not twice as wide as high.
    """
    ids = read_picture(file)
    expect(ids.ndim == 2, file, "", "a mask of one channel, *_gtFine_labelIds.png", "one in colour")
    _check_wide(file, *ids.shape)
    table = np.full(256, IGNORE, dtype=np.int64)
    table[list(TRAIN_IDS)] = np.arange(len(TRAIN_IDS))
    rows, columns = (((2 * np.arange(n) + 1) * m) // (2 * n) for n, m in ((height, ids.shape[0]), (2 * height, ids.shape[1])))
    return torch.from_numpy(table[ids[np.ix_(rows, columns)]])
