"""FedBN learns faster than FedAvg where features differ between clients, and not where they do not."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from fl_bn.experiments.programs import fedbn_synthetic
from fl_bn.experiments.programs.fedbn_synthetic import gaussians, losses
from fl_bn.federation.settings import seeded


def after(method: str, shift: float) -> float:
    clients = [gaussians(200, shift * client, seeded(0, client)) for client in range(2)]
    return losses(method, clients, 50, seed=0)[-1]


def test_fedbn_gains_by_feature_shift_alone() -> None:
    assert after("fedbn", 1.0) < 0.7 * after("fedavg", 1.0)
    assert after("fedbn", 0.0) == pytest.approx(after("fedavg", 0.0), rel=0.1)  # control


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
    monkeypatch.setattr(fedbn_synthetic, "losses", lambda method, clients, steps, seed: [1.0, 0.5 + seed])
    rows = fedbn_synthetic.run(tmp_path)
    with (tmp_path / "fedbn_synthetic.csv").open(newline="") as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == [row.loss for row in rows]
    assert {(row.method, row.seed, row.step) for row in rows} == {(m, s, k) for m in ("fedavg", "fedbn") for s in (0, 1) for k in (0, 1)}
    assert (tmp_path / "fedbn_synthetic.png").stat().st_size > 10_000
