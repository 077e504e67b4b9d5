"""Order statistics of columns against NumPy's for every number of rows, and the networks that sort them, by the 0-1 principle."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from fl_bn.robust import coordinate as kernels
from fl_bn.robust import median, trimmed_mean
from fl_bn.robust.coordinate import Keep, batcher, selection
from tests.listed import listed

COUNTS = [*range(1, 41), 100, 128, 129, 254, 255, 256, 257, 300]
DTYPES = ["float32", "float64"]
WIDTH = 150  # more than one strip
AWKWARD = [0.0, -0.0, 1.5, -1.5, 1.5000001, -3e30, 2e30]


def columns(n: int, dtype: str, width: int = WIDTH) -> np.ndarray:
    """Columns of all signs, one sign, few values, denormals."""
    rng, tiny = np.random.default_rng(n), np.finfo(dtype).smallest_subnormal
    x = rng.normal(size=(n, width)).astype(dtype)
    x[:, 1::6] = rng.choice(np.array(AWKWARD, dtype), x[:, 1::6].shape)
    x[:, 2::6] = rng.integers(-3, 4, x[:, 2::6].shape).astype(dtype) * tiny
    x[:, 3::6] = -np.abs(x[:, 3::6])
    x[:, 4::6] = np.abs(x[:, 4::6])
    x[:, 5::6] = np.float32(-2.5)
    return x


def middle(x: np.ndarray, trim: int) -> np.ndarray:
    kept: np.ndarray = np.sort(x.astype(np.float64), axis=0)[trim : len(x) - trim].mean(0)
    return kept


@listed("n", COUNTS)
def test_the_median_is_numpys(n: int) -> None:
    for dtype in DTYPES:
        x = columns(n, dtype)
        got = kernels.median(x.copy())
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, np.median(x, axis=0))


@listed("n", COUNTS)
def test_the_trimmed_mean_is_that_of_the_sorted(n: int) -> None:
    for dtype in DTYPES:
        x = columns(n, dtype)
        for trim in sorted({0, 1, n // 4, (n - 1) // 2} & set(range((n + 1) // 2))):
            np.testing.assert_array_less(np.abs(kernels.trimmed_mean(x.copy(), trim) - middle(x, trim)), rounding(x, trim))


def rounding(x: np.ndarray, trim: int) -> np.ndarray:
    """What a sum may lose, in whatever order."""
    info = np.finfo(x.dtype)
    lost: np.ndarray = len(x) * (
        info.eps * np.abs(np.sort(x.astype(np.float64), axis=0)[trim : len(x) - trim]).max(0) + info.smallest_subnormal
    )
    return lost


def test_denormals_and_huge_numbers_raise_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (6, 20):
            x = np.resize(np.array([3e38, -3e38, 1e-45, 0.0, 1.0], np.float32), (n, 7))
            median(x, n // 5 + 1)
            trimmed_mean(x, n // 5 + 1)


WIRES = range(1, 25)
MANY = [25, 33, 50, 64, 100, 128]


def zeros_and_ones(n: int) -> np.ndarray:
    """(n, cases): every one up to 12 wires, above 4096 at random with any number of ones."""
    if n <= 12:
        return (np.arange(2**n)[None] >> np.arange(n)[:, None] & 1).astype(np.int8)
    rng = np.random.default_rng(n)
    return (rng.random((n, 4096)) < rng.random(4096)).astype(np.int8)


def run(wires: np.ndarray, n: int, trim: int) -> np.ndarray:
    wires = wires.copy()
    for low, high, keep in selection(n, trim):
        a, b = wires[low].copy(), wires[high].copy()
        wires[low] = np.minimum(a, b) if keep & Keep.LOW else -99  # nobody may read it
        wires[high] = np.maximum(a, b) if keep & Keep.HIGH else 99
    return wires


@listed("n", [*WIRES, *MANY])
def test_batchers_network_sorts(n: int) -> None:
    wires = zeros_and_ones(n)
    want = np.sort(wires, axis=0)
    for i, j in batcher(n):
        assert 0 <= i < j < n
        wires[[i, j]] = np.minimum(wires[i], wires[j]), np.maximum(wires[i], wires[j])
    np.testing.assert_array_equal(wires, want)


@pytest.mark.parametrize("n", [2, 5, 8, 13, 16])
def test_no_exchange_of_it_can_be_left_out(n: int) -> None:
    """Negative control of the 0-1 test."""
    pairs = batcher(n)
    for left_out in range(len(pairs)):
        wires = zeros_and_ones(n)
        for i, j in pairs[:left_out] + pairs[left_out + 1 :]:
            wires[[i, j]] = np.minimum(wires[i], wires[j]), np.maximum(wires[i], wires[j])
        assert (np.diff(wires, axis=0) < 0).any()


@listed("n", [*WIRES, *MANY])
def test_the_middle_wires_hold_the_middle_order_statistics(n: int) -> None:
    numbers = np.random.default_rng(n).permuted(np.tile(np.arange(n), (300, 1)).T, axis=0)
    for cases in (zeros_and_ones(n), numbers):  # all different, in case the order of those in the middle matters
        in_order = np.sort(cases, 0)
        for trim in range((n + 1) // 2):
            np.testing.assert_array_equal(np.sort(run(cases, n, trim)[trim : n - trim], 0), in_order[trim : n - trim])
