"""One's own archives: one file, several domains, and everything that can be wrong with them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_bn.data.dataset import DataNotFound, load
from tests.listed import listed

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def write(file: Path, size: int = 8, channels: int | None = 3, **changes: Any) -> Path:
    """An archive of 4 + 2 images; ``channels`` None leaves out the last axis. A change to None leaves out the array."""
    rng = np.random.default_rng(0)
    tail = () if channels is None else (channels,)
    arrays: dict[str, Any] = {
        "x_train": rng.integers(0, 256, (4, size, size, *tail), dtype=np.uint8),
        "y_train": np.array([0, 1, 2, 1], dtype=np.uint8),
        "x_test": rng.integers(0, 256, (2, size, size, *tail), dtype=np.uint8),
        "y_test": np.array([2, 0], dtype=np.int32),
    }
    np.savez(file, **{key: value for key, value in (arrays | changes).items() if value is not None})
    return file


def test_one_file(tmp_path: Path) -> None:
    file = write(tmp_path / "a.npz")
    data = load("npz", str(file))
    with np.load(file) as archive:
        assert torch.equal(data.x_train, torch.from_numpy(archive["x_train"]).permute(0, 3, 1, 2))
    assert data.y_train.tolist() == [0, 1, 2, 1]
    assert (data.classes, data.domains, data.domain_train) == (3, (), None)


def test_grey_images_need_no_channel_axis(tmp_path: Path) -> None:
    data = load("npz", str(write(tmp_path / "grey.npz", channels=None)))
    assert data.x_train.shape == (4, 1, 8, 8)


def test_several_files_are_domains_of_one_shape(tmp_path: Path) -> None:
    grey, colour = write(tmp_path / "grey.npz", size=8, channels=1), write(tmp_path / "colour.npz", size=12)
    data = load("npz", f"{grey}, {colour}")
    assert data.domains == ("grey", "colour")
    assert data.x_train.shape == (8, 3, 12, 12)
    assert data.domain_train is not None
    assert data.domain_train.tolist() == [0] * 4 + [1] * 4
    assert data.domain_test is not None
    assert data.domain_test.tolist() == [0, 0, 1, 1]
    with np.load(colour) as archive:
        assert torch.equal(data.x_train[4:], torch.from_numpy(archive["x_train"]).permute(0, 3, 1, 2))
        assert torch.equal(data.x_test[2:], torch.from_numpy(archive["x_test"]).permute(0, 3, 1, 2))
    assert torch.equal(data.x_train[:4, 0], data.x_train[:4, 2])
    assert not torch.equal(data.x_train[4:, 0], data.x_train[4:, 2])  # control: real colour is no repeated grey
    assert load("npz", f"{grey},{colour}", image_size=10).x_test.shape == (4, 3, 10, 10)


@listed(
    ("changes", "message"),
    [
        ({"y_test": None}, "expected an array 'y_test', but the file holds x_train, y_train, x_test"),
        ({"x_train": np.zeros((4, 8, 8, 3))}, "x_train must be uint8 (0..255), but is float64"),
        ({"x_train": np.linspace(0, 1, 768).reshape(4, 8, 8, 3)}, "lie in 0..1: save np.rint(x * 255).astype('uint8') (astype alone would"),
        ({"x_train": np.linspace(-1, 1, 768).reshape(4, 8, 8, 3)}, "lie in -1..1: save np.rint((x + 1) * 127.5).astype('uint8')"),
        ({"x_train": np.linspace(0, 255, 768).reshape(4, 8, 8, 3)}, "lie in 0..255: save np.rint(x).astype('uint8')"),
        ({"x_train": np.ones((4, 8, 8, 3), dtype=np.int64)}, "lie in 0..255: save np.rint(x).astype('uint8')"),
        ({"x_train": np.full((4, 8, 8, 3), -7.0)}, "scale its values to 0..255, round them"),
        ({"x_train": np.full((4, 8, 8, 3), np.nan)}, "scale its values to 0..255, round them"),
        ({"x_test": np.zeros((2, 3, 8, 8), dtype=np.uint8)}, "x_test must be (N, H, W) or (N, H, W, C)"),
        ({"x_test": np.zeros((0, 8, 8, 3), dtype=np.uint8)}, "at least one image, but is (0, 8, 8, 3)"),
        ({"x_test": np.zeros((2, 8, 6), dtype=np.uint8)}, "x_test must hold square images, but is (2, 8, 6)"),
        ({"y_train": np.zeros(3, dtype=int)}, "y_train is int64 (3,), but 4 samples need labels: integers of shape (4,)"),
        ({"y_train": np.zeros(3)}, "y_train is float64 (3,), but 4 samples need labels"),
        ({"y_train": np.zeros(4)}, "y_train and y_test must be of one kind, but got values, torch.float32 (N) and one label per sample"),
        ({"y_train": np.zeros((4, 2, 2), dtype=int)}, "y_train is int64 (4, 2, 2), but 4 samples need labels: integers of shape (4,)"),
        ({"y_train": np.zeros(4, dtype=bool)}, "y_train is bool (4,), but 4 samples need labels: integers of shape (4,)"),
        ({"y_train": np.full((4, 2), 2)}, "y_train of shape (4, 2) must be 0 or 1 (1: the sample has the label), but spans 2..2"),
        ({"y_train": np.array([0, 1, -1, 0])}, "y_train must count classes from 0, but holds -1"),
        ({"y_train": np.array([0, "a", None, 1], dtype=object)}, "expected y_train as an array of numbers, but could not read it"),
    ],
)
def test_malformed_arrays_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = write(tmp_path / "bad.npz", **changes)
    with pytest.raises(ValueError, match=re.escape(str(file)) + ".*" + re.escape(message)):
        load("npz", str(file))


class Touches:
    """A pickle that makes a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_no_code_is_run_from_an_archive(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    file = write(tmp_path / "bad.npz", y_train=np.array([Touches(ran)] * 4, dtype=object))
    with pytest.raises(ValueError, match="expected y_train as an array of numbers, but could not read it"):
        load("npz", str(file))
    assert not ran.exists()
    np.load(file, allow_pickle=True)["y_train"]
    assert ran.exists()  # control


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(DataNotFound, match=r"no file .*gone\.npz"):
        load("npz", str(tmp_path / "gone.npz"))
    with pytest.raises(ValueError, match="needs a path"):
        load("npz")
    (tmp_path / "text.npz").write_text("not an archive")
    (tmp_path / "empty.npz").write_bytes(b"")
    for name in ("text.npz", "empty.npz"):
        with pytest.raises(ValueError, match=r"expected a \.npz archive"):
            load("npz", str(tmp_path / name))
    np.save(tmp_path / "single.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"single array; use np\.savez"):
        load("npz", str(tmp_path / "single.npy"))
    (tmp_path / "sub").mkdir()
    with pytest.raises(ValueError, match="names must differ, but got a, a"):
        load("npz", f"{write(tmp_path / 'a.npz')},{write(tmp_path / 'sub' / 'a.npz')}")


def test_real_domains() -> None:
    files = [SHARED / f"digits_{name}.npz" for name in ("usps", "svhn_mini")]
    if not all(file.is_file() for file in files):
        pytest.skip("the shared image data (../shared/data) are not on this machine")
    data = load("npz", ",".join(map(str, files)))
    assert data.domains == ("digits_usps", "digits_svhn_mini")
    assert (len(data.x_train), len(data.x_test)) == (7291 + 554, 2007 + 486)
    assert (data.channels, data.image_size, data.classes) == (3, 32, 10)


def test_the_advice_for_floats_keeps_the_picture(tmp_path: Path) -> None:
    """``.astype('uint8')``, as was advised, makes floats in 0..1 black."""
    x = np.linspace(0, 1, 256).reshape(1, 16, 16)
    with pytest.raises(ValueError, match="0..1: save (.*?) ") as error:
        load("npz", str(write(tmp_path / "floats.npz", x_train=x, y_train=np.zeros(1, int), x_test=x, y_test=np.zeros(1, int))))
    saved = eval(re.search("save (np.*?'\\))", str(error.value))[1], {"np": np, "x": x})  # type: ignore[index]
    assert np.array_equal(saved.ravel(), np.arange(256))
