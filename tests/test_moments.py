"""Moments: the laws of pooling, against numpy on the union; the plain average as the rule that must fail."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fl_bn.bn.moments import Moments, Running, bounds, ema, plain_average, pool
from tests.listed import listed


@st.composite
def batches(draw: st.DrawFn, least: int = 1, spread: float = 3.0) -> list[Tensor]:
    """Batches (n_i, C) in float64, each with a mean and a scale of its own."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=least, max_size=6))
    rng, channels = np.random.default_rng(draw(st.integers(0, 2**32 - 1))), draw(st.integers(1, 4))
    return [torch.from_numpy(rng.normal(rng.normal(0, spread, channels), rng.uniform(0.1, 2, channels), (n, channels))) for n in sizes]


def moments(parts: list[Tensor]) -> list[Moments]:
    return [Moments.of(part) for part in parts]


def off(a: Moments, b: Moments) -> float:
    """Largest deviation; infinite if the counts differ."""
    if a.count != b.count:
        return float("inf")
    return max(float((a.mean - b.mean).abs().max()), float((a.var - b.var).abs().max()))


def of_union(parts: list[Tensor]) -> Moments:
    together = np.concatenate([part.numpy() for part in parts])
    return Moments(len(together), torch.from_numpy(together.mean(0)), torch.from_numpy(together.var(0)))


@given(batches(least=3), st.integers(0, 6), st.data())
def test_pool_is_the_moments_of_the_union_in_any_order_and_of_any_parts(parts: list[Tensor], where: int, data: st.DataObject) -> None:
    known, union = moments(parts), of_union(parts)
    a, b, *rest = known
    nothing = Moments(0, torch.full_like(a.mean, 7.0), torch.full_like(a.var, 5.0))
    assert off(pool(known), union) < 1e-12
    assert off(pool([pool([a, b]), pool(rest)]), union) < 1e-12
    assert off(pool(data.draw(st.permutations(known))), union) < 1e-12
    assert off(pool([*known[:where], nothing, *known[where:]]), pool(known)) == 0
    assert off(pool([a]), of_union(parts[:1])) < 1e-12
    assert (pool(known).var >= 0).all()


@given(batches(least=2))
def test_the_plain_average_is_not_wherever_the_means_differ(parts: list[Tensor]) -> None:
    apart = max(float((a.mean(0) - parts[0].mean(0)).abs().max()) for a in parts)
    assert (off(plain_average(moments(parts)), of_union(parts)) < 1e-12) == (apart < 1e-6)


def test_a_large_offset_does_not_cancel(rng: np.random.Generator) -> None:
    parts = [torch.from_numpy(rng.normal(1e4 + i, 1, (200, 2))) for i in range(4)]
    exact = of_union([part - 1e4 for part in parts]).var
    assert (pool(moments(parts)).var - exact).abs().max() < 1e-10
    together = torch.cat(parts)
    assert not ((together**2).mean(0) - together.mean(0) ** 2 - exact).abs().max() < 1e-10
    single = together.float()
    assert (Moments.of(single).var - exact).abs().max() < 1e-4
    assert not ((single**2).mean(0) - single.mean(0) ** 2 - exact).abs().max() < 1e-4


def test_bessel(rng: np.random.Generator) -> None:
    x = torch.from_numpy(rng.normal(size=(7, 3)))
    assert (Moments.of(x).bessel() - x.var(0, unbiased=True)).abs().max() < 1e-15
    assert not (Moments.of(x).var - x.var(0, unbiased=True)).abs().max() < 1e-15


@listed("momentum", [0.1, 0.7, 1.0])
def test_ema_is_torchs_running_update(rng: np.random.Generator, momentum: float) -> None:
    norm = nn.BatchNorm2d(3, momentum=momentum, dtype=torch.float64)
    shared = Running(norm.running_mean.clone(), norm.running_var.clone())
    for _ in range(3):
        x = torch.from_numpy(rng.normal(1, 2, (4, 3, 2, 2)))
        norm(x)
        shared = ema(shared, Moments.of(x), momentum)
    assert torch.allclose(shared.mean, norm.running_mean, rtol=1e-13)
    assert torch.allclose(shared.var, norm.running_var, rtol=1e-13)
    other = ema(Running(torch.zeros(3), torch.ones(3)), Moments.of(x), 1 - momentum)  # weight of the old, as papers write it
    assert not torch.allclose(other.mean, norm.running_mean, rtol=1e-13)


@listed("dtype", [torch.float16, torch.float32, torch.float64])
def test_statistics_within_the_bounds_pool_to_a_finite_variance(dtype: torch.dtype) -> None:
    mean, var = (torch.tensor([bound], dtype=torch.float64) for bound in bounds(dtype))
    finite = [bool(pool([Moments(1, by * mean, var), Moments(1, -by * mean, var)]).var.to(dtype).isfinite()) for by in (1, 4)]
    assert finite == [True, False]
