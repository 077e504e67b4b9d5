"""Clips, noise and their price, each against something known; and moments in an additive form, whose average is the pooled moments."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fl_bn.bn.moments import Moments, Running, plain_average, pool
from fl_bn.secure.additive import deviations, from_deviations, lost, within
from fl_bn.secure.privacy import Accountant, Journal, Privacy, clipped, epsilon, noisy, norm, rho
from tests.listed import listed
from tests.refusals import naming


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20), clip=st.floats(1e-3, 1e3))
def test_a_clip_is_of_all_tensors_together_and_keeps_the_direction(values: list[float], clip: float) -> None:
    whole = torch.tensor(values, dtype=torch.float64)
    vector = {"first": whole[:1], "rest": whole[1:, None]}
    length, short = float(whole.norm()), torch.cat([tensor.flatten() for tensor in clipped(vector, clip).values()])
    assert norm(vector) == pytest.approx(length)
    if length <= clip:
        assert torch.equal(short, whole)
    else:
        assert torch.allclose(short / clip, whole / length, atol=1e-9)
        assert float(short.norm()) <= clip * (1 + 1e-12)


def test_the_sum_has_the_noise_promised_and_more_with_more_clients() -> None:
    rng, zeros, clip, multiplier = np.random.default_rng(7), {"x": torch.zeros(20_000)}, 0.5, 1.2

    def of_sum(clients: int, contributors: int) -> float:
        return float(sum((noisy(zeros, clip, multiplier, contributors, rng)["x"] for _ in range(clients)), torch.zeros(20_000)).std())

    promised = multiplier * clip
    assert of_sum(4, 4) == pytest.approx(promised, rel=0.03)
    assert of_sum(6, 4) == pytest.approx(promised * math.sqrt(6 / 4), rel=0.03)
    assert of_sum(1, 4) < 0.6 * promised  # control: one client's share protects nobody by itself


def test_epsilon_by_hand() -> None:
    assert rho(1, 1.0) == 0.5
    assert epsilon(1, 1.0, 1e-5) == pytest.approx(0.5 + 2 * math.sqrt(0.5 * math.log(1e5))) == pytest.approx(5.2985, abs=1e-4)
    assert epsilon(200, 10.0, 1e-5) == pytest.approx(epsilon(2, 1.0, 1e-5))  # rho is additive, and quadratic in 1 / noise


def exact_delta(releases: int, noise: float, eps: float) -> float:
    """Of the composition of Gaussians, which is one Gaussian of sensitivity sqrt(releases): Balle and Wang 2018, theorem 8."""
    mu, phi = math.sqrt(releases) / noise, NormalDist().cdf
    return phi(mu / 2 - eps / mu) - math.exp(eps) * phi(-mu / 2 - eps / mu)


@listed(("releases", "noise"), [(1, 1.0), (2, 1.0), (200, 10.0), (40, 5.0), (600, 20.0)])
def test_epsilon_is_an_upper_bound_and_not_by_much(releases: int, noise: float) -> None:
    eps = epsilon(releases, noise, 1e-5)
    assert exact_delta(releases, noise, eps) <= 1e-5
    assert exact_delta(releases, noise, 0.7 * eps) > 1e-5  # control: much less would be too little


def accountant_of(path: Path) -> Accountant:
    accountant = Accountant(Privacy(clip=1.0, statistics_clip=2.0, noise=4.0))
    accountant.keep_in(Journal(path))
    return accountant


def test_what_was_spent_outlives_the_process_and_is_said(tmp_path: Path) -> None:
    first = accountant_of(tmp_path / "run/privacy.jsonl")
    for releases in (1, 0, 2, 2):
        first.spend(releases)
    again = accountant_of(tmp_path / "run/privacy.jsonl")
    assert again.releases == first.releases == 5
    again.at_least(3)  # of a checkpoint, older than the journal
    assert again.releases == 5
    again.at_least(9)  # the journal was lost: what the checkpoint knows is entered
    assert accountant_of(tmp_path / "run/privacy.jsonl").releases == again.releases == 9
    assert f"epsilon {epsilon(9, 4.0, 1e-5):.3g} at delta 1e-05 per client after 9 releases" in again.statement()


@listed("torn", [b'{"rele', b"[]", b'{"releases": -7}', b"\xff"])
def test_a_line_that_a_crash_cut_short_counts_the_most(torn: bytes, tmp_path: Path) -> None:
    accountant_of(tmp_path / "file").spend(1)
    with (tmp_path / "file").open("ab") as file:
        file.write(torn)
    again = accountant_of(tmp_path / "file")
    assert again.releases == 1 + 2
    again.spend(1)
    assert accountant_of(tmp_path / "file").releases == 1 + 2 + 1  # the torn line did not swallow the next


def test_real_noise_is_never_the_same_and_a_test_s_is() -> None:
    zeros, generators = {"x": torch.zeros(3)}, (None, None, np.random.default_rng(3), np.random.default_rng(3))
    drawn = []
    for generator in generators:
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        drawn.append(noisy(zeros, 1.0, 1.0, 1, generator)["x"])
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[2], drawn[3])  # control


@listed("field", ["clip", "statistics_clip", "noise", "delta"])
@listed("value", [0.0, -1.0, math.inf])
def test_what_promises_nothing_is_refused(field: str, value: float) -> None:
    good = {"clip": 1.0, "statistics_clip": 1.0, "noise": 1.0, "delta": 1e-5}
    Privacy(**good)
    with naming(field):
        Privacy(**{**good, field: value})


number, positive = st.floats(-20, 20), st.floats(1e-3, 50)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def parts(draw: st.DrawFn) -> list[Moments]:
    clients = draw(st.lists(st.tuples(st.integers(1, 10**6), number, number, positive, positive), min_size=1, max_size=6))
    return [Moments(n, tensor(a, b), tensor(u, v)) for n, a, b, u, v in clients]


def averaged(moments: list[Moments], reference: Running) -> tuple[Tensor, Tensor]:
    both = [deviations(m, reference, pooled=True) for m in moments]
    total = sum(m.count for m in moments)
    first, second = (sum((m.count * b[i] for m, b in zip(moments, both, strict=True)), tensor(0, 0)) / total for i in (0, 1))
    return first, second


@given(moments=parts(), mean=number, var=positive)
def test_the_average_of_deviations_is_the_pooled_moments(moments: list[Moments], mean: float, var: float) -> None:
    reference = Running(tensor(mean, -mean), tensor(var, 2 * var))
    first, second = averaged(moments, reference)
    found, negative = from_deviations(first, second, reference, pooled=True)
    expected = pool(moments)
    assert negative == 0
    assert torch.allclose(found.mean, expected.mean, rtol=1e-9, atol=1e-9)
    assert torch.allclose(found.var, expected.var, rtol=1e-6, atol=1e-9 * float(reference.var.max() + first.square().max()) + 1e-8)


def test_forgetting_the_spread_of_the_means_is_something_else() -> None:
    """Negative control: the same comparison tells the tempting wrong rule, and weights left out, from the pooled moments."""
    moments, reference = [Moments(10, tensor(0.0), tensor(1.0)), Moments(30, tensor(4.0), tensor(2.0))], Running(tensor(1.0), tensor(2.0))
    found, _ = from_deviations(*averaged(moments, reference), reference, pooled=True)
    assert torch.allclose(found.var, pool(moments).var)
    assert not torch.allclose(found.var, plain_average(moments).var)
    alike = [replace(part, count=20) for part in moments]
    assert not torch.allclose(from_deviations(*averaged(alike, reference), reference, pooled=True)[0].mean, pool(moments).mean)


@given(count=st.integers(1, 10), mean=st.floats(-1e4, 1e4), var=st.floats(0, 1e6))
def test_what_does_not_fit_becomes_the_nearest_moments_that_do(count: int, mean: float, var: float) -> None:
    reference, limit = Running(tensor(0.0), tensor(1.0)), 8.0
    moments = Moments(count, tensor(mean), tensor(var))
    first, second, cut = within(*deviations(moments, reference, pooled=True), limit, pooled=True)
    assert float(first.abs().max()) <= limit
    assert -limit <= float(second) <= limit * (1 + 1e-12)
    found, _ = from_deviations(first, limit * second, reference, pooled=True)
    assert float(found.var) >= 0
    if cut:
        assert abs(mean) > 7.9 or var > 1
    else:
        assert torch.allclose(found.mean, moments.mean)
        assert torch.allclose(found.var, moments.var, rtol=1e-6, atol=1e-9)


def test_running_statistics_go_there_and_back() -> None:
    reference, running = Running(tensor(1.0, 2.0), tensor(4.0, 0.0)), Running(tensor(3.0, 2.0), tensor(1.0, 2e-6))
    mean, var, cut = within(*deviations(running, reference, pooled=False), 8.0, pooled=False)
    found, negative = from_deviations(mean, 8 * var, reference, pooled=False)
    assert (cut, negative) == (0, 0)
    assert torch.allclose(found.mean, running.mean)
    assert torch.allclose(found.var, running.var, rtol=1e-4)
    far = Running(tensor(99.0, 2.0), tensor(1e9, 1.0))
    *_, cut = within(*deviations(far, reference, pooled=False), 8.0, pooled=False)
    assert cut == 2  # a channel counts once


PLAIN, LIMIT = Running(tensor(0.0), tensor(1.0)), 8.0


def test_no_variance_is_cut_further_than_it_must_nor_below_zero() -> None:
    for mean in (0.0, 3.0):
        assert float(within(*deviations(Moments(5, tensor(mean), tensor(1e6)), PLAIN, True), LIMIT, True)[1]) == pytest.approx(LIMIT)
    first, second = deviations(Moments(5, tensor(20.0), tensor(4.0)), PLAIN, True)
    kept, halved, cut = within(first, second, LIMIT, True)
    assert cut == 1
    assert float(from_deviations(kept, LIMIT * halved, PLAIN, True)[0].var) == pytest.approx(1.0, abs=3.1)
    _, negative = from_deviations(first.clamp(-8, 8), second.clamp(-8, 8), PLAIN, True)
    assert negative == 1  # control: cut each by itself, mean 20 and variance 4 become a variance below 0


def test_what_is_lost_is_counted() -> None:
    near, moments = Running(tensor(0.0), tensor(1e-3)), Moments(9, tensor(0.0), tensor(1e-3))
    assert lost(moments, tensor(0.0), near, 1e-5, LIMIT) == 0
    assert lost(moments, tensor(0.0), PLAIN, 1e-5, LIMIT) == 1  # a reference far above the variance loses it
    found, negative = from_deviations(tensor(0.5, 0.5), tensor(-0.9, 0.0), Running(tensor(0.0, 0.0), tensor(1.0, 1.0)), True)
    assert (negative, float(found.var[0]), float(found.var[1]) > 0) == (1, 0, True)  # a negative variance is set to 0
