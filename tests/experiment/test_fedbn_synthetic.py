"""FedBN learns faster than FedAvg where features differ between clients, and not where they do not."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.definitions.programs import fedbn_synthetic
from experiments.definitions.programs.fedbn_synthetic import DIMENSIONS, PAPER, SMALL, WIDTH, Setting, gaussians, losses
from fl_bn.federation.settings import seeded
from fl_bn.task import CLASSIFICATION


def after(method: str, shift: float, setting: Setting) -> float:
    clients = [setting.make(setting.samples, shift * client, seeded(0, client)) for client in range(2)]
    return losses(method, clients, setting, seed=0)[-1]


def test_fedbn_gains_by_feature_shift_alone() -> None:
    setting = replace(SMALL, steps=50)
    assert after("fedbn", 1.0, setting) < 0.7 * after("fedavg", 1.0, setting)
    assert after("fedbn", 0.0, setting) == pytest.approx(after("fedavg", 0.0, setting), rel=0.1)  # control


def test_the_paper_s_setting_is_that_of_appendix_f() -> None:
    assert (PAPER.steps, PAPER.rate, PAPER.deviation, PAPER.outputs, WIDTH, DIMENSIONS) == (600, 1e-5, 10.0, 2, 100, 10)
    assert PAPER.task is CLASSIFICATION
    first, second = (PAPER.make(4000, shift, np.random.default_rng(0)) for shift in (0.0, 1.0))
    for samples, covariance in ((first, 0.0), (second, 0.25)):  # half of the second client's samples are correlated by a half
        noise = samples.x - (2 * samples.y - 1)[:, None]
        assert noise.std(0).tolist() == pytest.approx([1.0] * 10, abs=0.05)
        assert float(np.cov(noise.numpy().T)[0, 1:].mean()) == pytest.approx(covariance, abs=0.05)


def test_the_clients_differ_in_shape_alone() -> None:
    near, far = (gaussians(4000, shift, np.random.default_rng(0)) for shift in (0.0, 1.0))
    for samples, deviation in ((near, 1.0), (far, 4.0)):
        assert samples.y.tolist() == [0, 1] * 2000
        signed = samples.x * (2 * samples.y - 1)[:, None]
        assert float(signed[:, -1].mean()) == pytest.approx(deviation, abs=0.15 * deviation)
        assert float(signed[:, -1].std()) == pytest.approx(deviation, rel=0.1)
    correlations = [float(np.corrcoef((s.x * (2 * s.y - 1)[:, None])[:, :2].T)[0, 1]) for s in (near, far)]
    assert correlations == pytest.approx([0, 0.25], abs=0.05)


def test_the_study_writes_its_table_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedbn_synthetic, "losses", lambda method, clients, setting, seed: [1.0, 0.5 + seed])
    rows = fedbn_synthetic.run(tmp_path)
    with (tmp_path / "fedbn_synthetic.csv").open(newline="") as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == [row.loss for row in rows]
    assert {(row.method, row.seed, row.step) for row in rows} == {(m, s, k) for m in ("fedavg", "fedbn") for s in (0, 1) for k in (0, 1)}
    assert (tmp_path / "fedbn_synthetic.png").stat().st_size > 10_000
