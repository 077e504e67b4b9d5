"""Compare every method's defaults with plain averaging, over kinds of skew, local steps and lengths of the run.

    python benchmarks/defaults.py --output benchmarks/results/defaults/grid.csv --data ../shared/data
    python benchmarks/defaults.py --table benchmarks/results/defaults

A cell is one run: a choice of data, kind of skew, method, local steps, rounds and seed. All other run-config keys have
their defaults. The file has one line per cell, written as soon as the cell is done. Cells that are in the file are not
run again. The most informative cells come first. Centralised training is run once for all label splits, which differ
only in which client has which sample.

Columns: ``at_freeze`` is the accuracy after half of the rounds, where FixBN freezes; ``lowest`` is the lowest
accuracy afterwards; ``seconds`` is processor time, empty for a cell that ran on a GPU (``--gpu``) or was copied.
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
from statistics import mean, stdev
from typing import Annotated, Any

import torch
import typer
from torch import nn

CENTRALISED = "centralised"
LEADING = ("fedavg", "fixbn", "hbn", "fbn", "fedtan2")  # run first in every block: the baseline, and methods whose defaults can harm
METHODS = (*LEADING, "gn", "fedtan", "fedbn", "silobn", "static-bn", CENTRALISED)
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
FIRST = [  # (data, rounds, steps, seed): run first, with all regimes and methods
    *(("digits", 25, 5, seed) for seed in SEEDS),
    ("CIFAR-10 subset", 25, 5, 0),
    ("digits", 25, 20, 0),
    ("digits", 25, 1, 0),
    ("digits", 100, 5, 0),
]
KEY = ("data", "regime", "method", "steps", "rounds", "seed")
FIELDS = (*KEY, "last", "at_freeze", "lowest", "growth", "curve", "seconds")
OVERHEAD = 4  # the rest of a round takes as long as so many local steps (measured in the cells of runaway.py)
MARGIN = 2.0  # points by which a method may be behind FedAvg
CHANCE = 10.0  # percent: all data sets have ten classes
Key = tuple[str, str, str, int, int, int]
Row = dict[str, str]


def cells() -> Iterator[Key]:
    """Yield every cell once, in the order in which the cells are run: the most informative ones first."""
    others = [block for block in itertools.product(DATA, ROUNDS, STEPS, SEEDS) if block not in FIRST]
    for data, rounds, steps, seed in [*FIRST, *sorted(others, key=lambda block: (block[1] * block[2], block[3], block[0]))]:
        for methods in (LEADING, METHODS[len(LEADING) :]):
            for regime, method in itertools.product(REGIMES, methods):
                yield data, regime, method, steps, rounds, seed


def cell(key: Key, folder: str, gpu: bool = False) -> dict[str, Any]:
    """Run one cell; return its line of the CSV file, column -> value.

    Args:
        key: The cell.
        folder: The folder that has cifar10.npz.
        gpu: Whether to train on the GPU, the clients of a cohort as one program. Their sums have another order than on the CPU.
    """
    from fl_bn.run.assembly import limit_threads
    from fl_bn.run.config import RunConfig

    logging.getLogger("flwr").setLevel(logging.ERROR)
    limit_threads(1)
    data, regime, method, steps, rounds, seed = key
    keys = {name: str(value).format(data=folder) if name == "data-path" else value for name, value in DATA[data].items()}
    axes = {"local-steps": steps, "rounds": rounds, "seed": seed, "evaluate-every": EVERY[rounds], "output": ""}
    where = {"device": "cuda" if gpu else "auto", "engine": "vectorised" if gpu and method != CENTRALISED else "sequential"}
    config = RunConfig.from_mapping({**keys, **REGIMES[regime], **axes, **where, "method": "fedavg" if method == CENTRALISED else method})
    begin = time.process_time()
    curve, growth = _centralised(config) if method == CENTRALISED else _federated(config)
    after = [value for round, value in curve if round > rounds // 2]
    at_freeze = next((value for round, value in curve if round == rounds // 2), float("nan"))
    lowest, last = (min(after), after[-1]) if after and curve[-1][0] == rounds else (float("nan"), float("nan"))
    shown = json.dumps([value for _, value in curve])
    values = (*key, last, at_freeze, lowest, round(growth, 2), shown, "" if gpu else round(time.process_time() - begin, 1))
    return dict(zip(FIELDS, values, strict=True))


def shared(key: Key, done: dict[Key, Row]) -> dict[str, Any] | None:
    """Copy the line of a centralised cell from another label split, since training on all data is the same in each split.

    Args:
        key: The cell.
        done: The lines of the finished cells.

    Returns:
        The line. None if the cell is not centralised, if its split also shifts the images, or if no other split has run.
    """
    if key[2] != CENTRALISED or "shifts" in REGIMES[key[1]]:
        return None
    alike = (done.get((key[0], regime, *key[2:])) for regime, keys in REGIMES.items() if "shifts" not in keys)
    row = next((row for row in alike if row), None)
    return {**row, "regime": key[1], "seconds": ""} if row else None


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


def cost(key: Key, rows: dict[Key, Row]) -> float:
    """Estimate the seconds that a cell will take, from the seconds per local step of finished cells.

    The finished cells with the same data and method are used. If there are none, all with the same data are used. If
    there are none either, all finished cells are used.
    """
    for alike in ((0, 2), (0,), ()):
        known = [(done, float(row["seconds"])) for done, row in rows.items() if row["seconds"] and all(done[i] == key[i] for i in alike)]
        per_step = [seconds / ((done[3] + OVERHEAD) * done[4]) for done, seconds in known]
        if per_step:
            return mean(per_step) * (key[3] + OVERHEAD) * key[4]
    return float("nan")


def shown(values: list[float]) -> str:
    """Format accuracies as their mean and, of several, the standard deviation: ``81.3 (0.4)``; ``-`` if there are none."""
    if not values:
        return "-"
    return f"{mean(values):.1f} ({stdev(values):.1f})" if len(values) > 1 else f"{values[0]:.1f}"


def table(rows: dict[Key, Row]) -> str:
    """Return the results as Markdown.

    The text has the summary, one table for each data set, number of rounds and number of local steps, and the missing cells
    with their estimated core hours.
    """
    lines = [summary(rows)]
    for data, rounds, steps in itertools.product(DATA, ROUNDS, STEPS):
        found = [row for key, row in rows.items() if (key[0], key[4], key[3]) == (data, rounds, steps)]
        if not found:
            continue
        seeds = sorted({int(row["seed"]) for row in found})
        lines += [f"## {data}, {rounds} rounds of {steps} local step{'s' * (steps > 1)}", "", f"Seeds: {', '.join(map(str, seeds))}.", ""]
        lines += ["| method | " + " | ".join(REGIMES) + " |", "|---|" + "---:|" * len(REGIMES)]
        for method in METHODS:
            said = []
            for regime in REGIMES:
                own = [row for row in found if (row["method"], row["regime"]) == (method, regime)]
                last, lowest = ([float(row[name]) for row in own] for name in ("last", "lowest"))
                growth = max((float(row["growth"]) for row in own), default=1.0)
                said.append(f"{shown(last)}; {min(lowest):.1f}; {growth:.2f}" if own else "-")
            lines.append(f"| {method} | {' | '.join(said)} |")
        lines.append("")
    if not (left := [key for key in cells() if key not in rows]):
        return "\n".join(lines[:-1]) + "\n"
    lines += ["## Not run", "", "| data | rounds | steps | cells | core hours |", "|---|---:|---:|---:|---:|"]
    for data, rounds, steps in itertools.product(DATA, ROUNDS, STEPS):
        block = [key for key in left if (key[0], key[4], key[3]) == (data, rounds, steps)]
        if block:
            lines.append(f"| {data} | {rounds} | {steps} | {len(block)} | {sum(cost(key, rows) for key in block) / 3600:.1f} |")
    lines.append(f"| all | | | {len(left)} | {sum(cost(key, rows) for key in left) / 3600:.1f} |")
    return "\n".join(lines) + "\n"


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
        f"| method | cells | IID: more than {MARGIN:g} behind FedAvg | other regimes: the same | lowest after half is more than {MARGIN:g} "
        "below the level there | within 5 points of chance (FedAvg too) |",
        "|---|---:|---:|---:|---:|---:|",
    ]
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
            lines.append(f"| {method} | {len(told['chance'])} | {' | '.join(counts)} | {sum(told['chance'])} ({both}) |")
    return "\n".join([*lines, ""])


def main(
    output: Annotated[Path | None, typer.Option(help="CSV file of the results; missing cells are run and appended")] = None,
    data: Annotated[str, typer.Option(help="folder that has cifar10.npz")] = "../shared/data",
    methods: Annotated[str, typer.Option(help="methods to run, separated by commas")] = ",".join(METHODS),
    seconds: Annotated[float, typer.Option(help="begin no new cell after this many seconds")] = float("inf"),
    gpu: Annotated[bool, typer.Option("--gpu", help="train on the GPU, the clients of a cohort as one program")] = False,
    table_of: Annotated[Path | None, typer.Option("--table", help="folder with grid.csv; table.md is written there")] = None,
) -> None:
    """Run the cells that ``--output`` lacks, or write the tables of finished cells with ``--table``."""
    if table_of is not None:
        (table_of / "table.md").write_text(table(read(table_of / "grid.csv")))
    if output is None:
        return
    done, begin = read(output), time.monotonic()
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if not done:
            writer.writeheader()
        for key in cells():
            if key in done or key[2] not in methods.split(","):
                continue
            if time.monotonic() - begin > seconds:
                break
            row = shared(key, done) or cell(key, data, gpu)
            done[key] = {name: str(value) for name, value in row.items()}
            writer.writerow(row)
            file.flush()
            print({field: row[field] for field in FIELDS if field != "curve"}, flush=True)


if __name__ == "__main__":
    typer.run(main)
