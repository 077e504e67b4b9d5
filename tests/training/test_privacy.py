"""Clips, noise and their price, each against something known."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


@listed("torn", [b'{"rele', b"{", b"[]", b'{"releases": -7}', b'{"releases": "1"}', b"\xff", b'{"releases": true}'])
def test_a_line_that_a_crash_cut_short_counts_the_most(torn: bytes, tmp_path: Path) -> None:
    accountant_of(tmp_path / "file").spend(1)
    with (tmp_path / "file").open("ab") as file:
        file.write(torn)
    again = accountant_of(tmp_path / "file")
    assert again.releases == 1 + 2
    again.spend(1)
    assert accountant_of(tmp_path / "file").releases == 1 + 2 + 1  # the torn line did not swallow the next


def test_nothing_is_spent_that_cannot_be_kept(tmp_path: Path) -> None:
    accountant = accountant_of(tmp_path / "run/privacy.jsonl")
    (tmp_path / "run").write_text("a file where the folder should be")
    with pytest.raises(OSError, match="run"):
        accountant.spend(1)
    assert accountant.releases == 0


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
