"""Where the honest majority holds the value, and that it does not past the bound."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.robust import centered_clipping, geometric_median, krum, median, multi_krum, nnm, trimmed_mean
from tests.listed import listed
from tests.robust.cases import Cohort, cohorts, some

COORDINATE = [median, trimmed_mean]
LARGE = [0.0, 1.0, -3.0, 1e10, -1e100]


@st.composite
def lies(draw: st.DrawFn) -> tuple[Cohort, np.ndarray]:
    """A cohort, and its rows: f of them with any numbers in any coordinate."""
    cohort = draw(cohorts(most_f=6, extra=12, dims=1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = cohort.rows(1.0)
    rows[cohort.liars] = rng.choice(LARGE, (cohort.f, rows.shape[1])) * rng.uniform(0, 1, (cohort.f, 1))
    return cohort, rows


def outside(cohort: Cohort, value: np.ndarray) -> float:
    """How far the value is from the honest box, in units of the largest honest number."""
    low, high = cohort.honest.min(0), cohort.honest.max(0)
    return float(np.maximum(low - value, value - high).max() / np.abs(cohort.honest).max())


@pytest.mark.parametrize("rule", COORDINATE)
@some
@given(case=lies())
def test_coordinate_rules_stay_among_the_honest(rule: type, case: tuple[Cohort, np.ndarray]) -> None:
    cohort, rows = case
    assert outside(cohort, rule(rows, cohort.f).value) <= 1e-14
    assert outside(cohort, nnm(rows, cohort.f, then=rule).value) <= (4 if cohort.f else 1e-14)


@pytest.mark.parametrize("rule", [krum, multi_krum])
@pytest.mark.parametrize("f", [1, 2, 3])
def test_too_many_equal_rows_drive_krum_out(rule: type, f: int, rng: np.random.Generator) -> None:
    n = 2 * f + 3
    rows = rng.normal(size=(n, 3))
    rows[: n - f - 1] = 1e6
    assert (rule(rows, f).value > 1e5).all()
    rows[f : n - f - 1] = 0.0
    assert (np.abs(rule(rows, f).value) < 5).all()


@listed("rule", [*COORDINATE, geometric_median, centered_clipping, partial(nnm, then=median)])
@listed("f", [1, 2, 5])
def test_one_row_too_many_drives_a_rule_out(rule: type, f: int, rng: np.random.Generator) -> None:
    rows = rng.normal(size=(2 * f + 1, 3))
    rows[: f + 1] = 1e6
    assert (rule(rows, f).value > 1e5).all()
    rows[f] = 0.0
    assert (np.abs(rule(rows, f).value) < 30).all()
