"""The additive form of moments: its average is the pooled moments, exactly; what quantisation may cost; and what does not fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fl_bn.secure.additive import (
    average_error,
    deviations,
    from_deviations,
    from_running_deviations,
    lost,
    moments_error,
    running_deviations,
    running_within,
    within,
)
from tests.refusals import naming
from tests.training.core import Moments, Running, plain_average, pool

number, positive = st.floats(-20, 20), st.floats(1e-3, 50)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def parts(draw: st.DrawFn) -> list[Moments]:
    clients = draw(st.lists(st.tuples(st.integers(1, 10**6), number, number, positive, positive), min_size=1, max_size=6))
    return [Moments(n, tensor(a, b), tensor(u, v)) for n, a, b, u, v in clients]


def averaged(moments: list[Moments], reference: Running) -> tuple[Tensor, Tensor]:
    both = [deviations(m, reference) for m in moments]
    total = sum(m.count for m in moments)
    first, second = (sum((m.count * b[i] for m, b in zip(moments, both, strict=True)), tensor(0, 0)) / total for i in (0, 1))
    return first, second


@given(moments=parts(), mean=number, var=positive)
def test_the_average_of_deviations_is_the_pooled_moments(moments: list[Moments], mean: float, var: float) -> None:
    reference = Running(tensor(mean, -mean), tensor(var, 2 * var))
    first, second = averaged(moments, reference)
    found, negative = from_deviations(sum(m.count for m in moments), first, second, reference)
    expected = pool(moments)
    assert negative == 0
    assert found.count == expected.count
    assert torch.allclose(found.mean, expected.mean, rtol=1e-9, atol=1e-9)
    assert torch.allclose(found.var, expected.var, rtol=1e-6, atol=1e-9 * float(reference.var.max() + first.square().max()) + 1e-8)


def test_forgetting_the_spread_of_the_means_is_something_else() -> None:
    """Negative control: the same comparison tells the tempting wrong rule, and weights left out, from the pooled moments."""
    moments, reference = [Moments(10, tensor(0.0), tensor(1.0)), Moments(30, tensor(4.0), tensor(2.0))], Running(tensor(1.0), tensor(2.0))
    found, _ = from_deviations(40, *averaged(moments, reference), reference)
    assert torch.allclose(found.var, pool(moments).var)
    assert not torch.allclose(found.var, plain_average(moments).var)
    alike = [replace(part, count=20) for part in moments]
    assert not torch.allclose(from_deviations(40, *averaged(alike, reference), reference)[0].mean, pool(moments).mean)


@given(moments=parts(), seed=st.integers(0, 1000))
def test_errors_of_the_averages_stay_below_the_bound(moments: list[Moments], seed: int) -> None:
    reference, rng = Running(tensor(1.0, -3.0), tensor(0.5, 9.0)), np.random.default_rng(seed)
    first, second = averaged(moments, reference)
    limit, error = 8.0, 1e-3
    noise = [torch.from_numpy(rng.uniform(-error, error, 2)) for _ in range(2)]
    exact, _ = from_deviations(1, first, second, reference)
    found, _ = from_deviations(1, first + noise[0], second + limit * noise[1], reference)
    mean, var = moments_error(first, reference, error, limit)
    assert bool(((found.mean - exact.mean).abs() <= mean * (1 + 1e-9) + 1e-12).all())
    assert bool(((found.var - exact.var).abs() <= var * (1 + 1e-9) + 1e-12).all())
    assert bool((var > 0).all())


@given(count=st.integers(1, 10), mean=st.floats(-1e4, 1e4), var=st.floats(0, 1e6))
def test_what_does_not_fit_becomes_the_nearest_moments_that_do(count: int, mean: float, var: float) -> None:
    reference, limit = Running(tensor(0.0), tensor(1.0)), 8.0
    moments = Moments(count, tensor(mean), tensor(var))
    first, second, cut = within(*deviations(moments, reference), limit)
    assert float(first.abs().max()) <= limit
    assert -limit <= float(second) <= limit * (1 + 1e-12)
    found, _ = from_deviations(count, first, limit * second, reference)
    assert float(found.var) >= 0
    if cut:
        assert abs(mean) > 7.9 or var > 1
    else:
        assert torch.allclose(found.mean, moments.mean)
        assert torch.allclose(found.var, moments.var, rtol=1e-6, atol=1e-9)


def test_running_statistics_go_there_and_back() -> None:
    reference, running = Running(tensor(1.0, 2.0), tensor(4.0, 0.0)), Running(tensor(3.0, 2.0), tensor(1.0, 2e-6))
    mean, var, cut = running_within(*running_deviations(running, reference), 8.0)
    found, negative = from_running_deviations(mean, 8 * var, reference)
    assert (cut, negative) == (0, 0)
    assert torch.allclose(found.mean, running.mean)
    assert torch.allclose(found.var, running.var, rtol=1e-4)
    *_, cut = running_within(*running_deviations(Running(tensor(99.0, 2.0), tensor(1e9, 1.0)), reference), 8.0)
    assert cut == 2  # a channel counts once


PLAIN, LIMIT = Running(tensor(0.0), tensor(1.0)), 8.0


def test_the_worst_error_is_the_bound() -> None:
    first, error = tensor(6.0), 1e-3
    exact, worst = (from_deviations(1, first + e, tensor(40.0) - 8 * e, PLAIN)[0].var for e in (0, error))
    assert float(exact - worst) == pytest.approx(float(moments_error(first, PLAIN, error, LIMIT)[1]))
    for weights in ([], [0, 0]):
        with naming("positive weights"):
            average_error(LIMIT, 22, weights)


def test_no_variance_is_cut_further_than_it_must_nor_below_zero() -> None:
    for mean in (0.0, 3.0):
        assert float(within(*deviations(Moments(5, tensor(mean), tensor(1e6)), PLAIN), LIMIT)[1]) == pytest.approx(LIMIT)
    first, second = deviations(Moments(5, tensor(20.0), tensor(4.0)), PLAIN)
    kept, halved, cut = within(first, second, LIMIT)
    assert cut == 1
    assert float(from_deviations(5, kept, LIMIT * halved, PLAIN)[0].var) == pytest.approx(1.0, abs=3.1)
    _, negative = from_deviations(5, first.clamp(-8, 8), second.clamp(-8, 8), PLAIN)
    assert negative == 1  # control: cut each by itself, mean 20 and variance 4 become a variance below 0


def test_what_is_lost_is_counted_and_a_layer_that_did_not_run_adds_nothing() -> None:
    near, moments = Running(tensor(0.0), tensor(1e-3)), Moments(9, tensor(0.0), tensor(1e-3))
    assert lost(moments, tensor(0.0), near, 1e-5, LIMIT) == 0
    assert lost(moments, tensor(0.0), PLAIN, 1e-5, LIMIT) == 1  # a reference far above the variance loses it
    found, negative = from_deviations(5, tensor(0.5, 0.5), tensor(-0.9, 0.0), Running(tensor(0.0, 0.0), tensor(1.0, 1.0)))
    assert (negative, float(found.var[0]), float(found.var[1]) > 0) == (1, 0, True)  # a negative variance is set to 0
    first, second = deviations(Moments(0, tensor(0.0), tensor(0.0)), Running(tensor(5.0), tensor(2.0)))
    assert float(first) == float(second) == 0
