"""Every rule against its paper, transcribed in ``tests/oracles``, or against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.robust import bucketing, centered_clipping, geometric_median, krum, multi_krum, nnm
from tests.oracles import krum as krum_oracle
from tests.oracles.nnm import nnm as mixed
from tests.robust.cases import Cohort, apart, close, cohorts, mixed_rows, some


@some
@given(cohort=cohorts("krum", dims=1), size=st.sampled_from([0.0, 1.0, 30.0]))
def test_krum(cohort: Cohort, size: float) -> None:
    x = cohort.rows(size + 0.1)
    np.testing.assert_array_equal(krum(x, cohort.f).value, krum_oracle.krum(x, cohort.f))


@some
@given(cohort=cohorts("krum", dims=1), data=st.data())
def test_multi_krum(cohort: Cohort, data: st.DataObject) -> None:
    x, m = cohort.rows(2.0), data.draw(st.integers(1, cohort.n))
    close(multi_krum(x, cohort.f, select=m).value, krum_oracle.multi_krum(x, cohort.f, m))
    close(multi_krum(x, cohort.f).value, krum_oracle.multi_krum(x, cohort.f, cohort.n - cohort.f))


def test_with_another_number_of_neighbours_krum_chooses_otherwise(rng: np.random.Generator) -> None:
    """Negative control."""
    other = 0
    for _ in range(50):
        x = rng.normal(size=(7, 3))
        np.testing.assert_array_equal(multi_krum(x, 2, select=1, neighbours=3).value, krum_oracle.krum(x, 2))
        other += not np.array_equal(multi_krum(x, 2, select=1, neighbours=4).value, krum_oracle.krum(x, 2))
    assert other > 5


def test_of_equal_scores_krum_takes_the_first() -> None:
    x = np.array([[9.0], [1.0], [0.0], [2.0], [1.0], [-7.0]])
    assert krum(x, 1).value == 1
    assert krum(np.array([[3.0, 0], [0, 0], [3, 3], [0, 3]]), 0).value.tolist() == [3, 0]


@some
@given(cohort=cohorts(dims=1), size=st.sampled_from([0.5, 3.0]))
def test_nearest_neighbour_mixing(cohort: Cohort, size: float) -> None:
    x = cohort.rows(size)
    close(mixed_rows(nnm, x, cohort.f), mixed(x, cohort.f))


def test_of_equally_near_rows_the_first_are_mixed() -> None:
    x = np.array([[0.0], [1.0], [-1.0], [1.0], [50.0]])
    close(mixed_rows(nnm, x, 2)[0], [0.0])  # itself, 1 and -1
    close(mixed_rows(nnm, x[[0, 1, 3, 2, 4]], 2)[0], [2 / 3])


@some
@given(cohort=cohorts(dims=1, extra=12), size=st.integers(1, 5), seed=st.integers(0, 9))
def test_bucketing(cohort: Cohort, size: int, seed: int) -> None:
    """Each row in one bucket, none of which is larger than ``size``, and as few as can be."""
    x = np.eye(cohort.n)
    buckets = mixed_rows(bucketing, x, 0, size=size, seed=seed)
    members = buckets > 0
    assert len(buckets) == -(-cohort.n // size)
    assert (members.sum(0) == 1).all()
    assert (members.sum(1)[:-1] == size).all()
    np.testing.assert_allclose(buckets, members / members.sum(1, keepdims=True), rtol=1e-15)


def total_distance(x: np.ndarray, point: np.ndarray) -> float:
    return float(np.sqrt(((x - point) ** 2).sum(1)).sum())


@some
@given(cohort=cohorts(extra=8), size=st.sampled_from([1.0, 100.0]))
def test_nothing_is_nearer_to_all_than_the_geometric_median(cohort: Cohort, size: float) -> None:
    x = cohort.rows(size)
    rng = np.random.default_rng(cohort.n)
    got = geometric_median(x, cohort.f).value
    least = total_distance(x, got)
    directions = rng.normal(size=(60, x.shape[1]))
    directions = [*(directions / np.sqrt((directions**2).sum(1, keepdims=True))), *(row - got for row in x), x.mean(0) - got]
    for step in (1e-4, 1e-3, 1e-1, 1.0):
        assert min(total_distance(x, got + step * way) for way in directions) >= least * (1 - 1e-9)


@pytest.mark.parametrize("corners", [3, 4, 7])
def test_a_row_in_the_middle_of_others_is_their_geometric_median(corners: int) -> None:
    """Vardi and Zhang: Weiszfeld's iteration divides by zero there."""
    angles = 2 * np.pi * np.arange(corners) / corners
    x = np.vstack([np.stack([np.cos(angles), np.sin(angles)], axis=1), [[0.0, 0.0]]])
    close(geometric_median(x, 1).value, [0.0, 0.0])
    x[0] *= 5
    close(geometric_median(x, 1).value, [0.0, 0.0])
    assert np.abs(geometric_median(x[:-1] + 0.01, 0).value).max() > 1e-3


def medoid(squares: np.ndarray) -> int:
    """Return the row whose ball needs the smallest radius to hold a majority; of several, the one nearest to those in it."""
    nearest = [np.sort(row)[: len(row) // 2 + 1] for row in squares]
    return min(range(len(squares)), key=lambda i: (nearest[i][-1], nearest[i].sum()))


def clipped(x: np.ndarray, start: int, radius: float, steps: int) -> np.ndarray:
    """Karimireddy et al., ICML 2021, on the vectors themselves."""
    v = x[start].copy()
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
    x, start = cohort.rows(3.0), medoid(apart(cohort.rows(3.0)) ** 2)
    got = centered_clipping(x, cohort.f, radius=radius, steps=steps).value
    medians = np.sort(np.median(apart(x), axis=1))
    if cohort.n > 3 and cohort.n % 2 == 0 and medians[1] > medians[0] * (1 + 1e-9):  # one row is in the midst
        close(got, clipped(x, start, radius, steps))
