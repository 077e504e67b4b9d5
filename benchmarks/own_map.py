"""Compare all methods in eleven regimes, each at its best learning rate: the map behind `fl-bn advise`.

    python benchmarks/own_map.py --output benchmarks/results/map/cells.csv

A cell is one run on the bundled digits. For every regime and method, the learning rates of ``START`` are tried first,
with three seeds of their own, and scored on validation samples. These are a fifth of every client's training data,
never test data. While the lowest or the highest rate tried is the best one, the next of ``RATES`` is tried, too. The
best rate is then run with twelve other seeds on all training data, and tested on the test data. Last come the pilots,
as `fl-bn advise --pilot` has them: plain BatchNorm and the three best methods, ten rounds at one rate, on validation samples.

The file has one line per cell, written as soon as the cell is done. Cells that the file has are not run again.

``accuracy`` is in percent after the last round; ``nan`` where training diverged.
"""

from __future__ import annotations

import csv
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import typer
from common import append

SHIFTS = "none,invert,dark,noise,blur"
COMMON: dict[str, Any] = {
    "dataset": "digits", "model": "digits-cnn-small", "clients": 10, "rounds": 30, "local-steps": 5, "batch-size": 32,
    "evaluate-every": 15, "pictures": False, "workers": 1,
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
METHODS = ("fedavg", "gn", "fedwon", "fbn", "fedbn", "silobn", "hbn", "fedtan", "fixbn")
OWN = {"fedwon": {"clip": "adaptive", "clip-limit": 0.01}}  # run-config keys that a method needs: its paper trains with this clip
RATES = (0.002, 0.006, 0.02, 0.06, 0.2, 0.6, 2.0, 6.0, 20.0)
START = (0.06, 0.2, 0.6)
RATE_SEEDS, SEEDS = (100, 101, 102), tuple(range(12))
SHARE = 0.2  # share of every client's training samples held out for validation while rates are tried
RATE, TEST, PILOT = "rate", "test", "pilot"
PILOT_ROUNDS, PILOT_RATE, PILOT_BEST = 10, 0.05, 3


class Place(NamedTuple):
    """Identify one cell.

    Attributes:
        phase: ``RATE``: a learning rate is tried on validation samples. ``TEST``: the best rate is tested. ``PILOT``: a pilot.
        regime: The name of the regime.
        method: The name of the method.
        seed: The seed.
        rate: The learning rate.
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
    own: dict[str, Any] = {"method": place.method, "seed": place.seed, "learning-rate": place.rate, **OWN.get(place.method, {})}
    short = {"rounds": PILOT_ROUNDS} if place.phase == PILOT else {}
    return {**COMMON, **REGIMES[place.regime], **own, **short, "validation-share": 0.0 if place.phase == TEST else SHARE}


def accuracies(lines: Accuracies, phase: str, regime: str, method: str) -> dict[tuple[int, float], float]:
    """Return (seed, learning rate) -> accuracy of the cells of a phase, a regime and a method; 0 where training diverged."""
    return {
        (place.seed, place.rate): 0.0 if math.isnan(value) else value
        for place, value in lines.items()
        if place[:3] == (phase, regime, method)
    }


def best_rate(lines: Accuracies, regime: str, method: str) -> tuple[float, bool]:
    """Return the learning rate with the highest mean accuracy on validation samples, and whether it is at the edge of those tried.

    Of several such rates, it is the lowest; 0 if none was tried.
    """
    found: dict[float, list[float]] = {}
    for (_, rate), value in sorted(accuracies(lines, RATE, regime, method).items()):
        found.setdefault(rate, []).append(value)
    best = max(sorted(found), key=lambda rate: fmean(found[rate]), default=0.0)
    return best, best in (min(found, default=0.0), max(found, default=0.0))


def missing(lines: Accuracies, regime: str, method: str) -> list[Place]:
    """Return the cells of a regime and a method that are to be run next; none if all are done."""
    tried = sorted({*START, *(rate for _, rate in accuracies(lines, RATE, regime, method))})
    best, _ = best_rate(lines, regime, method)
    below, above = RATES[: RATES.index(tried[0])][-1:], RATES[RATES.index(tried[-1]) + 1 :][:1]
    for rates in (tried, below if best == tried[0] else above if best == tried[-1] else ()):
        if cells := [place for rate in rates for seed in RATE_SEEDS if (place := Place(RATE, regime, method, seed, rate)) not in lines]:
            return cells
    return [place for seed in SEEDS if (place := Place(TEST, regime, method, seed, best)) not in lines]


def missing_pilots(lines: Accuracies, regime: str) -> list[Place]:
    """Return the pilots of a regime that are to be run, once all its methods were tested."""
    tested = {method: fmean(accuracies(lines, TEST, regime, method).values()) for method in METHODS}
    methods = (METHODS[0], *sorted(METHODS[1:], key=lambda method: -tested[method])[:PILOT_BEST])
    places = [Place(PILOT, regime, method, seed, PILOT_RATE) for method in methods for seed in RATE_SEEDS]
    return [place for place in places if place not in lines]


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
    regime: Annotated[list[str] | None, typer.Option(help="a regime to run, may be given several times; all without it")] = None,
) -> None:
    """Run the cells that ``--output`` lacks."""
    lines = read(output)

    def rows() -> Iterator[dict[str, Any]]:
        for name in regime or REGIMES:
            steps = [*(partial(missing, lines, name, method) for method in METHODS), partial(missing_pilots, lines, name)]
            for step in steps:
                while places := step():
                    for place in places:
                        lines[place] = run(place)
                        yield {**place._asdict(), "accuracy": lines[place]}

    append(output, rows(), FIELDS)


if __name__ == "__main__":
    typer.run(main)
