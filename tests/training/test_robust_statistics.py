"""Robust FBN: with f = 0 it is Algorithm 2; with f > 0 and no attack it keeps the spread between the clients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_bn.methods import METHODS, LayerReports
from fl_bn.robust import median
from tests.oracles.fbn import algorithm_2
from tests.training.core import Average, Defence, Moments, Running, pool, weighted_mean

NOBODY = ("mean", "nnm+median", "nnm+trimmed-mean", "nnm+geometric-median", "trimmed-mean")  # the mean where f = 0
F = 3


@st.composite
def cohorts(draw: st.DrawFn, least: int = 2) -> tuple[np.ndarray, np.ndarray, list[np.ndarray], float]:
    """Shared statistics, the equal batches (K, C) of n clients, and a momentum."""
    n, size, channels = draw(st.integers(least, least + 6)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread, scale = draw(st.sampled_from([0.0, 0.1, 1.0, 10.0])), draw(st.sampled_from([1e-2, 1.0, 1e2]))
    batches = [scale * rng.normal(spread * rng.normal(), 1.0, (size, channels)) for _ in range(n)]
    return scale * rng.normal(size=channels), scale**2 * rng.uniform(0.5, 2, channels), batches, draw(st.sampled_from([0.1, 0.5, 1.0]))


def combined(u: np.ndarray, s: np.ndarray, batches: list[np.ndarray], momentum: float, average: Average) -> Running:
    parts = [Moments.of(torch.from_numpy(x)) for x in batches]
    shared = Running(torch.from_numpy(u), torch.from_numpy(s))
    return METHODS["fbn"](momentum=momentum).combine(LayerReports(shared, parts, momentum, 1.0, average))


def off(got: Running, want: tuple[np.ndarray, np.ndarray], batches: list[np.ndarray]) -> float:
    """Relative to the size of the numbers that enter."""
    largest = max(float(np.abs(x).max()) for x in batches)
    assert got.mean.dtype is got.var.dtype is torch.float64
    means = np.abs(got.mean.numpy() - want[0]) / (np.abs(want[0]) + largest)
    variances = np.abs(got.var.numpy() - want[1]) / (np.abs(want[1]) + largest**2)
    return float(max(means.max(), variances.max()))


@pytest.mark.parametrize("rule", NOBODY)
@settings(max_examples=25, deadline=None)
@given(case=cohorts())
def test_against_nobody_robust_fbn_is_algorithm_2(rule: str, case: tuple[np.ndarray, np.ndarray, list[np.ndarray], float]) -> None:
    u, s, batches, momentum = case
    if len(batches) * len(batches[0]) < 2:
        return
    assert off(combined(u, s, batches, momentum, Defence(0, rule).average), algorithm_2(u, s, batches, momentum), batches) < 1e-13


@pytest.mark.parametrize("rule", ["nnm+median", "nnm+trimmed-mean", "median", "trimmed-mean", "multi-krum"])
def test_against_three_it_is_not(rule: str, rng: np.random.Generator) -> None:
    """Negative control."""
    batches = [rng.normal(2 * i, 1, (5, 4)) for i in range(10)]
    u, s = rng.normal(size=4), rng.uniform(0.5, 2, 4)
    want = algorithm_2(u, s, batches, 0.1)
    assert off(combined(u, s, batches, 0.1, Defence(0, "nnm+median").average), want, batches) < 1e-13
    assert off(combined(u, s, batches, 0.1, Defence(F, rule).average), want, batches) > 1e-3


# The term between the clients, of clients that have no variance of their own


def between(n: int, seed: int, variance: Callable[[list[Moments]], torch.Tensor]) -> float:
    """As a share of the true one: mean over 64 channels."""
    means = torch.from_numpy(np.random.default_rng(seed).normal(size=(n, 64)))
    parts = [Moments(1000, mean, torch.zeros(64, dtype=torch.float64)) for mean in means]
    return float(variance(parts).mean() / pool(parts).var.mean())


def nnm_before_the_deviations(parts: list[Moments]) -> torch.Tensor:
    """The wrong order: the means are mixed first, and their deviations are those of the mixed ones."""
    means = np.stack([part.mean.numpy() for part in parts])
    squares = ((means[:, None] - means[None]) ** 2).sum(-1)
    mixed = torch.from_numpy(means[squares.argsort(1, kind="stable")[:, : len(means) - F]].mean(1))
    return pool([Moments(1000, m, part.var) for m, part in zip(mixed, parts, strict=True)], Defence(F, median).average).var


@pytest.mark.parametrize(
    ("rule", "low", "high"),
    [("nnm+median", 0.87, 1.0), ("nnm+trimmed-mean", 0.87, 1.0), ("median", 0.4, 0.56), ("trimmed-mean", 0.45, 0.65)],
)
def test_the_spread_between_honest_clients_is_kept(rule: str, low: float, high: float) -> None:
    """NNM over the squared deviations keeps about 0.9 of it; the rules alone half (methods.md, section 3)."""
    shares = [between(n, seed, lambda parts: pool(parts, Defence(F, rule).average).var) for n in (10, 13, 15) for seed in range(4)]
    assert low < np.mean(shares) < high


def test_mixing_the_means_before_the_deviations_forgets_it() -> None:
    shares = [between(n, seed, nnm_before_the_deviations) for n in (10, 13, 15) for seed in range(4)]
    assert max(shares) < 0.1
    assert np.mean([between(10, seed, lambda parts: pool(parts, weighted_mean).var) for seed in range(4)]) == pytest.approx(1.0)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), rule=st.sampled_from(["median", "trimmed-mean", "krum", "nnm+median", "nnm+trimmed-mean"]))
def test_a_variance_of_0_and_a_mean_far_away_leave_the_shared_variance_where_the_honest_are(seed: int, rule: str) -> None:
    rng = np.random.default_rng(seed)
    honest = [Moments(10, torch.from_numpy(rng.normal(size=3)), torch.from_numpy(rng.uniform(0.5, 2, 3))) for _ in range(8)]
    lies = [Moments(10, torch.full((3,), rng.choice([0.0, 1e6])).double(), torch.zeros(3, dtype=torch.float64)) for _ in range(2)]
    merged = pool([*honest, *lies], Defence(2, rule).average)
    means = torch.stack([m.mean for m in honest])
    if rule in ("median", "trimmed-mean", "krum"):
        assert (merged.mean >= means.min(0).values).all()
        assert (merged.mean <= means.max(0).values).all()
    assert (merged.var > 0).all()
    assert (merged.var <= 2 + (means.max(0).values - means.min(0).values + 1).square() * 4).all()
