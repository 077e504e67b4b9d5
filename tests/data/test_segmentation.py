"""Masks: what the record takes, and a made-up Cityscapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.data.cityscapes import load_cityscapes
from tests.data.inner import IGNORE, DataNotFound, Segmentation, to_input
from tests.listed import listed
from tests.refusals import naming


def masks(**changes: Any) -> Segmentation:
    """Three training and two test images of 4 x 6 pixels with five classes."""
    rng = torch.Generator().manual_seed(0)
    parts: dict[str, Any] = {"name": "made-up", "classes": 5}
    for split, n in (("train", 3), ("test", 2)):
        parts[f"x_{split}"] = torch.randint(0, 256, (n, 3, 4, 6), generator=rng, dtype=torch.uint8)
        parts[f"y_{split}"] = torch.randint(0, 5, (n, 4, 6), generator=rng)
    return Segmentation(**(parts | changes))


def test_images_may_be_wider_than_high() -> None:
    data = masks()
    assert (data.image_size, data.channels, data.classes) == (4, 3, 5)
    assert to_input(data.x_train).min() >= -1
    ignored = data.y_train.clone()
    ignored[0] = IGNORE
    assert (replace(data, y_train=ignored).y_train == IGNORE).any()


@listed(
    ("changes", "message"),
    [
        ({"x_train": torch.zeros(3, 3, 4, 6)}, "x_train"),
        ({"x_test": torch.zeros(0, 3, 4, 6, dtype=torch.uint8)}, "x_test"),
        ({"y_train": torch.zeros(3, dtype=torch.int64)}, "y_train"),
        ({"y_train": torch.zeros(3, 4, 6)}, "torch.float32"),
        ({"y_test": torch.full((2, 4, 6), 5)}, "y_test"),
        ({"y_test": torch.full((2, 4, 6), -1)}, "mask 0"),
        ({"domains": ("a",)}, "domain_train"),
        ({"x_test": torch.zeros(2, 3, 6, 4, dtype=torch.uint8), "y_test": torch.zeros(2, 6, 4, dtype=torch.int64)}, "x_train and x_test"),
    ],
)
def test_wrong_records(changes: dict[str, Any], message: str) -> None:
    with naming(message):
        masks(**changes)


def scene(root: Path, split: str, city: str, number: int, ids: np.ndarray[Any, Any], colour: int) -> None:
    name = f"{city}_{number:06}_000019"
    for kind, suffix in (("leftImg8bit", "leftImg8bit"), ("gtFine", "gtFine_labelIds")):
        folder = root / kind / split / city
        folder.mkdir(parents=True, exist_ok=True)
        image = np.full((*ids.shape, 3), colour, dtype=np.uint8) if kind == "leftImg8bit" else ids
        Image.fromarray(image).save(folder / f"{name}_{suffix}.png")


@pytest.fixture
def cityscapes(tmp_path: Path) -> Path:
    """Two cities to train on, one to validate on; 8 x 16 pixels, road at the left and sky at the right, a border of nothing."""
    ids = np.zeros((8, 16), dtype=np.uint8)
    ids[2:6, 2:8], ids[2:6, 8:14] = 7, 23
    scene(tmp_path, "train", "aachen", 0, ids, 10)
    scene(tmp_path, "train", "aachen", 1, ids, 20)
    scene(tmp_path, "train", "bochum", 0, ids, 30)
    scene(tmp_path, "val", "lindau", 0, np.full((8, 16), 33, dtype=np.uint8), 40)
    return tmp_path


def test_cityscapes(cityscapes: Path) -> None:
    data = load_cityscapes(str(cityscapes), 0)
    assert isinstance(data, Segmentation)
    assert (data.domains, data.classes, data.image_size) == (("aachen", "bochum", "lindau"), 19, 8)
    assert data.domain_train is not None
    assert data.domain_train.tolist() == [0, 0, 1]
    assert data.x_train[:, 0, 0, 0].tolist() == [10, 20, 30]
    expected = torch.full((8, 16), IGNORE)
    expected[2:6, 2:8], expected[2:6, 8:14] = 0, 10
    assert torch.equal(data.y_train[0], expected)
    assert data.y_test.unique().tolist() == [18]


def test_masks_are_resized_to_the_nearest_pixel(cityscapes: Path) -> None:
    data = load_cityscapes(str(cityscapes), 4)
    assert data.x_train.shape == (3, 3, 4, 8)
    assert set(data.y_train.unique().tolist()) == {0, 10, IGNORE}  # an average of road and sky would be another class
    larger = load_cityscapes(str(cityscapes), 16).y_train
    assert torch.equal(larger[:, ::2, ::2], load_cityscapes(str(cityscapes), 0).y_train)


def test_cityscapes_wrong_files(cityscapes: Path) -> None:
    with naming("leftImg", DataNotFound):
        load_cityscapes(str(cityscapes / "gtFine"), 0)
    mask = cityscapes / "gtFine" / "train" / "bochum" / "bochum_000000_000019_gtFine_labelIds.png"
    for image, word in ((Image.new("RGB", (16, 8)), "channel"), (Image.new("L", (16, 9)), "9 high and 16 wide")):
        image.save(mask)
        with naming(word):
            load_cityscapes(str(cityscapes), 0)
    mask.unlink()
    with naming("gtFine_trainvaltest.zip", DataNotFound):
        load_cityscapes(str(cityscapes), 0)
    for file in (cityscapes / "leftImg8bit" / "val" / "lindau").iterdir():
        file.unlink()
    scene(cityscapes, "train", "bochum", 0, np.zeros((8, 16), dtype=np.uint8), 30)
    with naming("_leftImg8bit.png", DataNotFound):
        load_cityscapes(str(cityscapes), 0)
