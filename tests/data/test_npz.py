"""One's own archives: one file, several domains, and everything that can be wrong with them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.data.inner import DataNotFound, load
from tests.listed import listed
from tests.refusals import naming


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
        ({"y_test": None}, "'y_test'"),
        ({"x_train": np.zeros((4, 8, 8, 3))}, "x_train"),
        ({"x_train": np.linspace(0, 1, 768).reshape(4, 8, 8, 3)}, "'uint8'"),
        ({"x_train": np.linspace(-1, 1, 768).reshape(4, 8, 8, 3)}, "'uint8'"),
        ({"x_train": np.full((4, 8, 8, 3), np.nan)}, "0..255"),
        ({"x_test": np.zeros((2, 3, 8, 8), dtype=np.uint8)}, "x_test"),
        ({"x_test": np.zeros((2, 8, 6), dtype=np.uint8)}, "x_test"),
        ({"y_train": np.zeros(3, dtype=int)}, "y_train"),
        ({"y_train": np.zeros(4)}, "y_train"),
        ({"y_train": np.full((4, 2), 2)}, "y_train"),
        ({"y_train": np.array([0, 1, -1, 0])}, "y_train"),
        ({"y_train": np.array([0, "a", None, 1], dtype=object)}, "y_train"),
    ],
)
def test_malformed_arrays_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = write(tmp_path / "bad.npz", **changes)
    with naming(message):
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
    with naming("y_train"):
        load("npz", str(file))
    assert not ran.exists()
    np.load(file, allow_pickle=True)["y_train"]
    assert ran.exists()  # control


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("not an archive")
    (tmp_path / "empty.npz").write_bytes(b"")
    np.save(tmp_path / "single.npy", np.zeros(3))
    (tmp_path / "sub").mkdir()
    same = f"{write(tmp_path / 'a.npz')},{write(tmp_path / 'sub' / 'a.npz')}"
    for path, word in (("", "path"), (same, "a, a"), *((str(tmp_path / name), "npz") for name in ("text.npz", "empty.npz", "single.npy"))):
        with naming(word):
            load("npz", path)
    with naming("gone.npz", DataNotFound):
        load("npz", str(tmp_path / "gone.npz"))


def test_the_advice_for_floats_keeps_the_picture(tmp_path: Path) -> None:
    """``.astype('uint8')``, as was advised, makes floats in 0..1 black."""
    x = np.linspace(0, 1, 256).reshape(1, 16, 16)
    with naming("0..1") as error:
        load("npz", str(write(tmp_path / "floats.npz", x_train=x, y_train=np.zeros(1, int), x_test=x, y_test=np.zeros(1, int))))
    saved = eval(re.search("save (np.*?'\\))", str(error.value))[1], {"np": np, "x": x})  # type: ignore[index]
    assert np.array_equal(saved.ravel(), np.arange(256))
