"""Data of one's own: archives, functions and folders of images are read as they were written, and every wrong one is named."""

from __future__ import annotations

import sys
from base64 import b85decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fl_bn.data.dataset import DataNotFound, load, to_input
from tests.refusals import naming, wrong_data

Arrays = dict[str, Any]


def made(channels: int = 3, size: int = 8) -> Arrays:
    """Return four training and two test images of three classes; grey ones without an axis of channels."""
    rng, shape = np.random.default_rng(0), (size, size) if channels == 1 else (size, size, channels)
    x_train, x_test = (rng.integers(0, 256, (n, *shape), dtype=np.uint8) for n in (4, 2))
    return {"x_train": x_train, "y_train": np.array([0, 1, 1, 2], dtype=np.uint8), "x_test": x_test, "y_test": np.array([0, 2])}


def npz(folder: Path, arrays: Arrays) -> str:
    """Write an archive beside ``folder``."""
    np.savez(file := folder.with_suffix(".npz"), **arrays)
    return str(file)


def images(folder: Path, arrays: Arrays) -> str:
    for split in ("train", "test"):
        for number, (x, y) in enumerate(zip(arrays[f"x_{split}"], arrays[f"y_{split}"], strict=True)):
            file = folder / split / "abc"[y] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(x).save(file)
    return str(folder)


def draw(file: Path, colour: int | tuple[int, ...] = (10, 20, 30), size: tuple[int, int] = (8, 8), mode: str = "RGB") -> Path:
    """Write an image of one colour; ``size`` is (width, height)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(file)
    return file


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``own(source)`` is the name of the data function ``f`` in a fresh module of that source."""
    names: list[str] = []
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> str:
        names.append(f"own_data_{tmp_path.name}_{len(names)}".replace("-", "_"))
        (tmp_path / f"{names[-1]}.py").write_text(HEADER + source)
        return f"{names[-1]}:f"

    yield write
    for name in names:
        sys.modules.pop(name, None)


HEADER = """
import numpy as np, torch
def table(n=6, features=5):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, features)), np.arange(n) % 3, rng.normal(size=(2, features)), np.array([0, 1])
"""
ARCHIVED = (
    "def f(path):\n    archive = np.load(path)\n    return [archive[f'{what}_{split}'] for split in ('train', 'test') for what in 'xy']"
)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["npz", "folder", "function"])
def test_images_are_read_as_they_were_written(kind: str, channels: int, tmp_path: Path, own: Any) -> None:
    arrays = made(channels)
    path = (images if kind == "folder" else npz)(tmp_path / "site", arrays)
    name = own(ARCHIVED) if kind == "function" else kind
    data = load(name, path)
    for split in ("train", "test"):
        x = torch.from_numpy(arrays[f"x_{split}"]).view(-1, 8, 8, channels).permute(0, 3, 1, 2)
        assert torch.equal(getattr(data, f"x_{split}"), x)
        assert getattr(data, f"y_{split}").tolist() == arrays[f"y_{split}"].tolist()
    assert (data.name, data.classes, data.channels, data.image_size, data.domains, data.domain_train) == (name, 3, channels, 8, (), None)
    assert load(name, path, image_size=12).x_test.shape == (2, channels, 12, 12)


@pytest.mark.parametrize(("kind", "write"), [("npz", npz), ("folder", images)])
def test_several_are_domains_of_one_form(kind: str, write: Any, tmp_path: Path) -> None:
    grey, colour = write(tmp_path / "grey", made(1)), write(tmp_path / "colour", made(3))
    data = load(kind, f"{grey}, {colour}")
    assert data.domains == ("grey", "colour")
    assert (data.domain_train.tolist(), data.domain_test.tolist()) == ([0] * 4 + [1] * 4, [0, 0, 1, 1])
    assert torch.equal(data.x_train[4:], torch.from_numpy(made(3)["x_train"]).permute(0, 3, 1, 2))
    assert torch.equal(data.x_test[:2], torch.from_numpy(made(1)["x_test"])[:, None].expand(-1, 3, -1, -1))
    larger = write(tmp_path / "larger", made(3, size=10))
    assert load(kind, f"{grey},{larger}", 0 if kind == "npz" else 10).x_train.shape == (8, 3, 10, 10)  # the largest, or as asked
    with naming("gone", DataNotFound):
        load(kind, str(tmp_path / "gone"))


def test_malformed_arrays_are_named(tmp_path: Path) -> None:
    for part, array in (("x_train", np.linspace(0, 1, 768).reshape(4, 8, 8, 3)), ("y_train", np.array(["0", "1", "2", "1"]))):
        path = npz(tmp_path / part, made() | {part: array})
        with wrong_data(path, part):
            load("npz", path)
    masks = np.tile([[0, 4], [255, -100]], (4, 4, 4))  # 255 and labels below 0 do not count
    assert load("npz", npz(tmp_path / "masks", made() | {"y_train": masks, "y_test": masks[:2]})).classes == 5  # control


class Harmful:
    """Prints when a pickle of it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this must not run",)


def test_no_code_is_run_from_an_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = npz(tmp_path / "bad", made() | {"y_train": np.array([Harmful()] * 4, dtype=object)})
    with wrong_data(path, "y_train"):
        load("npz", path)
    assert capsys.readouterr().out == ""
    np.load(path, allow_pickle=True)["y_train"]
    assert "this must not run" in capsys.readouterr().out  # control


# A function


def test_floats_are_used_as_they_are(own: Any) -> None:
    data = load(own("def f(path):\n    x, *rest = table()\n    return (torch.from_numpy(x) * float(path), *rest)"), "2")
    assert (data.classes, data.channels, data.image_size) == (3, 5, 1)
    expected = np.random.default_rng(0).normal(size=(6, 5)) * 2
    np.testing.assert_array_equal(data.x_train.numpy(), expected.astype(np.float32))
    assert to_input(data.x_train) is data.x_train


def test_a_wrong_function_is_named(own: Any) -> None:
    for source in ("def f(): ...", "def f(path): raise KeyError('hospital')", "def f(path): return table()[:3]"):
        name = own(source)
        with wrong_data(name):
            load(name)


# A folder of images


def test_sites_agree_on_labels_only_by_a_shared_classes_txt(tmp_path: Path) -> None:
    """The trap of the docstring: dog is 1 here and 0 there, unless both read one list."""
    here, there = tmp_path / "here", tmp_path / "there"
    for site, names in ((here, ("cat", "dog")), (there, ("dog", "fox"))):
        for name in names:
            draw(site / "train" / name / "a.png")
        draw(site / "test" / "dog" / "a.png")
    assert [load("folder", str(site)).y_test.tolist() for site in (here, there)] == [[1], [0]]
    both = load("folder", f"{here}, {there}")  # read together, they are numbered together: cat, dog, fox
    assert (both.y_train.tolist(), both.y_test.tolist()) == ([0, 1, 1, 2], [1, 1])
    (here / "classes.txt").write_text("cat\ndog\n")
    with naming("classes.txt"):
        load("folder", f"{here},{there}")
    for site in (here, there):
        (site / "classes.txt").write_text("dog\n\ncat \nfox\n")
    found = [load("folder", f"{site}/") for site in (here, there)]  # another spelling, not the cached answer
    assert [(data.y_train.tolist(), data.y_test.tolist(), data.classes) for data in found] == [([1, 0], [0], 3), ([0, 2], [0], 3)]


SIXTEEN_BITS = "iBL{Q4GJ0x0000DNk~Le00008000085CQ-I02}@Fp8x;=5=lfsRCwBBVALTEGK^}Vg$4l0-yy-kC#%H(0000<MNUMnLSTX"


def test_a_wrong_image_is_named_and_a_hidden_file_is_passed_over(tmp_path: Path) -> None:
    images(tmp_path, made())
    (tmp_path / "train" / "a" / ".DS_Store").write_bytes(b"\0")
    draw(tmp_path / "train" / ".thumbnails" / "a.png")
    assert load("folder", str(tmp_path)).y_train.tolist() == [0, 1, 1, 2]
    file = tmp_path / "train" / "a" / "0.png"
    (tmp_path / "cut").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    Image.fromarray(np.full((8, 8), 3000, dtype=np.uint16)).save(tmp_path / "deep.png")  # converted, its pixels would saturate
    (tmp_path / "deep colours.png").write_bytes(b85decode(SIXTEEN_BITS))
    Image.new("RGB", (12, 12)).save(tmp_path / "large.png")  # the others outvote it
    for wrong in ("cut", "deep.png", "deep colours.png", "large.png"):
        file.write_bytes((tmp_path / wrong).read_bytes())
        with wrong_data(file):
            load("folder", f"{tmp_path}/")
