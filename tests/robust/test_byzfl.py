"""Agreement with ByzFL 0.0.11 wherever the definitions agree, and the differences where they do not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.robust import centered_clipping, geometric_median, mean, median, multi_krum, nnm, rule_named, trimmed_mean
from tests.robust.cases import Cohort, close, cohorts, few, mixed_rows

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    byzfl = pytest.importorskip("byzfl")

sizes = st.sampled_from([0.5, 3.0, 100.0])


@pytest.fixture(autouse=True)
def _its_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"byzfl\\..*")
        yield


@few
@given(cohort=cohorts(dims=1, extra=20), size=sizes)
def test_mean_median_and_trimmed_mean(cohort: Cohort, size: float) -> None:
    x, f = cohort.rows(size), cohort.f
    close(mean(x, f).value, byzfl.Average()(x), 1e-12)
    close(median(x, f).value, byzfl.Median()(x), 1e-12)
    close(trimmed_mean(x, f).value, byzfl.TrMean(f)(x), 1e-12)
    tensor = torch.from_numpy(x).float()
    close(median(tensor, f).value, byzfl.Median()(tensor), 1e-5)
    close(trimmed_mean(tensor, f).value, byzfl.TrMean(f)(tensor), 1e-5)


def test_of_an_even_number_the_median_is_not_torchs(rng: np.random.Generator) -> None:
    """``torch.median`` takes the lower of the two middle values, which ByzFL before 0.0.11 passed on."""
    x = torch.from_numpy(rng.normal(size=(6, 3)))
    assert (torch.median(x, dim=0).values < median(x, 1).value).all()
    close(byzfl.Median()(x), median(x, 1).value, 1e-5)


@few
@given(cohort=cohorts(dims=2, extra=12), size=sizes)
def test_nearest_neighbour_mixing(cohort: Cohort, size: float) -> None:
    x, f = cohort.rows(size), cohort.f
    theirs = byzfl.NNM(f)(x)
    close(np.stack(mixed_rows(nnm, x, f)), theirs, 1e-10)
    close(rule_named("nnm+trimmed-mean")(x, f).value, byzfl.TrMean(f)(theirs), 1e-10)
    close(rule_named("nnm+median")(x, f).value, byzfl.Median()(theirs), 1e-10)
    tensor = torch.from_numpy(x).float()
    close(rule_named("nnm+trimmed-mean")(tensor, f).value, byzfl.TrMean(f)(byzfl.NNM(f)(tensor)), 1e-4)
    close(rule_named("nnm+median")(tensor, f).value, byzfl.Median()(byzfl.NNM(f)(tensor)), 1e-4)


@few
@given(cohort=cohorts("krum", extra=12), size=sizes)
def test_multi_krum_with_its_number_of_neighbours(cohort: Cohort, size: float) -> None:
    x, n, f = cohort.rows(size), cohort.n, cohort.f
    close(multi_krum(x, f, neighbours=n - f - 1).value, byzfl.MultiKrum(f)(x), 1e-10)
    close(multi_krum(x, f, select=1, neighbours=n - f - 1).value, byzfl.Krum(f)(x), 1e-12)
    tensor = torch.from_numpy(x).float()
    close(multi_krum(tensor, f, neighbours=n - f - 1).value, byzfl.MultiKrum(f)(tensor), 1e-4)


def test_with_the_papers_number_it_may_differ(rng: np.random.Generator) -> None:
    rows = [rng.normal(size=(9, 3)) for _ in range(40)]
    differ = sum(np.abs(multi_krum(x, 3).value - byzfl.MultiKrum(3)(x)).max() > 1e-6 for x in rows)
    assert 0 < differ < 40


@few
@given(cohort=cohorts(extra=12, honest=4), size=sizes)
def test_its_smoothed_geometric_median_is_close(cohort: Cohort, size: float) -> None:
    x, ours = cohort.rows(size), geometric_median(cohort.rows(size), cohort.f).value
    rough, fine = byzfl.GeometricMedian()(x), byzfl.GeometricMedian(nu=1e-6, T=200)(x)

    def total(point: Any) -> float:
        return float(np.sqrt(((x - point) ** 2).sum(1)).sum())

    assert total(ours) <= min(total(rough), total(fine)) * (1 + 1e-9)
    close(ours, fine, 1e-2)
    assert np.sqrt(((ours - rough) ** 2).sum()) < np.median(np.sqrt(((x - ours) ** 2).sum(1)))


@few
@given(cohort=cohorts(extra=12, honest=4))
def test_centred_clipping_that_clips_nothing(cohort: Cohort) -> None:
    """ByzFL starts at the origin, we in the midst of the rows: with an endless radius both are the mean."""
    x = cohort.rows(3.0)
    close(centered_clipping(x, cohort.f, radius=1e6, steps=1).value, byzfl.CenteredClipping(L=1, tau=1e6)(x))
