"""Agreement with ByzFL 0.0.11 wherever the definitions agree, and the differences where they do not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.robust import mean, median, multi_krum, nnm, rule_named, trimmed_mean
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


@few
@given(cohort=cohorts(dims=2, extra=12), size=sizes)
def test_nearest_neighbour_mixing(cohort: Cohort, size: float) -> None:
    x, f = cohort.rows(size), cohort.f
    theirs = byzfl.NNM(f)(x)
    close(mixed_rows(nnm, x, f), theirs, 1e-10)
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
