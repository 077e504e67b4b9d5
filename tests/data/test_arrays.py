"""One's own arrays, in archives and from a function: what they become, and every wrong one by its name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.inner import DataNotFound, load, to_input
from tests.listed import listed
from tests.refusals import naming, wrong_data


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
    ("changes", "part"),
    [
        ({"y_test": None}, "y_test"),
        ({"x_train": np.linspace(0, 1, 768).reshape(4, 8, 8, 3)}, "x_train"),
        ({"x_test": np.zeros((2, 3, 8, 8), dtype=np.uint8)}, "x_test"),
        ({"x_test": np.zeros((2, 8, 6), dtype=np.uint8)}, "x_test"),
        ({"x_test": np.zeros((2, 9, 9, 3), dtype=np.uint8)}, "x_train and x_test"),
        ({"y_train": np.zeros(3, dtype=int)}, "y_train"),
        ({"y_train": np.full((4, 2), 2)}, "y_train and y_test"),
        ({"y_train": np.array([0, 1, -1, 0])}, "y_train"),
        ({"y_train": np.array([0, 1, 65_536, 0])}, "y_train"),
        ({"y_train": np.array([0, "a", None, 1], dtype=object)}, "y_train"),
    ],
)
def test_malformed_arrays_are_named(tmp_path: Path, changes: dict[str, Any], part: str) -> None:
    file = write(tmp_path / "bad.npz", **changes)
    with wrong_data(file, part):
        load("npz", str(file))


def test_targets_are_of_one_kind_and_finite(tmp_path: Path) -> None:
    with wrong_data(tmp_path / "a.npz", "y_train and y_test"):
        load("npz", str(write(tmp_path / "a.npz", y_train=np.zeros(4))))
    with wrong_data(tmp_path / "b.npz", "y_train") as caught:
        load("npz", str(write(tmp_path / "b.npz", y_train=np.array([0, 1, 2, np.nan]), y_test=np.zeros(2))))
    assert "sample 3" in caught.value.problem


class Touches:
    """A pickle that makes a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_no_code_is_run_from_an_archive(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    file = write(tmp_path / "bad.npz", y_train=np.array([Touches(ran)] * 4, dtype=object))
    with wrong_data(file, "y_train"):
        load("npz", str(file))
    assert not ran.exists()
    np.load(file, allow_pickle=True)["y_train"]
    assert ran.exists()  # control


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("not an archive")
    (tmp_path / "empty.npz").write_bytes(b"")
    np.save(tmp_path / "single.npy", np.zeros(3))
    (tmp_path / "sub").mkdir()
    for name in ("text.npz", "empty.npz", "single.npy"):
        with wrong_data(tmp_path / name):
            load("npz", str(tmp_path / name))
    with wrong_data("npz", "data-path"):
        load("npz", "")
    first, same = write(tmp_path / "a.npz"), write(tmp_path / "sub" / "a.npz")
    with wrong_data(first):
        load("npz", f"{first},{same}")
    with naming("gone.npz", DataNotFound):
        load("npz", str(tmp_path / "gone.npz"))


HEADER = """
import numpy as np, torch
def table(n=6, features=5, **kind):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, features)), np.arange(n) % 3, rng.normal(size=(2, features)), np.array([0, 1])
def images(shape=(4, 8, 8, 3)):
    x = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    return x, np.arange(len(x)), x[:2], np.array([1, 0])
"""


def changed(step: str, result: str = "x, y, a, b") -> str:
    """A function that returns a good table but for ``step``; ``result`` are its x and y, then those of the test split."""
    return f"def f(path):\n    x, y, a, b = table()\n    {step}\n    return {result}"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``own(source)`` is the name of the data function ``f`` in a fresh module of that source."""
    made: list[str] = []
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str, function: str = "f") -> str:
        made.append(f"own_data_{tmp_path.name}_{len(made)}".replace("-", "_"))
        (tmp_path / f"{made[-1]}.py").write_text(HEADER + source)
        return f"{made[-1]}:{function}"

    yield write
    for name in made:
        sys.modules.pop(name, None)


def test_a_table_is_used_as_it_is(own: Any) -> None:
    name = own("def f(path):\n    x, *rest = table()\n    return (x * float(path), *rest)")
    data = load(name, "2")
    expected = np.random.default_rng(0).normal(size=(6, 5)) * 2
    assert (data.name, data.classes, data.channels, data.image_size) == (name, 3, 5, 1)
    assert data.x_train.dtype == torch.float32
    np.testing.assert_array_equal(data.x_train.numpy(), expected.astype(np.float32))
    assert torch.equal(to_input(data.x_train), data.x_train)


@pytest.mark.parametrize(("shape", "expected"), [("(4, 8, 8, 3)", (4, 3, 8, 8)), ("(4, 8, 8)", (4, 1, 8, 8))])
def test_images_are_converted_as_those_of_npz(own: Any, shape: str, expected: tuple[int, ...]) -> None:
    name = own(f"def f(path):\n    return images({shape})")
    data = load(name)
    x = np.arange(np.prod(expected), dtype=np.uint8)
    x = x.reshape(4, 8, 8, expected[1]).transpose(0, 3, 1, 2)
    assert torch.equal(data.x_train, torch.from_numpy(x.copy()))
    assert data.x_train.dtype == torch.uint8
    assert to_input(data.x_train).min() == -1  # scaled, where floats are not
    assert load(name, image_size=12).x_test.shape == (2, expected[1], 12, 12)


def test_image_size_is_given_to_a_function_that_takes_it(own: Any) -> None:
    sized = changed("x, a = (torch.rand(n, 1, image_size or 6, image_size or 6) for n in (6, 2))")
    name = own(sized.replace("path", "path, image_size"))
    assert load(name).image_size == 6
    assert load(name, image_size=9).image_size == 9
    # An option of another name is left alone.
    other = own("def f(path, scale=1.0):\n    x, *rest = table()\n    return (x * scale, *rest)")
    assert load(other, image_size=1).x_train.abs().max() > 0
    with wrong_data(other):
        load(other, image_size=7)


@listed(
    ("source", "part"),
    [
        ("def g(path): ...", ""),
        ("f = 3\ndef g(path): ...", ""),
        ("def f(): ...", ""),
        ("def f(path, other): ...", ""),
        ("def f(path): raise KeyError('hospital')", ""),
        ("def f(path): return table()[:3]", ""),
        (changed("x = x.tolist()"), "x_train"),
        (changed("x = x.astype(int)"), "x_train"),
        (changed("y = y[:5]"), "y_train"),
        (changed("b = b[:, None]"), "y_train and y_test"),
        (changed("y = y - 1"), "y_train"),
        (changed("x[4, 2] = np.nan"), "x_train"),
        (changed("a = a[:, :3]"), "x_train and x_test"),
        (changed("a, b = a[:0], b[:0]"), "x_test"),
        (changed("a, b = images()[2:]"), "x_train and x_test"),
        ("def f(path): return images((4, 3, 8, 8))", "x_train"),
        ("def f(path): return images((4, 8, 6, 3))", "x_train"),
        ("1 / 0", ""),
        ("import no_such_package_at_all", ""),
    ],
)
def test_a_wrong_function_is_named(own: Any, source: str, part: str) -> None:
    name = own(source)
    with wrong_data(name, part):
        load(name)


def test_names_and_missing_files(own: Any, tmp_path: Path) -> None:
    for name in ("no_such_package.data:f", ":f", "a-b:f", "a:", "a:b:c", "a:b.c"):
        with wrong_data(name):
            load(name)
    missing = own("def f(path):\n    open(path)")
    with naming(missing, DataNotFound):
        load(missing, str(tmp_path / "gone"))
