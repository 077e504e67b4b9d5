"""The committed pictures of benchmarks/results/ are drawn from the committed numbers."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
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


def test_bars_have_the_means_and_deviations_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[dict[str, dict[str, dict[str, list[float]]]]] = []
    monkeypatch.setattr(redraw, "draw_bars", lambda panels, picture: drawn.append(panels))
    redraw.bars(redraw.RESULTS, tmp_path)
    (panels,) = drawn
    before = panels["held out: USPS"]["FedBN"]["before"]
    with (redraw.RESULTS / "unseen-domain" / "table.csv").open(newline="") as file:
        (said,) = (row["before"] for row in csv.DictReader(file) if (row["held out"], row["method"]) == ("USPS", "FedBN"))
    assert f"{np.mean(before):.1f} ({np.std(before, ddof=1):.1f})" == said
    assert len(panels) == 6  # five domains and their mean: no half-empty row


def test_what_has_no_deviation_is_refused(tmp_path: Path) -> None:
    shutil.copytree(redraw.RESULTS / "unseen-domain", tmp_path / "unseen-domain")
    table = tmp_path / "unseen-domain" / "table.csv"
    table.write_text(redraw.MEAN_STD.sub("-", table.read_text(), count=2))
    with pytest.raises(ValueError, match="expected MEAN"):
        redraw.bars(tmp_path, tmp_path / "pictures")


def test_heat_maps_have_the_numbers_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, tuple[dict[str, np.ndarray], list[str], list[str]]] = {}
    monkeypatch.setattr(redraw, "draw_heat_maps", lambda maps, rows, columns, _, path, __: drawn.update({path.name: (maps, rows, columns)}))
    assert len(list(redraw.heat_maps(redraw.RESULTS, tmp_path))) == 2
    with (redraw.RESULTS / "attack-grid" / "table.csv").open(newline="") as file:
        said = list(csv.DictReader(file))
    for name, column in (("heat-map-f3-last.png", "worst last"), ("heat-map-f3-best.png", "worst best-over-time")):
        maps, rows, columns = drawn[name]
        for row in said:
            assert maps[row["method"]][rows.index(row["rule"]), columns.index(row["heterogeneity"])] == float(row[column])
    assert not np.array_equal(drawn["heat-map-f3-last.png"][0]["fbn"], drawn["heat-map-f3-best.png"][0]["fbn"])  # the control
