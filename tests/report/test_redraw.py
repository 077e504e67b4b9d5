"""The committed pictures of benchmarks/results/ are drawn from the committed numbers."""

from __future__ import annotations

import csv

import pytest

from tests.scripts import script

redraw = script("benchmarks/redraw.py")


@pytest.mark.parametrize("name", ["main-job", "classes-2", "dirichlet-0.1", "fedtan"])
def test_the_curves_end_where_the_table_says(name: str) -> None:
    values, rounds = redraw.curves(redraw.RESULTS / name / "curves.csv")
    with (redraw.RESULTS / name / "table.csv").open(newline="") as file:
        said = {row["method"]: float(row["last mean"]) for row in csv.DictReader(file)}
    assert {method: len(rounds[method]) for method in values} == {method: runs.shape[1] for method, runs in values.items()}
    assert {method: runs[:, -1].mean() for method, runs in values.items()} == pytest.approx(said, abs=1e-3)
    earlier = {method: runs[:, 0].mean() for method, runs in values.items()}  # the control: another round's numbers do not fit
    assert earlier != pytest.approx(said, abs=1e-3)
