"""Folders of images: labels, sizes, colours, and every wrong file by its name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.inner import load
from tests.refusals import naming


def draw(file: Path, colour: int | tuple[int, ...] = (10, 20, 30), size: tuple[int, int] = (8, 8), mode: str = "RGB") -> Path:
    """An image of one colour; ``size`` is (width, height)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(file)
    return file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three training images of cat and dog, one test image of dog."""
    draw(tmp_path / "train" / "dog" / "a.png", (1, 0, 0))
    draw(tmp_path / "train" / "cat" / "b.png", (2, 0, 0))
    draw(tmp_path / "train" / "cat" / "a.PNG", (3, 0, 0))
    draw(tmp_path / "test" / "dog" / "a.bmp", (4, 5, 6))
    return tmp_path


def test_labels_are_places_among_the_sorted_names(root: Path) -> None:
    data = load("folder", str(root))
    assert (data.name, data.classes, data.channels, data.image_size) == ("folder", 2, 3, 8)
    assert data.x_train[:, 0, 0, 0].tolist() == [3, 2, 1]  # cat/a, cat/b, dog/a
    assert data.y_train.tolist() == [0, 0, 1]
    assert data.x_test[0, :, 7, 7].tolist() == [4, 5, 6]
    assert data.y_test.tolist() == [1]


def test_sites_agree_on_labels_only_by_a_shared_classes_txt(tmp_path: Path) -> None:
    """The trap of the docstring: dog is 1 here and 0 there, unless both read one list."""
    here, there = tmp_path / "here", tmp_path / "there"
    for site, names in ((here, ("cat", "dog")), (there, ("dog", "fox"))):
        for name in names:
            draw(site / "train" / name / "a.png")
        draw(site / "test" / "dog" / "a.png")
    assert [load("folder", str(site)).y_test.tolist() for site in (here, there)] == [[1], [0]]
    both = load("folder", f"{here}, {there}")  # read together, they are numbered together: cat, dog, fox
    assert (both.domains, both.y_train.tolist(), both.y_test.tolist()) == (("here", "there"), [0, 1, 1, 2], [1, 1])
    (here / "classes.txt").write_text("cat\ndog\n")
    with naming("classes.txt"):
        load("folder", f"{here},{there}")
    for site in (here, there):
        (site / "classes.txt").write_text("dog\n\ncat \nfox\n")
    found = [load("folder", f"{site}/") for site in (here, there)]  # another spelling, not the cached answer
    assert [(data.y_test.tolist(), data.classes) for data in found] == [([0], 3), ([0], 3)]
    assert [data.y_train.tolist() for data in found] == [[1, 0], [0, 2]]


def test_grey_stays_grey_only_if_all_is(tmp_path: Path) -> None:
    for split in ("train", "test"):
        draw(tmp_path / split / "one" / "a.png", 77, mode="L")
    data = load("folder", str(tmp_path))
    assert data.x_train.shape == (1, 1, 8, 8)
    assert data.x_train.unique().tolist() == [77]
    draw(tmp_path / "train" / "one" / "b.png", (1, 2, 3))
    mixed = load("folder", f"{tmp_path}/")
    assert mixed.x_test[0, :, 0, 0].tolist() == [77, 77, 77]
    assert mixed.x_train[1, :, 0, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(("mode", "colour"), [("RGBA", (9, 8, 7, 0)), ("P", 5), ("1", 1), ("LA", (9, 255))])
def test_other_modes_become_colour(root: Path, mode: str, colour: int | tuple[int, ...]) -> None:
    draw(root / "test" / "dog" / "b.png", colour, mode=mode)
    expected = list({"RGBA": (9, 8, 7), "1": (255, 255, 255), "LA": (9, 9, 9)}.get(mode, ()))
    found = load("folder", str(root)).x_test[1, :, 0, 0].tolist()
    assert found == expected or mode == "P"
    assert len(found) == 3


def test_deep_pixels_are_refused_as_they_would_saturate(root: Path) -> None:
    file = root / "train" / "cat" / "scan.png"
    Image.fromarray(np.full((8, 8), 3000, dtype=np.uint16)).save(file)
    with naming(str(file)):
        load("folder", str(root))


def test_odd_sizes_are_named_or_resized(root: Path) -> None:
    odd = draw(root / "train" / "ape" / "odd.png", size=(12, 12))  # the first file: the others outvote it
    with naming(str(odd)):
        load("folder", str(root))
    data = load("folder", str(root), 16)
    assert data.x_train.shape == (4, 3, 16, 16)
    odd.unlink()
    wide = draw(root / "train" / "ape" / "wide.png", size=(12, 6))
    with naming(str(wide)):
        load("folder", f"{root}/")


def test_resizing_crops_to_the_centre_and_does_not_distort(root: Path) -> None:
    wide = np.zeros((6, 14, 3), dtype=np.uint8)
    wide[:, 4:10] = 200  # the centred square; black at both sides
    Image.fromarray(wide).save(root / "test" / "dog" / "b.png")
    data = load("folder", str(root), 12)
    assert torch.equal(data.x_test[1], torch.full((3, 12, 12), 200, dtype=torch.uint8))
    assert data.x_train[:, 0, 5, 5].tolist() == [3, 2, 1]


def test_hidden_files_are_passed_over_and_others_named(root: Path) -> None:
    (root / "train" / "cat" / ".DS_Store").write_bytes(b"\0")
    draw(root / "train" / ".thumbnails" / "a.png")
    (root / "train" / "notes.txt").write_text("beside the class folders")
    assert load("folder", str(root)).y_train.tolist() == [0, 0, 1]
    for name, content in (("notes.txt", b"hello"), ("cut.png", (root / "train" / "dog" / "a.png").read_bytes()[:40]), ("empty.jpg", b"")):
        file = root / "train" / "cat" / name
        file.write_bytes(content)
        with naming(str(file)):
            load("folder", str(root), 8)
        file.unlink()
    (root / "train" / "cat" / "deeper").mkdir()
    with naming("expected"):
        load("folder", str(root), 8)
