"""Measure how far the choice of `fl-bn advise --pilot` is behind the best method of each regime.

    python benchmarks/own_map_pilots.py --output benchmarks/results/map/pilots.csv

The pilot is run in every regime of the map that has results. It compares the methods that the map proposes (with
``--all``: all methods), each at its best rate. The data are partitioned by a seed that the map does not use.

``chosen`` is the method that the pilot chooses, ``best`` the best one of the map. ``behind`` is the difference of their
accuracies in the map, in points. The file has one line per regime, written as soon as the regime is done. Regimes that
are in the file are not run again.
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
    """Run the pilot in one regime; return the regime's line of the CSV file.

    Args:
        regime: The regime.
        every: Compare all methods, not only those that the map proposes.
    """
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
    output: Annotated[Path, typer.Option(help="CSV file of the results; missing regimes are run and appended")],
    every: Annotated[bool, typer.Option("--all", help="compare all methods, not only those that the map proposes")] = False,
) -> None:
    """Run the pilot in every regime that the CSV file lacks."""
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
