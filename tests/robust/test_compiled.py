"""Machine code for the middle of columns: the bits of the same network run by NumPy, on every kind of rows, and only where it repays."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest

from fl_bn.robust import compiled, coordinate, median, trimmed_mean
from tests.robust.test_coordinate_kernels import columns, middle, rounding

pytest.importorskip("llvmlite")

COUNTS = [3, 4, 7, 16, 24, 25, 50, 100, 128]
DTYPES = ["float32", "float64"]


@pytest.fixture
def anew() -> Iterator[None]:
    """No code from before, none for later."""
    compiled.middle.cache_clear()
    yield
    compiled.middle.cache_clear()


def of_block(block: np.ndarray, trim: int) -> np.ndarray:
    made, out = compiled.middle(len(block), trim, block.dtype == np.float64), np.empty(block.shape[1], block.dtype)
    assert made is not None
    assert made.of_block(block, out)
    return out


def by_numpy(block: np.ndarray, trim: int, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The network, at any number of rows."""
    with monkeypatch.context() as patch:
        patch.setattr(coordinate, "NETWORK", len(block))
        return np.array(coordinate.trimmed_mean(block.copy(), trim))


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_its_bits_are_those_of_the_network_run_by_numpy(n: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (1, 3, 8, 150):
        x = columns(n, dtype, width)
        for trim in sorted({1, n // 5, (n - 1) // 2} - {0}):
            got = of_block(x, trim)
            np.testing.assert_array_equal(got, by_numpy(x, trim, monkeypatch))
            np.testing.assert_array_less(np.abs(got - middle(x, trim)), rounding(x, trim))
        np.testing.assert_array_equal(of_block(x, (n - 1) // 2), np.median(x, axis=0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_seen_wherever_it_is(dtype: str, bad: float) -> None:
    made, out = compiled.middle(7, 2, dtype == "float64"), np.empty(21, dtype)
    assert made is not None
    for row in range(7):
        for column in range(21):
            x = columns(7, dtype, 21)
            assert made.of_rows(list(x), out)
            x[row, column] = bad
            assert not made.of_rows(list(x), out)


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("why", ["no llvmlite", "too many rows"])
def test_without_it_numpy_does_the_same(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "WORTH", 1)
    n = 9
    if why == "no llvmlite":
        monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    else:
        n = compiled.MOST + 1
    assert compiled.middle(n, 2, False) is None
    x = columns(n, "float32")
    np.testing.assert_array_equal(median(x, 2).value, np.median(x, axis=0))
    np.testing.assert_array_equal(trimmed_mean(x, 2).value, coordinate.trimmed_mean(x.copy(), 2))
