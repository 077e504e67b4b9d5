"""Order statistics of columns against NumPy's for every number of rows."""

from __future__ import annotations

import warnings

import numpy as np

from fl_bn.robust import coordinate as kernels
from fl_bn.robust import median, trimmed_mean
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
