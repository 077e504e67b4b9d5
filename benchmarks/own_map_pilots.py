"""Measure how far the choice of `fl-bn advise --pilot` is behind the best method of each regime.

    python benchmarks/own_map_pilots.py --output benchmarks/results/map/pilots.csv

In every regime of the map that has runs, the map's candidates (with ``--all``: all methods), each at its best rate,
are tried as the pilot tries them. The data are partitioned by a seed that the map does not use. ``chosen`` and
``best`` are methods; ``behind`` is the difference of their accuracies in the map, in points. The file has one line
per regime, written as soon as the regime is done. Regimes that the file has are not tried again.
"""

from __future__ import annotations

import csv
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parent))
from own_map import TEST, Place, keys

from fl_bn.advise.pilot import pilot_cells, result, successive_halving
from fl_bn.advise.regimes import Regime, candidates, load
from fl_bn.run.assembly import limit_threads
from fl_bn.sweep.cells import run_cell
from fl_bn.task import CLASSIFICATION

SEED = 11  # a seed that the map does not use
FIELDS = ("regime", "candidates", "chosen", "best", "behind", "rungs")


def tried(regime: Regime, *, every: bool) -> dict[str, str]:
    """Try the candidates in one regime; return a line of the file."""
    names = regime.methods if every else candidates(regime, regime.methods)
    labels = {f"{name}:learning-rate={regime.rates[name]}": name for name in names}
    base = {**keys(Place(TEST, regime.name, names[0], SEED, regime.rates[names[0]]))}
    with tempfile.TemporaryDirectory(prefix="own-map-pilot-") as folder:

        def score(some: Sequence[str], rounds: int) -> Mapping[str, float]:
            cells = pilot_cells(some, rounds, base, Path(folder))
            for cell in cells:
                run_cell(cell)
            return {label: result(cell, CLASSIFICATION) for label, cell in zip(some, cells, strict=True)}

        rungs = successive_halving(list(labels), int(base["rounds"]), score)
    chosen, best = labels[rungs[-1].kept[0]], regime.methods[0]
    shown = "; ".join(
        f"{rung.rounds}: " + ", ".join(f"{labels[name]} {value:.1f}" for name, value in rung.scores.items()) for rung in rungs
    )
    behind = f"{regime.mean(best) - regime.mean(chosen):.1f}"
    return dict(zip(FIELDS, (regime.name, " ".join(names), chosen, best, behind, shown), strict=True))


def main(
    output: Annotated[Path, typer.Option(help="CSV file to write or go on with")],
    every: Annotated[bool, typer.Option("--all", help="try all methods, not only the map's candidates")] = False,
) -> None:
    """Try the regimes that the file lacks."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    limit_threads(1)
    done: set[str] = set()
    if output.exists():
        with output.open(newline="") as file:
            done = {row["regime"] for row in csv.DictReader(file)}
    with output.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if not done:
            writer.writeheader()
        for regime in load():
            if regime.name not in done:
                row = tried(regime, every=every)
                writer.writerow(row)
                file.flush()
                print(row, flush=True)


if __name__ == "__main__":
    typer.run(main)
