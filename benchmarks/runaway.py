"""Measure whether the scale of activations keeps growing: HBN and FBN, over data, local steps and learning rates.

    python benchmarks/runaway.py --output benchmarks/results/runaway/after.csv --data ../shared/data
    python benchmarks/runaway.py --table benchmarks/results/runaway        # before.csv and after.csv as one table

The file has one line per cell, written as soon as the cell is done. Cells that the file has are not run again.
``growth`` is the largest factor by which a layer's standard deviation (geometric mean over channels) rose above its
lowest earlier value, over the evaluated rounds. Only keys that every version of fl-bn has are used, so that
PYTHONPATH may name an older checkout.
"""

from __future__ import annotations

import csv
import itertools
import json
import logging
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

METHODS = ("fedavg", "hbn", "fbn")
ROUNDS = {1: (100, 5), 5: (60, 3), 20: (30, 2)}  # local steps -> rounds, and rounds between evaluations
RATES = (0.01, 0.05)
CHANCE = 10.0  # percent: all data sets have ten classes
BASE = {"learning-rate-schedule": "step", "learning-rate-decay": 0.3, "momentum": 0.9, "output": ""}
DATA: dict[str, dict[str, Any]] = {
    "digits, one class each": {"dataset": "digits", "partition": "classes", "partition-parameter": 1.0},
    "digits, IID": {"dataset": "digits", "partition": "iid"},
    "CIFAR-10 subset, two classes each": {
        "dataset": "npz",
        "data-path": "{data}/cifar10.npz",
        "image-size": 16,
        "samples-per-domain": 2000,
        "partition": "classes",
        "partition-parameter": 2.0,
        "model": "simple-cnn",
    },
    "five domains": {
        "dataset": "digits-five",
        "data-path": "{data}",
        "image-size": 16,
        "samples-per-domain": 743,
        "partition": "domain",
        "clients": 5,
    },
}
FIELDS = ("data", "method", "steps", "rate", "last", "best", "growth", "curve", "seconds")


def cell(data: str, method: str, steps: int, rate: float, folder: str) -> dict[str, Any]:
    """Train with one method, number of local steps and learning rate; return the cell's line of the CSV file.

    The line has the accuracy (%) at the last and at the best evaluation, and the growth.

    Args:
        data: The name of the data set, a key of ``DATA``.
        method: The name of the method.
        steps: The local steps per round.
        rate: The learning rate.
        folder: The folder of the data.
    """
    from client_app.app import app
    from fl_bn.federation.aggregation import running_statistics
    from fl_bn.federation.recalibration import epsilons
    from fl_bn.flower import BatchNormStrategy, InProcessGrid, RunFailed
    from fl_bn.run.assembly import limit_threads, source_model
    from fl_bn.run.config import RunConfig
    from fl_bn.run.testing import test_metrics

    logging.getLogger("flwr").setLevel(logging.ERROR)
    limit_threads(1)
    rounds, every = ROUNDS[steps]
    keys = {key: str(value).format(data=folder) if key == "data-path" else value for key, value in DATA[data].items()}
    axes = {"method": method, "local-steps": steps, "learning-rate": rate, "rounds": rounds, "evaluate-every": every}
    config = RunConfig.from_mapping({**BASE, **keys, **axes})
    curve: list[float] = []
    deviations: list[torch.Tensor] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        metrics = test_metrics(config, model, torch.device("cpu"))
        curve.append(round(100 * metrics["accuracy"], 1))
        statistics, eps = running_statistics(model), epsilons(model)
        deviations.append(torch.stack([(running.var.double() + eps[name]).log().mean() / 2 for name, running in statistics.items()]))
        return metrics

    begin = time.perf_counter()
    strategy = BatchNormStrategy(source_model(config), config.build_method(), config.round_policy(), evaluate=evaluate)
    try:
        strategy.start(InProcessGrid(app, config.clients, config.to_mapping()), num_rounds=rounds)
    except RunFailed:
        curve.append(float("nan"))
    growth = 1.0
    if deviations:
        logs = torch.stack(deviations)
        growth = float((logs - logs.cummin(0).values).max().exp())
    best = max((value for value in curve if value == value), default=float("nan"))
    values = (data, method, steps, rate, curve[-1], best, round(growth, 2), json.dumps(curve), round(time.perf_counter() - begin))
    return dict(zip(FIELDS, values, strict=True))


def read(path: Path) -> dict[tuple[str, ...], dict[str, str]]:
    """Return the cells in a results file, each with its line; an empty dict if the file does not exist."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {tuple(row[field] for field in FIELDS[:4]): row for row in csv.DictReader(file)}


def summary(folder: Path) -> str:
    """Return a Markdown table with one line per data set and method, over all local steps and rates.

    Its numbers have the form BEFORE -> AFTER, from before.csv and after.csv in ``folder``.
    """
    head = "| data | method | cells | largest growth | largest fall: best - last | cells within 5 points of chance |"
    lines = [head, "|---|---|---:|---:|---:|---:|"]
    before, after = read(folder / "before.csv"), read(folder / "after.csv")
    for data, method in itertools.product(DATA, METHODS):
        columns = [_figures(data, method, rows) for rows in (before, after)]
        both = [" -> ".join(pair) if pair[0] else pair[1] for pair in zip(*columns, strict=True)]
        lines.append(f"| {data} | {method} | {' | '.join(both)} |")
    return "\n".join(lines) + "\n"


def _figures(data: str, method: str, rows: dict[tuple[str, ...], dict[str, str]]) -> list[str]:
    own = [row for row in rows.values() if (row["data"], row["method"]) == (data, method)]
    if not own:
        return [""] * 4
    falls = [float(row["best"]) - (0.0 if row["last"] == "nan" else float(row["last"])) for row in own]
    chance = sum(not float(row["last"]) >= CHANCE + 5 for row in own)
    return [str(len(own)), f"{max(float(row['growth']) for row in own):.2f}", f"{max(falls):.1f}", str(chance)]


def table(folder: Path) -> str:
    """Return as Markdown the summary, and a table with one line per cell: both versions' results, and FedAvg's accuracy."""
    before, after = read(folder / "before.csv"), read(folder / "after.csv")
    lines = [
        summary(folder),
        "| data | method | steps | rate | before: last (best) | growth | after: last (best) | growth | FedAvg + BN: last |",
        "|---|---|---:|---:|---|---:|---|---:|---:|",
    ]
    for key, row in after.items():
        if row["method"] != "fedavg":
            old, plain = before.get(key), after.get((key[0], "fedavg", *key[2:]))
            was = "| - | - " if old is None else f"| {old['last']} ({old['best']}) | {old['growth']} "
            now = f"| {row['last']} ({row['best']}) | {row['growth']} | {plain['last'] if plain else '-'} |"
            lines.append(f"| {' | '.join(key)} {was}{now}")
    return "\n".join(lines) + "\n"


def main(
    output: Annotated[Path | None, typer.Option(help="CSV file of the results; missing cells are run and appended")] = None,
    data: Annotated[str, typer.Option(help="folder that has cifar10.npz and the files of the five domains")] = "../shared/data",
    methods: Annotated[str, typer.Option(help="methods to run, separated by commas")] = ",".join(METHODS),
    jobs: Annotated[int, typer.Option(help="how many cells run at a time")] = 1,
    table_of: Annotated[Path | None, typer.Option("--table", help="folder with before.csv, after.csv; table.md is written there")] = None,
) -> None:
    """Run the cells that ``--output`` lacks, or write the tables of finished cells with ``--table``."""
    if table_of is not None:
        (table_of / "table.md").write_text(table(table_of))
    if output is None:
        return
    done = read(output)
    wanted = [(*key, data) for key in itertools.product(DATA, methods.split(","), ROUNDS, RATES) if tuple(map(str, key)) not in done]
    output.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs) as pool, output.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if not done:
            writer.writeheader()
        for row in pool.map(cell, *zip(*wanted, strict=True)) if wanted else ():
            writer.writerow(row)
            file.flush()
            print({field: row[field] for field in FIELDS if field != "curve"}, flush=True)


if __name__ == "__main__":
    typer.run(main)
