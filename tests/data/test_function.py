"""Data from one's own function: what it may return, and who is blamed for what it may not."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_bn.data.dataset import DataNotFound, load, to_input
from fl_bn.data.function import Measurements
from fl_bn.models import build

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
    out = build("mlp", classes=data.classes, channels=data.channels, image_size=data.image_size)(to_input(data.x_train))
    assert out.shape == (6, 3)


def test_floats_of_any_shape_and_tensors(own: Any) -> None:
    name = own(
        changed("x, a = (torch.rand(n, 2, 3, 7, 5, dtype=torch.bfloat16) for n in (6, 2))", "x, torch.from_numpy(y), a, b.astype('u1')")
    )
    data = load(name)
    assert (data.x_train.shape, data.x_train.dtype, data.y_test.dtype) == ((6, 2, 3, 7, 5), torch.float32, torch.int64)
    assert to_input(data.x_train, torch.float64).dtype == torch.float64


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
    with pytest.raises(ValueError, match=re.escape("floats are not resized, so image-size must be 0 or 1, their size, but is 7")):
        load(other, image_size=7)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def g(path): ...", "expected a function 'f' in own_data"),
        ("f = 3\ndef g(path): ...", "which has table, images, g"),
        ("def f(): ...", "must be callable as function(path)"),
        ("def f(path, other): ...", "missing a required argument: 'other'"),
        ("def f(path): raise KeyError('hospital')", "raised KeyError for path '': 'hospital'"),
        ("def f(path): return table()[:3]", "must return x_train, y_train, x_test, y_test, but returned tuple of 3"),
        ("def f(path): return None", "but returned NoneType"),
        (changed("x = x.tolist()"), "x_train must be a numpy array or a torch tensor, but is list"),
        (changed("x = x.astype(int)"), "x_train must be floats, or images of uint8 (0..255), but is int64"),
        (changed("y = y[:5]"), "y_train needs a label for each sample of x_train, but the shapes are (5,) and (6, 5)"),
        (changed("b = b[:, None]"), "must be of one kind, but got one label per sample, torch.int64 (N) and a set of labels"),
        (changed("y = y * 1.0"), "y_train and y_test must be of one kind, but got values"),
        (changed("y = y - 1"), "y_train must count classes from 0, but holds -1"),
        (changed("x[4, 2] = np.nan"), "x_train must be finite, as one NaN or infinity makes every weight NaN, but sample 4 is not"),
        (changed("a[1, 2] = 1e300"), "x_test must be finite, as one NaN or infinity makes every weight NaN, but sample 1 is not"),
        (changed("a = a[:, :3]"), "must have one shape (C, H, W), but got (5,) and (3,)"),
        (changed("a, b = a[:0], b[:0]"), "x_test must be float32 of shape (N, ...), with at least one sample"),
        (changed("x, a = x[:, 0], a[:, 0]"), "x_train must be float32 of shape (N, ...)"),
        (changed("a, b = images()[2:]"), "must be both floats or both uint8 images"),
        ("def f(path): return images((4, 3, 8, 8))", "with 1 or 3 channels C last, but is (4, 3, 8, 8)"),
        ("def f(path): return images((4, 8, 6, 3))", "must be at least one square image"),
        ("1 / 0", "importing own_data"),
        ("import no_such_package_at_all", "failed: ModuleNotFoundError: No module named 'no_such_package_at_all'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_the_functions_name(own: Any, source: str, message: str) -> None:
    name = own(source)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load(name)
    assert repr(name) in str(caught.value)


def test_names_and_missing_files(own: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'no_such_package.data:f': there is no module 'no_such_package'; install its package"):
        load("no_such_package.data:f")
    for name in (":f", "a-b:f", "a:", "a:b:c", "a:b.c"):
        with pytest.raises(ValueError, match=f"must be named as package.module:function, but got '{name}'"):
            load(name)
    missing = own("def f(path):\n    open(path)")
    with pytest.raises(DataNotFound, match=f"{missing}' found no file for path .*gone"):
        load(missing, str(tmp_path / "gone"))


def test_domains_of_samples_that_are_no_images_are_checked() -> None:
    x, y, given = torch.rand(4, 3), torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    assert Measurements("t", x, y, x, y, 1, given, given, ("a",)).domains == ("a",)
    with pytest.raises(ValueError, match=r"domain_test must lie in 0\.\.0, but spans 7\.\.7"):
        Measurements("t", x, y, x, y, 1, given, given + 7, ("a",))
    with pytest.raises(ValueError, match="domain_train is absent"):
        Measurements("t", x, y, x, y, 1, domains=("a",))
