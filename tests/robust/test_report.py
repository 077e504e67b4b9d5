"""What the server is told besides the value; and what a rule that is not ours sees."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.robust import Outcome, bucketing, krum, mean, median, multi_krum, nnm, rule_named, trimmed_mean
from fl_bn.robust.view import FAR, View
from tests.listed import listed
from tests.robust.cases import NAMES, Cohort, close, cohorts, few, mixed_rows, some

COORDINATE = [name for name in NAMES if name.rpartition("+")[2] in ("median", "trimmed-mean")]


@pytest.mark.parametrize("name", NAMES)
@few
@given(data=st.data())
def test_distances_are_those_to_the_value(name: str, data: st.DataObject) -> None:
    cohort = data.draw(cohorts(name))
    x = cohort.rows(50.0)
    value, report = rule_named(name)(x, cohort.f)
    close(report.distances, np.sqrt(((x - value) ** 2).sum(1)))
    assert (report.n, report.f, report.rejected) == (cohort.n, cohort.f, ())
    assert report.kept == list(range(cohort.n))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in COORDINATE])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@few
@given(data=st.data())
def test_weights_make_the_value(name: str, dtype: str, data: st.DataObject) -> None:
    cohort = data.draw(cohorts(name))
    x = cohort.rows(3.0, dtype)
    value, report = rule_named(name)(x, cohort.f)
    assert report.weights is not None
    assert report.weights.sum() == pytest.approx(1)
    close(report.weights @ x, value, 1e-6 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("name", COORDINATE)
def test_rules_by_coordinate_have_none(name: str, rng: np.random.Generator) -> None:
    report = rule_named(name)(rng.normal(size=(9, 3)), 1).report
    assert report.weights is None
    assert report.scores is None


@listed("name", NAMES)
def test_of_rejected_rows(name: str, rng: np.random.Generator) -> None:
    x = rng.normal(size=(11, 4))
    x[[2, 7], [0, 3]] = np.nan, np.inf
    report = rule_named(name)(x, 2).report
    assert report.rejected == (2, 7)
    assert report.kept == [0, 1, 3, 4, 5, 6, 8, 9, 10]
    assert (report.n, report.f) == (11, 2)
    assert np.isinf(report.distances[[2, 7]]).all()
    assert np.isfinite(report.distances[report.kept]).all()
    assert {2, 7} <= set(report.far)
    if report.weights is not None:
        assert (report.weights[[2, 7]] == 0).all()
        assert report.weights.sum() == pytest.approx(1)
    if report.scores is not None:
        assert np.isinf(report.scores[[2, 7]]).all()


@some
@given(cohort=cohorts(least_f=1))
def test_far_rows_are_far_from_the_value(cohort: Cohort) -> None:
    report = median(cohort.rows(1e3), cohort.f).report
    limit = 3 * np.median(report.distances)
    assert report.far == tuple(np.flatnonzero(report.distances > limit))
    assert set(cohort.liars) <= set(report.far) or cohort.n < 2 * cohort.f + 2  # there the median is of lies, too


def test_far_is_measured_by_the_rows_that_are_left() -> None:
    x = np.array([[0.0], [1.0], [-1.0], [2.0], [-5.0], [np.nan], [np.nan]])
    assert median(x, 2).report.far == (4, 5, 6)
    x = np.array([[0.0], [1.0], [-1.0], [1.0], [-1.0], [np.nan], [3.0], [-3.1], [-1.0], [1.0]])
    report = median(x, 4).report
    assert report.far == (5, 7)
    assert FAR == 3
    assert all(type(i) is int for i in report.far)


def test_scores_are_krums_alone(rng: np.random.Generator) -> None:
    x = rng.normal(size=(9, 3))
    assert krum(x, 1).report.scores is not None
    np.testing.assert_array_equal(multi_krum(x, 1).report.scores, krum(x, 1).report.scores)
    for name in ("mean", "geometric-median", "nnm+mean", "bucketing+krum"):  # of buckets there are other scores than of rows
        assert rule_named(name)(x, 1).report.scores is None
    assert rule_named("nnm+krum")(x, 1).report.scores.shape == (9,)


def test_a_row_without_weight_is_reported_like_any_other() -> None:
    x = np.array([[1.0], [np.nan], [3.0]])
    value, report = mean(x, weights=[1, 0, 1])
    assert value == 2
    assert report.rejected == (1,)
    assert report.distances.tolist() == [1, np.inf, 1]


def test_distances_of_rows_that_overflow_are_infinite_without_a_warning(rng: np.random.Generator) -> None:
    x = rng.normal(size=(7, 3))
    x[2] = 1e200
    report = median(x, 1).report
    assert report.rejected == ()
    assert np.isinf(report.distances[2])
    assert 2 in report.far


def test_a_float32_rows_distance_is_not_rounded_to_float32(rng: np.random.Generator) -> None:
    x = (rng.normal(size=(9, 2000)) + 1e3).astype(np.float32)
    value, report = median(x, 2)
    np.testing.assert_allclose(report.distances, np.sqrt(((x.astype(np.float64) - value) ** 2).sum(1)), rtol=1e-12)


@some
@given(cohort=cohorts(least_f=1))
def test_rules_of_others_see_rows(cohort: Cohort) -> None:
    """A view is a sequence of rows, mixed when asked for."""
    x, f = cohort.rows(3.0), cohort.f

    def ours_by_hand(view: View, f: int) -> Outcome:
        assert len(view) == cohort.n
        rows = list(view)
        close(view[len(view) - 1], rows[-1])
        for outside in (-1, len(view)):
            with pytest.raises(IndexError):
                view[outside]
        return median(rows, f)

    close(nnm(x, f, then=ours_by_hand).value, nnm(x, f, then=median).value)


def test_views_pass_f_on() -> None:
    seen: list[tuple[int, int]] = []

    def spy(view: Any, f: int) -> Outcome:
        seen.append((len(view), f))
        return median(view, f)

    x = np.arange(20.0).reshape(10, 2) ** 2
    nnm(x, 2, then=spy)
    assert seen[-1] == (10, 2)
    bucketing(x, 2, then=spy)
    assert seen[-1] == (5, 2)
    bucketing(x, 1, then=partial(nnm, then=spy), size=3)
    assert seen[-1] == (4, 1)
    x[[1, 3], 0] = np.nan
    nnm(x, 3, then=spy)
    assert seen[-1] == (8, 1)
    bucketing(x, 2, then=spy)
    assert seen[-1] == (4, 0)


def test_trimming_after_mixing_uses_f(rng: np.random.Generator) -> None:
    x = rng.normal(size=(12, 3))
    y = np.stack(mixed_rows(nnm, x, 2))
    close(nnm(x, 2, then=trimmed_mean).value, trimmed_mean(y, 2).value)
    assert np.abs(nnm(x, 2, then=trimmed_mean).value - trimmed_mean(y, 1).value).max() > 1e-6
