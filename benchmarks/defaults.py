"""Compare every method's defaults with plain averaging, over kinds of skew, local steps and lengths of the run.

    python benchmarks/defaults.py --output benchmarks/results/defaults/grid.csv --data ../shared/data
    python benchmarks/defaults.py --table benchmarks/results/defaults

A cell is one run: a choice of data, kind of skew, method, local steps, rounds and seed. All other run-config keys have
their defaults. The file has one line per cell, written as soon as the cell is done. Cells that are in the file are not
run again.

Columns: ``at_freeze`` is the accuracy after half of the rounds, where FixBN freezes; ``lowest`` is the lowest
accuracy afterwards; ``seconds`` is processor time, and empty for some older lines.
``growth`` tells how far standard deviations rise. In each evaluated round, each layer's standard deviation (geometric
mean over channels) is divided by its lowest value so far; ``growth`` is the largest of these ratios. It is 1 for a
method that shares no statistics.
"""

from __future__ import annotations

import csv
import itertools
import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from common import append, shown, table
from torch import nn

CENTRALISED = "centralised"
METHODS = ("fedavg", "fixbn", "hbn", "fbn", "fedtan2", "gn", "fedtan", "fedbn", "silobn", "static-bn", CENTRALISED)
REGIMES: dict[str, dict[str, Any]] = {
    "IID": {"partition": "iid"},
    "Dirichlet 0.1": {"partition": "dirichlet", "partition-parameter": 0.1},
    "two classes": {"partition": "classes", "partition-parameter": 2.0},
    "one class": {"partition": "classes", "partition-parameter": 1.0},
    "site shift": {"partition": "domain", "shifts": "none,invert,dark,noise,blur"},
}
DATA: dict[str, dict[str, Any]] = {
    "digits": {"dataset": "digits"},
    "CIFAR-10 subset": {
        "dataset": "npz",
        "data-path": "{data}/cifar10.npz",
        "image-size": 16,
        "samples-per-domain": 2000,
        "model": "simple-cnn",
    },
}
STEPS, ROUNDS, SEEDS = (5, 20, 1), (25, 100), (0, 1, 2)
EVERY = {25: 2, 100: 5}  # rounds of the run -> rounds between evaluations; half of the rounds is a multiple
KEY = ("data", "regime", "method", "steps", "rounds", "seed")
FIELDS = (*KEY, "last", "at_freeze", "lowest", "growth", "curve", "seconds")
MARGIN = 2.0  # points by which a method may be behind FedAvg
CHANCE = 10.0  # percent: all data sets have ten classes
Key = tuple[str, str, str, int, int, int]
Row = dict[str, str]


def cells() -> Iterator[Key]:
    """Yield every cell once; the first seed of all comes before the others."""
    for seed, data, rounds, steps, regime, method in itertools.product(SEEDS, DATA, ROUNDS, STEPS, REGIMES, METHODS):
        yield data, regime, method, steps, rounds, seed


def cell(key: Key, folder: str) -> dict[str, Any]:
    """Run one cell; return its line of the CSV file, column -> value. ``folder`` has cifar10.npz."""
    from fl_bn.run.assembly import limit_threads
    from fl_bn.run.config import RunConfig

    logging.getLogger("flwr").setLevel(logging.ERROR)
    limit_threads(1)
    data, regime, method, steps, rounds, seed = key
    keys = {name: str(value).format(data=folder) if name == "data-path" else value for name, value in DATA[data].items()}
    axes = {"local-steps": steps, "rounds": rounds, "seed": seed, "evaluate-every": EVERY[rounds], "output": ""}
    config = RunConfig.from_mapping({**keys, **REGIMES[regime], **axes, "method": "fedavg" if method == CENTRALISED else method})
    begin = time.process_time()
    curve, growth = _centralised(config) if method == CENTRALISED else _federated(config)
    after = [value for round, value in curve if round > rounds // 2]
    at_freeze = next((value for round, value in curve if round == rounds // 2), float("nan"))
    lowest, last = (min(after), after[-1]) if after and curve[-1][0] == rounds else (float("nan"), float("nan"))
    values = json.dumps([value for _, value in curve])
    line = (*key, last, at_freeze, lowest, round(growth, 2), values, round(time.process_time() - begin, 1))
    return dict(zip(FIELDS, line, strict=True))


def _federated(config: Any) -> tuple[list[tuple[int, float]], float]:
    """Run one federation.

    Returns:
        The curve, a pair (round, accuracy in %) for each evaluated round; and ``growth``, as the module defines it.
    """
    from client_app.app import app
    from fl_bn.federation.aggregation import running_statistics
    from fl_bn.federation.callbacks import Callback
    from fl_bn.federation.recalibration import epsilons
    from fl_bn.flower import BatchNormStrategy, InProcessGrid, RunFailed
    from fl_bn.run.assembly import source_model
    from fl_bn.run.testing import test_metrics

    curve: list[tuple[int, float]] = []
    deviations: list[torch.Tensor] = []

    class Curve(Callback):
        def on_evaluation(self, record: Any, rounds: int) -> None:
            curve.append((record.round, round(100 * record.evaluation["accuracy"], 1)))

    def evaluate(model: nn.Module) -> dict[str, float]:
        statistics, eps = running_statistics(model), epsilons(model)
        if statistics:
            deviations.append(torch.stack([(running.var.double() + eps[name]).log().mean() / 2 for name, running in statistics.items()]))
        return test_metrics(config, model, torch.device("cpu"))

    method = config.build_method()
    own = None if method.personal else evaluate
    strategy = BatchNormStrategy(source_model(config), method, config.round_policy(), evaluate=own, callbacks=[Curve()])
    with suppress(RunFailed):
        strategy.start(InProcessGrid(app, config.clients, config.to_mapping()), num_rounds=config.rounds)
    if not deviations:
        return curve, 1.0
    logs = torch.stack(deviations)
    return curve, float((logs - logs.cummin(0).values).max().exp())


def _centralised(config: Any) -> tuple[list[tuple[int, float]], float]:
    from fl_bn.run.centralised import run_centralised

    records = [record for record in run_centralised(config).records if record.evaluation]
    return [(record.round, round(100 * record.evaluation["accuracy"], 1)) for record in records], 1.0


def read(path: Path) -> dict[Key, Row]:
    """Return the cells in a results file, each with its line; an empty dict if the file does not exist."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {key_of(row): row for row in csv.DictReader(file)}


def key_of(row: Row) -> Key:
    """Return the cell to which a line of the file belongs."""
    return row["data"], row["regime"], row["method"], int(row["steps"]), int(row["rounds"]), int(row["seed"])


def tables(rows: dict[Key, Row]) -> str:
    """Return the results as Markdown: the summary, and a table for each data set, number of rounds and number of local steps."""
    lines = [summary(rows)]
    for data, rounds, steps in itertools.product(DATA, ROUNDS, STEPS):
        found = [row for key, row in rows.items() if (key[0], key[4], key[3]) == (data, rounds, steps)]
        if not found:
            continue
        seeds = sorted({int(row["seed"]) for row in found})
        lines += [f"## {data}, {rounds} rounds of {steps} local step{'s' * (steps > 1)}", "", f"Seeds: {', '.join(map(str, seeds))}.", ""]
        cells = []
        for method in METHODS:
            said = [method]
            for regime in REGIMES:
                own = [row for row in found if (row["method"], row["regime"]) == (method, regime)]
                last, lowest = ([float(row[name]) for row in own] for name in ("last", "lowest"))
                growth = max((float(row["growth"]) for row in own), default=1.0)
                said.append(f"{shown(last)}; {min(lowest):.1f}; {growth:.2f}" if own else "-")
            cells.append(said)
        lines += [*table(["method", *REGIMES], cells), ""]
    return "\n".join(lines[:-1]) + "\n"


def summary(rows: dict[Key, Row]) -> str:
    """Return a Markdown table that counts, for each method, the cells with a poor accuracy.

    Three counts are shown: cells that end more than ``MARGIN`` points behind FedAvg, cells that fall more than ``MARGIN``
    points below their accuracy at the freeze, and cells that end within 5 points of the accuracy of guessing.
    """
    lines = [
        "# Every method as it is by default",
        "",
        "In each cell: last accuracy (%, mean over seeds and standard deviation); lowest after half of the rounds; largest growth of a "
        "layer's deviation. Made by `benchmarks/defaults.py`.",
        "",
    ]
    head = ["method", "cells", f"IID: more than {MARGIN:g} behind FedAvg", "other regimes: the same"]
    head += [f"lowest after half is more than {MARGIN:g} below the level there", "within 5 points of chance (FedAvg too)"]
    found = []
    for method in METHODS:
        told: dict[str, list[bool]] = defaultdict(list)
        both = 0
        for key, row in rows.items():
            plain = rows.get((key[0], key[1], "fedavg", *key[3:]))
            if key[2] != method or plain is None:
                continue
            last, base = float(row["last"]), float(plain["last"])
            told["iid" if key[1] == "IID" else "other"].append(not last >= base - MARGIN)
            told["fell"].append(not float(row["lowest"]) >= float(row["at_freeze"]) - MARGIN)
            told["chance"].append(not last >= CHANCE + 5)
            both += not last >= CHANCE + 5 and not base >= CHANCE + 5
        if told:
            counts = [f"{sum(told[name])} of {len(told[name])}" for name in ("iid", "other", "fell")]
            found.append([method, str(len(told["chance"])), *counts, f"{sum(told['chance'])} ({both})"])
    return "\n".join([*lines, *table(head, found), ""])


def main(
    output: Annotated[Path | None, typer.Option(help="CSV file of the results; missing cells are run and appended")] = None,
    data: Annotated[str, typer.Option(help="folder that has cifar10.npz")] = "../shared/data",
    seconds: Annotated[float, typer.Option(help="begin no new cell after this many seconds")] = float("inf"),
    table_of: Annotated[Path | None, typer.Option("--table", help="folder with grid.csv; table.md is written there")] = None,
) -> None:
    """Run the cells that ``--output`` lacks, or write the tables of finished cells with ``--table``."""
    if table_of is not None:
        (table_of / "table.md").write_text(tables(read(table_of / "grid.csv")))
    if output is not None:
        done = read(output)
        append(output, (cell(key, data) for key in cells() if key not in done), FIELDS, seconds)


if __name__ == "__main__":
    typer.run(main)
