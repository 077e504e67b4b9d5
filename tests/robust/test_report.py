"""What the server is told besides the value; and what a rule that is not ours sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.robust import Outcome, median, nnm, rule_named
from tests.listed import listed
from tests.robust.cases import NAMES, Cohort, close, cohorts, few, some

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


@some
@given(cohort=cohorts(least_f=1))
def test_rules_of_others_see_rows(cohort: Cohort) -> None:
    """A view is a sequence of rows, mixed when asked for."""
    x, f = cohort.rows(3.0), cohort.f

    def ours_by_hand(view: Any, f: int) -> Outcome:
        assert len(view) == cohort.n
        rows = list(view)
        close(view[len(view) - 1], rows[-1])
        with pytest.raises(IndexError):
            view[len(view)]
        return median(rows, f)

    close(nnm(x, f, then=ours_by_hand).value, nnm(x, f, then=median).value)
