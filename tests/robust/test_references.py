"""Every rule against its paper, transcribed in ``tests/oracles``, against its definition, against NumPy, and against ByzFL."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.robust import centered_clipping, coordinate, geometric_median, krum, mean, median, multi_krum, nnm, trimmed_mean
from tests.listed import listed
from tests.oracles import krum as krum_oracle
from tests.oracles.nnm import nnm as mixed
from tests.robust.cases import Cohort, apart, close, cohorts, mixed_rows, some

Array = np.ndarray
Computes = Callable[[Array, int], Any]  # from rows and f


def byzfl(name: str) -> Computes:
    """Return a rule of ByzFL 0.0.11, where its definition agrees with ours: its Krum has one neighbour more."""

    def compute(x: Array, f: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(pytest.importorskip("byzfl"), name)(f)(x)

    return compute


def cut(x: Array, f: int) -> Array:
    return np.sort(x, axis=0)[f : len(x) - f].mean(0)


REFERENCES: dict[str, tuple[Computes, Computes, float]] = {  # ours, the reference, and the tolerance
    "krum": (krum, krum_oracle.krum, 0.0),
    "multi-krum": (multi_krum, lambda x, f: krum_oracle.multi_krum(x, f, len(x) - f), 1e-9),
    "multi-krum of two": (lambda x, f: multi_krum(x, f, select=2), lambda x, f: krum_oracle.multi_krum(x, f, 2), 1e-9),
    "nnm": (mixed_rows, mixed, 1e-9),
    "nnm+median": (nnm, lambda x, f: np.median(mixed(x, f), axis=0), 1e-9),
    "nnm+trimmed mean": (lambda x, f: nnm(x, f, then=trimmed_mean), lambda x, f: cut(mixed(x, f), f), 1e-9),
    "mean": (mean, lambda x, f: x.mean(0), 1e-14),
    "median": (median, lambda x, f: np.median(x, axis=0), 0.0),
    "trimmed mean": (trimmed_mean, cut, 1e-14),
    "byzfl's nnm": (mixed_rows, byzfl("NNM"), 1e-10),
    "byzfl's trimmed mean": (trimmed_mean, byzfl("TrMean"), 1e-12),
    "byzfl's multi-krum": (lambda x, f: multi_krum(x, max(0, f - 1), select=len(x) - f), byzfl("MultiKrum"), 1e-10),
}  # fmt: skip


def value(found: Any) -> Any:
    return getattr(found, "value", found)


@some
@given(cohort=cohorts("krum", dims=1, extra=12), size=st.sampled_from([0.1, 1.0, 30.0]))
def test_a_rule_is_its_reference(cohort: Cohort, size: float) -> None:
    x = cohort.rows(size)
    for name, (ours, reference, tolerance) in REFERENCES.items():
        try:
            close(value(ours(x, cohort.f)), reference(x, cohort.f), tolerance)
        except AssertionError as error:
            raise AssertionError(name) from error


def test_with_another_number_of_neighbours_krum_chooses_otherwise(rng: np.random.Generator) -> None:
    """Negative control."""
    drawn = [rng.normal(size=(7, 3)) for _ in range(50)]
    assert sum(not np.array_equal(multi_krum(x, 1, select=1).value, krum_oracle.krum(x, 2)) for x in drawn) > 5
    missing = np.full((1, 3), np.nan)  # a row of no numbers is one of the f
    assert all(np.array_equal(krum(np.vstack([x, missing]), 2).value, krum(x, 1).value) for x in drawn)


def total_distance(x: Array, point: Array) -> float:
    return float(np.sqrt(((x - point) ** 2).sum(1)).sum())


@some
@given(cohort=cohorts(extra=8), size=st.sampled_from([1.0, 100.0]))
def test_nothing_is_nearer_to_all_than_the_geometric_median(cohort: Cohort, size: float) -> None:
    x, rng = cohort.rows(size), np.random.default_rng(cohort.n)
    got = geometric_median(x, cohort.f).value
    directions = rng.normal(size=(60, x.shape[1]))
    ways = [*(directions / np.sqrt((directions**2).sum(1, keepdims=True))), *(row - got for row in x), x.mean(0) - got]
    for step in (1e-4, 1e-3, 1e-1, 1.0):
        assert min(total_distance(x, got + step * way) for way in ways) >= total_distance(x, got) * (1 - 1e-9)


def test_a_row_in_the_middle_of_others_is_their_geometric_median() -> None:
    """Vardi and Zhang: Weiszfeld's iteration divides by zero there."""
    x = np.array([[5.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0], [0.0, 0.0]])
    close(geometric_median(x, 1).value, [0.0, 0.0])


def clipped(x: Array, radius: float, steps: int) -> Array:
    """Karimireddy et al., ICML 2021, on the vectors themselves, from the row whose ball needs the smallest radius to hold a majority."""
    squares = apart(x) ** 2
    nearest = [np.sort(row)[: len(row) // 2 + 1] for row in squares]
    v = x[min(range(len(x)), key=lambda i: (nearest[i][-1], nearest[i].sum()))].copy()
    for _ in range(steps):
        step = np.zeros_like(v)
        for x_i in x:
            away = np.sqrt(((x_i - v) ** 2).sum())
            step = step + (x_i - v) * (min(1.0, radius / away) if away > 0 else 1.0)
        v = v + step / len(x)
    return v


@some
@given(cohort=cohorts(extra=12), radius=st.sampled_from([0.1, 1.0, 3.0, 50.0]), steps=st.integers(1, 12))
def test_centred_clipping(cohort: Cohort, radius: float, steps: int) -> None:
    x = cohort.rows(3.0)
    medians = np.sort(np.median(apart(x), axis=1))
    if cohort.n > 3 and cohort.n % 2 == 0 and medians[1] > medians[0] * (1 + 1e-9):  # one row is in the midst
        close(centered_clipping(x, cohort.f, radius=radius, steps=steps).value, clipped(x, radius, steps))


# the kernels of columns, for every number of rows


def columns(n: int, dtype: str) -> Array:
    """Columns of all signs, one sign, few values, denormals, in more than one strip."""
    rng, tiny = np.random.default_rng(n), np.finfo(dtype).smallest_subnormal
    x = rng.normal(size=(n, 150)).astype(dtype)
    x[:, 1::6] = rng.choice(np.array([0.0, -0.0, 1.5, -1.5, 1.5000001, -3e30, 2e30], dtype), x[:, 1::6].shape)
    x[:, 2::6] = rng.integers(-3, 4, x[:, 2::6].shape).astype(dtype) * tiny
    x[:, 3::6] = -np.abs(x[:, 3::6])
    x[:, 4::6] = np.abs(x[:, 4::6])
    x[:, 5::6] = np.float32(-2.5)
    return x


@listed("n", [*range(1, 41), 100, 128, 129, 254, 255, 256, 257, 300])
@listed("dtype", ["float32", "float64"])
def test_order_statistics_of_columns_are_numpys(n: int, dtype: str) -> None:
    x, info = columns(n, dtype), np.finfo(dtype)
    got = coordinate.median(x.copy())
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, np.median(x, axis=0))
    for trim in {0, 1, n // 4, (n - 1) // 2} & {*range((n + 1) // 2)}:
        kept = np.sort(x.astype(np.float64), axis=0)[trim : n - trim]
        lost = n * (info.eps * np.abs(kept).max(0) + info.smallest_subnormal)  # what a sum may lose, in whatever order
        np.testing.assert_array_less(np.abs(coordinate.trimmed_mean(x.copy(), trim) - kept.mean(0)), lost)
