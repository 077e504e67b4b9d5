"""Data from one's own function: what it may return, and who is blamed for what it may not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.inner import DataNotFound, load, to_input
from tests.refusals import naming

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
    with naming("image-size"):
        load(other, image_size=7)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def g(path): ...", "'f'"),
        ("f = 3\ndef g(path): ...", "images"),
        ("def f(): ...", "callable"),
        ("def f(path, other): ...", "'other'"),
        ("def f(path): raise KeyError('hospital')", "KeyError"),
        ("def f(path): return table()[:3]", "x_train"),
        (changed("x = x.tolist()"), "x_train"),
        (changed("x = x.astype(int)"), "x_train"),
        (changed("y = y[:5]"), "y_train"),
        (changed("b = b[:, None]"), "sample"),
        (changed("y = y - 1"), "y_train"),
        (changed("x[4, 2] = np.nan"), "x_train"),
        (changed("a = a[:, :3]"), "(5,)"),
        (changed("a, b = a[:0], b[:0]"), "x_test"),
        (changed("a, b = images()[2:]"), "floats"),
        ("def f(path): return images((4, 3, 8, 8))", "(4, 3, 8, 8)"),
        ("def f(path): return images((4, 8, 6, 3))", "square"),
        ("1 / 0", "own_data"),
        ("import no_such_package_at_all", "'no_such_package_at_all'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_the_functions_name(own: Any, source: str, message: str) -> None:
    name = own(source)
    with naming(message) as caught:
        load(name)
    assert repr(name) in str(caught.value)


def test_names_and_missing_files(own: Any, tmp_path: Path) -> None:
    with naming("'no_such_package.data:f'"):
        load("no_such_package.data:f")
    for name in (":f", "a-b:f", "a:", "a:b:c", "a:b.c"):
        with naming(repr(name)):
            load(name)
    missing = own("def f(path):\n    open(path)")
    with naming(missing, DataNotFound):
        load(missing, str(tmp_path / "gone"))
