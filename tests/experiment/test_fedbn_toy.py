"""FedBN's toy problem: with BatchNorm the clients' best weights are one, and without they are not."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from experiments.definitions.programs import fedbn_toy


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedbn_toy, "POINTS", 24)


def test_batchnorm_makes_the_clients_weights_one_that_can_be_averaged(tmp_path: Path) -> None:
    found = fedbn_toy.harmonised(tmp_path)
    one, other, error = found["with BN"]
    assert one == pytest.approx(fedbn_toy.TRUE, rel=0.1)
    assert other == pytest.approx(fedbn_toy.TRUE, rel=0.1)
    assert error < 0.05
    one, other, error = found["without BN"]  # control
    assert one > 2 * other
    assert error > 0.3
    with (tmp_path / "fedbn_toy.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert {(line["inputs"], line["client"]) for line in lines} == {(name, n) for name in found for n in "01"}
    assert (tmp_path / "fedbn_toy.png").stat().st_size > 10_000


def test_a_mean_weight_does_well_with_the_client_s_own_scale_alone(tmp_path: Path) -> None:
    found = fedbn_toy.surface(tmp_path)
    assert found["mean w, own gamma"] == pytest.approx(found["own"], abs=0.02)
    assert found["mean w, mean gamma"] > 10 * found["own"]
    assert (tmp_path / "fedbn_surface.png").stat().st_size > 10_000
