"""Compare all methods in eleven regimes, each at its best learning rate of three: the map behind `fl-bn advise`.

    python benchmarks/own_map.py --output benchmarks/results/map/cells.csv

A cell is one run on the bundled digits. For every regime and method, the three rates are tried first, with a seed of
their own, and scored on validation samples. These are a fifth of every client's training data, never test data. The
best rate is then run with three other seeds on all training data, and tested on the test data.

The file has one line per cell, written as soon as the cell is done. Cells that the file has are not run again.

``accuracy`` is in percent after the last round; ``nan`` where training diverged.
"""

from __future__ import annotations

import csv
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from common import append

SHIFTS = "none,invert,dark,noise,blur"
COMMON: dict[str, Any] = {
    "dataset": "digits", "model": "digits-cnn-small", "clients": 10, "rounds": 30, "local-steps": 5, "batch-size": 32,
    "evaluate-every": 15, "pictures": False,
}  # fmt: skip
SHIFTED = {"setup": "experiments.papers:Papers", "shifts": SHIFTS}
MILD = {"partition": "dirichlet", "partition-parameter": 0.3}
REGIMES: dict[str, dict[str, Any]] = {
    "IID": {"partition": "iid"},
    "Dirichlet 0.3": MILD,
    "Dirichlet 0.1": {"partition": "dirichlet", "partition-parameter": 0.1},
    "two classes": {"partition": "classes", "partition-parameter": 2.0},
    "one class": {"partition": "classes", "partition-parameter": 1.0},
    "five domains": {**SHIFTED, "partition": "domain"},
    "five domains, Dirichlet 0.1": {**SHIFTED, "partition": "domain-dirichlet", "partition-parameter": 0.1},
    "batch of 4": {**MILD, "batch-size": 4},
    "10 % take part": {**MILD, "clients": 40, "fraction": 0.1},
    "1 local step": {**MILD, "local-steps": 1},
    "20 local steps": {**MILD, "local-steps": 20},
}
METHODS = ("fedavg", "gn", "fbn", "fedbn", "silobn", "hbn", "fedtan", "fixbn")
RATES = (0.02, 0.06, 0.2)
RATE_SEED, SEEDS = 10, (0, 1, 2)
SHARE = 0.2  # share of every client's training samples held out for validation while rates are tried
RATE, TEST = "rate", "test"


class Place(NamedTuple):
    """Identify one cell.

    Attributes:
        phase: ``RATE``: a learning rate is tried on validation samples. ``TEST``: the best rate is tested.
        regime: The name of the regime.
        method: The name of the method.
        seed: The seed.
        rate: The learning rate; 0 if the best rate is not known yet.
    """

    phase: str
    regime: str
    method: str
    seed: int
    rate: float


FIELDS = (*Place._fields, "accuracy")
Accuracies = Mapping[Place, float]
"""Cell -> its accuracy; NaN: training diverged."""


def keys(place: Place) -> dict[str, Any]:
    """Return the run-config keys of a cell."""
    own: dict[str, Any] = {"method": place.method, "seed": place.seed, "learning-rate": place.rate}
    if place.method == "hbn":
        own["hbn-stat-samples"] = 0  # the default when the first cells ran
    return {**COMMON, **REGIMES[place.regime], **own, "validation-share": SHARE if place.phase == RATE else 0.0}


def cells(lines: Accuracies) -> Iterator[Place]:
    """Yield every cell in the order in which the cells are run: with each regime and method the rates first.

    Args:
        lines: The finished cells. The cells that test the best rate have the rate 0 until all rates were tried.
    """
    for regime, method in product(REGIMES, METHODS):
        yield from (Place(RATE, regime, method, RATE_SEED, rate) for rate in RATES)
        yield from (Place(TEST, regime, method, seed, best_rate(lines, regime, method)) for seed in SEEDS)


def best_rate(lines: Accuracies, regime: str, method: str) -> float:
    """Return the learning rate with the highest accuracy on validation samples; the lowest such rate if several are equal.

    Returns:
        The rate; 0 if one of the rates was not tried yet.
    """
    tried = {rate: lines.get(Place(RATE, regime, method, RATE_SEED, rate)) for rate in RATES}
    found = {rate: accuracy for rate, accuracy in tried.items() if accuracy is not None}
    if len(found) < len(RATES):
        return 0.0
    return max(found, key=lambda rate: -math.inf if math.isnan(found[rate]) else found[rate])


def run(place: Place) -> float:
    """Run one cell; return its accuracy. A run that fails because its weights are not finite has none (NaN)."""
    from fl_bn.app.assembly import limit_threads
    from fl_bn.app.config import RunConfig
    from fl_bn.app.sweep.cells import Cell, run_cell
    from fl_bn.flower import RunFailed

    logging.getLogger("flwr").setLevel(logging.ERROR)
    limit_threads(1)
    with tempfile.TemporaryDirectory(prefix="own-map-") as folder:
        cell = Cell(RunConfig.from_mapping({**keys(place), "output": folder, "name": "cell"}), place._asdict())
        try:
            run_cell(cell)
        except RunFailed as error:
            print(f"{place}: {error}", flush=True)
        reached = {row["round"]: 100 * row["accuracy"] for row in cell.rows() if row.get("accuracy") is not None}
    return round(float(reached.get(cell.config.rounds, math.nan)), 2)


def read(path: Path) -> dict[Place, float]:
    """Return the cells in a results file, each with its accuracy; an empty dict if the file does not exist."""
    lines = csv.DictReader(path.read_text().splitlines() if path.exists() else [])
    return {
        Place(row["phase"], row["regime"], row["method"], int(row["seed"]), float(row["rate"])): float(row["accuracy"]) for row in lines
    }


def main(
    output: Annotated[Path, typer.Option(help="CSV file of the results; missing cells are run and appended")],
) -> None:
    """Run the cells that ``--output`` lacks."""
    lines = read(output)

    def rows() -> Iterator[dict[str, Any]]:
        for place in cells(lines):  # lazily, so that the tests use the rates tried meanwhile
            if place not in lines:
                lines[place] = run(place)
                yield {**place._asdict(), "accuracy": lines[place]}

    append(output, rows(), FIELDS)


if __name__ == "__main__":
    typer.run(main)
