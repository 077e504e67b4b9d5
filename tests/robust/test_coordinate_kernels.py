"""Order statistics of columns against NumPy's, for every number of rows at which another kernel may run."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.robust import RULES, median, trimmed_mean
from fl_bn.robust import coordinate as kernels
from tests.listed import listed
from tests.robust.cases import cohorts, few, some, torch_kernels

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


@listed("n", [1, 2, 3, 8, 9, 16, 17, 18, 24, 25, 40])
@listed("dtype", DTYPES)
def test_the_kernels_of_torch_agree(n: int, dtype: str) -> None:
    x = columns(n, dtype)
    np.testing.assert_array_equal(kernels.median(torch.from_numpy(x.copy())).numpy(), kernels.median(x.copy()))
    for trim in range((n + 1) // 2):
        got, want = kernels.trimmed_mean(torch.from_numpy(x.copy()), trim).numpy(), kernels.trimmed_mean(x.copy(), trim)
        if n <= kernels.NETWORK and trim:
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_less(np.abs(got.astype(np.float64) - want), rounding(x, trim))


@pytest.mark.parametrize("n", [5, 16, 17, 300])
def test_blocks_may_be_strided(n: int) -> None:
    x = columns(n, "float32")
    wide = np.empty((n, WIDTH + 16), np.float32)
    wide[:, :WIDTH] = x
    np.testing.assert_array_equal(kernels.median(wide[:, :WIDTH]), np.median(x, axis=0))


@pytest.mark.parametrize("n", [2, 16, 18])
def test_two_large_middles_have_a_finite_mean_at_any_n_with_sorting(n: int) -> None:
    x = np.full((n, 3), 1.5e38, np.float32)
    assert (kernels.median(x) == np.float32(1.5e38)).all()


@st.composite
def weighted(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Columns with ties, and whole weights, some of them 0."""
    n, seed = draw(st.integers(1, 20)), draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    x, weights = rng.integers(-5, 6, (n, 6)) / 4, rng.integers(0, 6, n)
    weights[rng.integers(n)] += 1
    return x.astype(draw(st.sampled_from(DTYPES))), weights


@some
@given(case=weighted(), scale=st.sampled_from([1.0, 1e-3, 1e6]))
def test_the_weighted_median_is_that_of_repeated_rows(case: tuple[np.ndarray, np.ndarray], scale: float) -> None:
    x, weights = case
    np.testing.assert_array_equal(kernels.weighted_median(x, weights * scale), np.median(np.repeat(x, weights, axis=0), axis=0))


@some
@given(case=weighted(), data=st.data())
def test_the_weighted_trimmed_mean_is_that_of_repeated_rows(case: tuple[np.ndarray, np.ndarray], data: st.DataObject) -> None:
    x, weights = case
    total = int(weights.sum())
    trim = data.draw(st.integers(0, (total - 1) // 2))
    got = kernels.weighted_trimmed_mean(x, weights / total, trim / total)
    np.testing.assert_allclose(got, middle(np.repeat(x, weights, axis=0), trim), rtol=0, atol=1e-11 * total)


@few
@given(data=st.data())
@pytest.mark.parametrize("name", ["mean", "median", "trimmed-mean", "geometric-median", "centered-clipping"])
def test_equal_weights_are_none(name: str, data: st.DataObject) -> None:
    cohort = data.draw(cohorts())
    x, rule = cohort.rows(3.0), RULES[name]
    np.testing.assert_allclose(rule(x, cohort.f, weights=np.full(cohort.n, 7.0)).value, rule(x, cohort.f).value, rtol=0, atol=1e-9)


@few
@given(data=st.data())
def test_rules_cut_off_what_the_heaviest_hold(data: st.DataObject) -> None:
    """Weights so equal that none is capped; f rows of the others weigh at most as much."""
    cohort = data.draw(cohorts(extra=12))
    x, f = cohort.rows(3.0), cohort.f
    weights = np.random.default_rng(cohort.n).integers(40, 42, cohort.n)
    if 2 * np.sort(weights)[::-1][:f].sum() * cohort.n > (cohort.n - 1) * weights.sum():
        return
    many = np.repeat(x, weights, axis=0)
    np.testing.assert_allclose(median(x, f, weights=weights).value, np.median(many, axis=0), rtol=0, atol=1e-12)
    trim = int(np.sort(weights)[::-1][:f].sum())
    np.testing.assert_allclose(trimmed_mean(x, f, weights=weights).value, middle(many, trim), rtol=0, atol=1e-10)


def test_weighted_rules_take_what_torch_reads(rng: np.random.Generator) -> None:
    x, weights = rng.normal(size=(7, 5)).astype(np.float32), [1, 2, 3, 1, 2, 3, 1]
    for rule in (median, trimmed_mean):
        want = rule(x, 2, weights=weights).value
        with torch_kernels():
            got = rule(x, 2, weights=weights).value
        np.testing.assert_array_equal(got.numpy(), want)


def test_denormals_and_huge_numbers_raise_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (6, 20):
            x = np.resize(np.array([3e38, -3e38, 1e-45, 0.0, 1.0], np.float32), (n, 7))
            median(x, n // 5 + 1)
            trimmed_mean(x, n // 5 + 1)
