"""Measure what a newcomer tries with ``Federation``: sites whose features differ, whose labels differ, and both.

    python benchmarks/newcomer.py --output benchmarks/results/newcomer/cells.csv
    python benchmarks/newcomer.py --table benchmarks/results/newcomer        # writes table.md, the table of choosing.md

Five sites have scikit-learn's digits, and all methods have the defaults of ``Federation``. Where features differ, each site
has a camera of its own. Where labels differ, each trains on two classes. Every site's own model is tested under its own
camera, on all classes and on those that it has seen. Cells that the file has are not run again.
"""

from __future__ import annotations

import csv
import itertools
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer
from common import append, shown, table
from torch import nn

from experiments.data.shift import shifted
from fl_bn import Federation, SeededBatches, methods
from fl_bn.data.digits import load_digits_plain
from fl_bn.data.partition import partition
from fl_bn.federation.local import Samples, evaluate

SHIFTS = ("none", "invert", "dark", "noise", "blur")  # one per site
REGIMES = ("features", "two classes", "both")
METHODS = ("fedavg", "fedbn", "fbn", "hbn", "fixbn", "gn")
SEEDS = (0, 1, 2)
ROUNDS, BATCH = 40, 32
FIELDS = ("regime", "method", "seed", "all_classes", "own_classes", "seconds")
COLUMNS = {
    "features differ": ("features", "all_classes"),
    "labels differ": ("two classes", "all_classes"),
    "both, on all classes": ("both", "all_classes"),
    "both, on the site's own classes": ("both", "own_classes"),
}


def network() -> nn.Sequential:
    """Return the newcomer's network: two convolutions with BatchNorm."""
    blocks = [(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)) for a, b in ((3, 16), (16, 32))]
    return nn.Sequential(*itertools.chain(*blocks), nn.Flatten(), nn.Linear(32 * 5 * 5, 10))


def sites(regime: str, seed: int) -> Iterator[tuple[Samples, Samples]]:
    """Yield every site's training samples, and the test samples as its camera shows them."""
    plain = load_digits_plain("", 20)
    kind, parameter = ("iid", 0.0) if regime == "features" else ("classes", 2.0)
    for shift, part in zip(SHIFTS, partition(kind, plain.y_train.numpy(), None, len(SHIFTS), parameter, seed), strict=True):
        seen = shifted(plain, ["none" if regime == "two classes" else shift], seed)
        own = torch.from_numpy(part)
        yield Samples(seen.x_train[own], seen.y_train[own]), Samples(seen.x_test, seen.y_test)


def cell(regime: str, method: str, seed: int) -> dict[str, Any]:
    """Run one cell; return its line of the CSV file, column -> value."""
    torch.manual_seed(seed)
    data, begin = list(sites(regime, seed)), time.process_time()
    batches = [SeededBatches(train.x, train.y, BATCH) for train, _ in data]
    federation = Federation(network(), getattr(methods, method)(), batches, seed=seed, evaluate_every=ROUNDS)
    for _ in federation.run(ROUNDS):
        pass

    def accuracy(number: int, test: Samples) -> float:
        return 100 * evaluate(federation.client_model(number), test).result()["accuracy"]

    own = [torch.isin(test.y, train.y) for train, test in data]
    every = mean(accuracy(i, test) for i, (_, test) in enumerate(data))
    alone = mean(accuracy(i, Samples(test.x[rows], test.y[rows])) for i, ((_, test), rows) in enumerate(zip(data, own, strict=True)))
    values = (regime, method, seed, round(every, 1), round(alone, 1), round(time.process_time() - begin, 1))
    return dict(zip(FIELDS, values, strict=True))


def read(path: Path) -> list[dict[str, str]]:
    """Return the lines of a results file; none if it does not exist."""
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def page(rows: list[dict[str, str]]) -> str:
    """Return the table as Markdown."""
    lines = [
        "# A newcomer's table",
        "",
        f"Five sites, scikit-learn's digits, {ROUNDS} rounds of one local epoch, batches of {BATCH}. The rate is 0.05 in all rounds, "
        "`Federation`'s default, and nothing is tuned. Accuracy (%) of every site's own model under its own camera: mean over the sites, "
        f"then mean (standard deviation) over {len(SEEDS)} seeds. Made by `benchmarks/newcomer.py`.",
        "",
    ]

    def values(method: str, regime: str, field: str) -> list[float]:
        return [float(row[field]) for row in rows if (row["method"], row["regime"]) == (method, regime)]

    cells = [[f"`{method}`", *(shown(values(method, *column)) for column in COLUMNS.values())] for method in METHODS]
    return "\n".join([*lines, *table(["method", *COLUMNS], cells), ""])


def main(
    output: Annotated[Path | None, typer.Option(help="CSV file of the results; missing cells are run and appended")] = None,
    table_of: Annotated[Path | None, typer.Option("--table", help="folder with cells.csv; table.md is written there")] = None,
) -> None:
    """Run the cells that ``--output`` lacks, or write the table of finished cells with ``--table``."""
    if table_of is not None:
        (table_of / "table.md").write_text(page(read(table_of / "cells.csv")))
    if output is not None:
        logging.getLogger("flwr").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        done = [(row["regime"], row["method"], int(row["seed"])) for row in read(output)]
        append(output, (cell(*key) for key in itertools.product(REGIMES, METHODS, SEEDS) if key not in done), FIELDS)


if __name__ == "__main__":
    typer.run(main)
