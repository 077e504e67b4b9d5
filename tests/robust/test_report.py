"""What the server is told besides the value."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.robust import median, rule_named
from tests.listed import listed
from tests.robust.cases import NAMES, Cohort, close, cohorts, few, some


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES)
@few
@given(data=st.data())
def test_distances_are_those_to_the_value(name: str, data: st.DataObject) -> None:
    cohort = data.draw(cohorts(name))
    x = cohort.rows(50.0)
    value, report = rule_named(name)(x, cohort.f)
    close(report.distances, np.sqrt(((x - value) ** 2).sum(1)))
    assert report.rejected == ()


@listed("name", NAMES)
def test_of_rejected_rows(name: str, rng: np.random.Generator) -> None:
    x = rng.normal(size=(11, 4))
    x[[2, 7], [0, 3]] = np.nan, np.inf
    report = rule_named(name)(x, 2).report
    assert report.rejected == (2, 7)
    assert np.flatnonzero(np.isinf(report.distances)).tolist() == [2, 7]
    assert {2, 7} <= set(report.far)


@some
@given(cohort=cohorts(least_f=1))
def test_far_rows_are_far_from_the_value(cohort: Cohort) -> None:
    report = median(cohort.rows(1e3), cohort.f).report
    limit = 3 * np.median(report.distances)
    assert report.far == tuple(np.flatnonzero(report.distances > limit))
    assert set(cohort.liars) <= set(report.far) or cohort.n < 2 * cohort.f + 2  # there the median is of lies, too
