"""FBN normalises as centralised running statistics do, whatever the heterogeneity; naive BN and FixBN do not, by known amounts."""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib.image
import pytest
import torch

from fl_bn.experiments.programs import normalisation_error
from fl_bn.experiments.programs.normalisation_error import CENTRALISED, FBN, FIXBN, HETEROGENEITY, NAIVE, RUNNING, expected, normalised, run
from fl_bn.federation.settings import seeded


def error(points: dict[str, torch.Tensor], method: str) -> float:
    return float((points[method] - points[CENTRALISED]).square().mean())


def test_fbn_is_centralised_and_the_others_err_as_derived() -> None:
    found = {h: normalised(h, 200, seeded(1)) for h in (0.0, 1.0, 3.0)}
    for h, points in found.items():
        assert torch.allclose(points[FBN], points[RUNNING], rtol=0, atol=1e-12)  # exactly, at any heterogeneity
        assert error(points, FBN) < 0.02
        for method in (NAIVE, FIXBN):
            assert error(points, method) == pytest.approx(expected(h)[method], rel=0.15, abs=0.05)
    assert expected(1.0)[FIXBN] == pytest.approx(0.1716, abs=1e-4)  # (sqrt 2 - 1)^2
    assert expected(1.0)[NAIVE] == pytest.approx(0.5858, abs=1e-4)  # 2 - sqrt 2
    for method in (NAIVE, FIXBN):  # control: neither is centralised, and both get worse
        errors = [error(found[h], method) for h in (0.0, 1.0, 3.0)]
        assert errors == sorted(errors)
        assert errors[-1] > 100 * error(found[3.0], FBN)
    assert torch.allclose(found[0.0][FIXBN], found[0.0][RUNNING], atol=0.05)  # control: among clients alike, averaging is enough


def test_the_study_writes_its_table_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalisation_error, "ROUNDS", 2)
    monkeypatch.setattr(normalisation_error.normalised, "__defaults__", (2,))
    errors = run(tmp_path)
    with (tmp_path / "normalisation_error.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(float(r["heterogeneity"]), r["method"], float(r["error"])) for r in rows] == [
        (e.heterogeneity, e.method, e.error) for e in errors
    ]
    assert len(rows) == 4 * len(HETEROGENEITY)
    for name in ("normalisation_error.png", "normalised_points.png"):
        assert min(matplotlib.image.imread(tmp_path / name).shape[:2]) > 300
