"""Draw the pictures in benchmarks/results/ again from the numbers in the same folders, after a change of palette or
layout.

    python benchmarks/redraw.py

``comparison.png`` is drawn from curves.csv. The heat maps of attack-grid and the bars of unseen-domain are drawn from
table.csv.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from fl_bn.run.pictures import draw_bars, draw_comparison, draw_heat_maps, which_end

RESULTS = Path(__file__).parent / "results"
MAPS = {"last": ("worst last", "after the last round"), "best": ("worst best-over-time", "in the best round")}
MEAN_STD = re.compile(r"([\d.]+) \(([\d.]+)\)")


def main(
    results: Annotated[Path, typer.Option(help="folder of the numbers")] = RESULTS,
    output: Annotated[Path, typer.Option(help="folder of the pictures; default: beside the numbers")] = RESULTS,
) -> None:
    """Draw all pictures."""
    for picture in (*comparisons(results, output), *heat_maps(results, output), bars(results, output)):
        print(picture)


def comparisons(results: Path, output: Path) -> Iterator[Path]:
    """Draw ``comparison.png`` of every folder with a curves.csv."""
    for numbers in sorted(results.glob("*/curves.csv")):
        values, rounds = curves(numbers)
        picture = _made(output / numbers.parent.name) / "comparison.png"
        draw_comparison(values, rounds, title(numbers.parent), picture)
        yield picture


def curves(numbers: Path) -> tuple[dict[str, np.ndarray], dict[str, list[int]]]:
    """Read a curves.csv.

    Returns:
        Method -> accuracies in percent, of shape (seeds, evaluations); and method -> its evaluated rounds.
    """
    seeds: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in _rows(numbers):
        seeds.setdefault(row["method"], {}).setdefault(row["seed index"], []).append((int(row["round"]), float(row["accuracy"])))
    values = {method: np.array([[value for _, value in points] for points in runs.values()]) for method, runs in seeds.items()}
    return values, {method: [round for round, _ in next(iter(runs.values()))] for method, runs in seeds.items()}


def heat_maps(results: Path, output: Path) -> Iterator[Path]:
    """Draw the heat maps of the attack grid: methods side by side, a row per rule, a column per heterogeneity."""
    rows = _rows(results / "attack-grid" / "table.csv")
    axes = ("method", "rule", "heterogeneity", "f")
    methods, rules, heterogeneity, counts = (list(dict.fromkeys(row[axis] for row in rows)) for axis in axes)
    for f in counts:
        for name, (column, words) in MAPS.items():
            maps = {method: np.full((len(rules), len(heterogeneity)), np.nan) for method in methods}
            for row in rows:
                if row["f"] == f and row[column] != "-":
                    maps[row["method"]][rules.index(row["rule"]), heterogeneity.index(row["heterogeneity"])] = float(row[column])
            picture = _made(output / "attack-grid") / f"heat-map-f{f}-{name}.png"
            heading = f"{title(results / 'attack-grid')}\nf = {f}: accuracy {words} under the worst attack (%)"
            draw_heat_maps(maps, rules, heterogeneity, heading, picture, which_end("similarity", [float(h) for h in heterogeneity]))
            yield picture


def bars(results: Path, output: Path) -> Path:
    """Draw the bars of the held-out domains; return the file.

    The table has only means and standard deviations, but ``draw_bars`` takes one value per seed. So it gets three values
    with the same mean and standard deviation.

    Raises:
        ValueError: A cell of the table is not of the form MEAN (DEVIATION).
    """
    panels: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in _rows(results / "unseen-domain" / "table.csv"):
        held_out = row.pop("held out")
        groups = panels.setdefault("mean of the five" if held_out == "mean" else f"held out: {held_out}", {})
        made = groups.setdefault(row.pop("method"), {})
        row.pop("known domains")
        for how, text in row.items():
            match = MEAN_STD.fullmatch(text)
            if match is None:
                raise ValueError(f"unseen-domain/table.csv: expected MEAN (DEVIATION) for {how!r}, but got {text!r}")
            mean, deviation = float(match[1]), float(match[2])
            made[how] = [mean - deviation, mean, mean + deviation]
    picture = _made(output / "unseen-domain") / "unseen_domain.png"
    draw_bars(panels, picture)
    return picture


def title(folder: Path) -> str:
    """Return the first words of the folder's table.md, which name the measurement."""
    return (folder / "table.md").read_text(encoding="utf-8").partition(". Test ")[0]


def _rows(numbers: Path) -> list[dict[str, str]]:
    with numbers.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    typer.run(main)
