"""Figures 1 and 2 of the FBN paper: the study beside a transcription in plain NumPy, and the order that the paper finds."""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from torch import Tensor

from experiments.definitions.programs import normalisation_error
from experiments.definitions.programs.normalisation_error import (
    CENTRALISED,
    FBN,
    FIXBN,
    METHODS_SHOWN,
    NAIVE,
    SIMILARITY,
    draws,
    normalised,
    run,
)
from fl_bn.federation.settings import seeded

EPS, BETA = 1e-5, 0.1


def by_hand(rounds: list[Tensor], corrected: bool = True) -> dict[str, float]:
    """Mean distance to centralised BatchNorm over points and rounds. ``corrected``: with the last term of Algorithm 2, line 10."""
    fbn, averaged = (np.zeros(2), np.ones(2)), (np.zeros(2), np.ones(2))
    found = {NAIVE: list[float](), FIXBN: list[float](), FBN: list[float]()}
    for t, points in enumerate(rounds, 1):
        u = points.numpy()
        n, K = u.shape[:2]
        flat = u.reshape(-1, 2)
        central = (u - flat.mean(0)) / np.sqrt(flat.var(0) + EPS)
        mean_i, var_i = u.mean(1), u.var(1)
        naive = (u - mean_i[:, None]) / np.sqrt(var_i[:, None] + EPS)
        frozen = t > len(rounds) // 2
        methods = {
            NAIVE: naive,
            FIXBN: (u - averaged[0]) / np.sqrt(averaged[1] + EPS) if frozen else naive,
            FBN: (u - fbn[0]) / np.sqrt(fbn[1] + EPS),
        }
        for method, own in methods.items():
            found[method].append(float(np.sqrt(((own - central) ** 2).sum(-1)).mean()))
        if not frozen:
            averaged = (
                ((1 - BETA) * averaged[0] + BETA * mean_i).mean(0),
                ((1 - BETA) * averaged[1] + BETA * K / (K - 1) * var_i).mean(0),
            )
        u_i, s_i = (1 - BETA) * fbn[0] + BETA * mean_i, (1 - BETA) * fbn[1] + BETA * K * n / (K * n - 1) * var_i
        spread = K * n / ((K * n - 1) * BETA) * ((u_i - u_i.mean(0)) ** 2).mean(0)
        fbn = (u_i.mean(0), s_i.mean(0) + (spread if corrected else 0))
    return {method: float(np.mean(values)) for method, values in found.items()}


@pytest.mark.parametrize("similarity", [0.0, 0.3])
def test_the_study_is_the_papers(similarity: float) -> None:
    rounds = draws(similarity, seeded(3), rounds=12)
    assert rounds[0].shape == (10, 30, 2)
    assert normalised(rounds).error == pytest.approx(by_hand(rounds), rel=1e-9)
    wrong = by_hand(rounds, corrected=False)[FBN]  # control
    assert wrong != pytest.approx(normalised(rounds).error[FBN], rel=1e-2)


def test_the_means_stand_on_a_circle_and_a_share_of_the_points_is_about_all_of_them() -> None:
    angle = 2 * np.pi * np.arange(10) / 10
    circle = 10 * np.stack([np.cos(angle), np.sin(angle)], 1)
    many = torch.stack(draws(0.0, seeded(0), rounds=60))
    assert np.allclose(many.mean((0, 2)).numpy(), circle, atol=0.15)
    assert np.allclose(many.var((0, 2)).numpy(), 1, atol=0.12)
    mixed = torch.stack(draws(0.3, seeded(0), rounds=60)).mean((0, 2)).numpy()
    assert np.allclose(mixed, 0.7 * circle, atol=0.5)


def test_the_papers_order_over_100_rounds() -> None:
    """FBN stays close at every similarity; FixBN's and BatchNorm's errors grow as the clients differ (section 4, figure 2c)."""
    error = {similarity: normalised(draws(similarity, seeded(0))).error for similarity in (1.0, 0.0)}
    last = normalised(draws(0.0, seeded(0))).points
    assert 5 * error[0.0][FBN] < min(error[0.0][FIXBN], error[0.0][NAIVE])
    assert error[0.0][FBN] < 2 * error[1.0][FBN]
    for method in (NAIVE, FIXBN):
        assert error[0.0][method] > 3 * error[1.0][method]
    assert float((last[FBN] - last[CENTRALISED]).norm(dim=-1).mean()) < 0.1  # figure 2a beside 1a
    assert float((last[FIXBN] - last[CENTRALISED]).norm(dim=-1).mean()) > 1  # figure 2b: the variance is too small


def test_the_study_writes_its_table_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalisation_error.draws, "__defaults__", (2,))
    errors = run(tmp_path)
    with (tmp_path / "normalisation_error.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(float(r["similarity"]), r["method"], float(r["error"])) for r in rows] == [(e.similarity, e.method, e.error) for e in errors]
    assert len(rows) == len(METHODS_SHOWN) * len(SIMILARITY)
    for name in ("normalisation_error.png", "normalised_points.png"):
        assert min(matplotlib.image.imread(tmp_path / name).shape[:2]) > 300
