"""Try what a newcomer tries: methods on five sites whose features differ, whose labels differ, or both.

    nice -n 19 python benchmarks/newcomer.py --output benchmarks/results/newcomer/cells.csv
    python benchmarks/newcomer.py --table benchmarks/results/newcomer        # writes table.md, and a table of choosing.md

An older version, in a checkout of its own, writes the cells of the table's last part:

    PYTHONPATH=CHECKOUT nice -n 19 python benchmarks/newcomer.py --output benchmarks/results/newcomer/before.csv

A cell is one ``Federation`` in plain torch on scikit-learn's digits, with its default optimiser: nothing is tuned.
Under *features*, every site has all digits, seen through a camera of its own. Under *two classes*, every site has two
digits, and all cameras are alike. Under *both*, every site has two digits, seen through its own camera. A camera is a
change of the images: none, inverted, darker, noisy or blurred. Every site's own model (``client_model``) is tested
under the site's own camera, on the test digits of all classes and on those of the site's own classes.

The file has one line per cell, written as soon as the cell is done. Cells that the file has are not run again.
``at_freeze`` is the accuracy on all classes after half of the rounds, where FixBN freezes; ``lowest`` is the lowest
one afterwards.
"""

from __future__ import annotations

import csv
import itertools
import logging
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

import torch
import typer
from torch import nn

SHIFTS = ("none", "invert", "dark", "noise", "blur")  # one per site
REGIMES = ("features", "two classes", "both")
METHODS = ("fedavg", "fedbn", "fbn", "hbn", "fixbn", "gn")
SEEDS = (0, 1, 2)
ROUNDS, EVERY, BATCH = 40, 4, 32
KEY = ("regime", "method", "seed")
FIELDS = (*KEY, "all_classes", "own_classes", "at_freeze", "lowest", "seconds", "commit")
PAGE, MARK = Path(__file__).parent.parent / "docs" / "methods" / "choosing.md", "newcomer"
Key = tuple[str, str, int]
Row = Mapping[str, str]


def network() -> nn.Sequential:
    """Return the newcomer's network: two convolutions with BatchNorm."""
    blocks = [(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)) for a, b in ((3, 16), (16, 32))]
    return nn.Sequential(*itertools.chain(*blocks), nn.Flatten(), nn.Linear(32 * 5 * 5, 10))


def cells() -> Iterator[Key]:
    """Yield every cell in the order of the runs: first all cells of the first seed."""
    for seed in SEEDS:
        yield from ((regime, method, seed) for regime in reversed(REGIMES) for method in METHODS)


def sites(regime: str, seed: int) -> list[tuple[Any, Any, set[int]]]:
    """Return every site's training samples, the test samples as its camera shows them, and the classes that it trains on."""
    from fl_bn.data.digits import load_digits_plain
    from fl_bn.data.partition import partition
    from fl_bn.data.shift import shifted
    from fl_bn.federation.local import Samples

    plain = load_digits_plain("", 20)
    kind, parameter = ("iid", 0.0) if regime == "features" else ("classes", 2.0)
    parts = partition(kind, plain.y_train.numpy(), None, len(SHIFTS), parameter, seed)
    made = []
    for place, part in enumerate(parts):
        seen = shifted(plain, ["none" if regime == "two classes" else SHIFTS[place]], seed)  # all samples as this site's camera sees them
        own = torch.from_numpy(part)
        train, test = Samples(seen.x_train[own], seen.y_train[own]), Samples(seen.x_test, seen.y_test)
        made.append((train, test, set(train.y.tolist())))
    return made


def cell(key: Key) -> dict[str, Any]:
    """Run one cell; return its line of the CSV file, column -> value."""
    import fl_bn
    from fl_bn import Federation, SeededBatches, methods
    from fl_bn.federation.local import Samples, evaluate

    regime, method, seed = key
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data, begin = sites(regime, seed), time.process_time()
    batches = [SeededBatches(train.x, train.y, BATCH) for train, _, _ in data]
    federation = Federation(network(), getattr(methods, method)(), batches, seed=seed, evaluate_every=ROUNDS, progress=False)
    curve: dict[int, tuple[float, float]] = {}

    def accuracy(number: int, test: Samples) -> float:
        return 100 * evaluate(federation.client_model(number), test).result()["accuracy"]

    try:
        for record in federation.run(ROUNDS):
            if record.round % EVERY == 0:
                wanted = [torch.tensor([y in own for y in test.y.tolist()]) for _, test, own in data]
                pairs = [(test, rows) for (_, test, _), rows in zip(data, wanted, strict=True)]
                own = [accuracy(i, Samples(test.x[rows], test.y[rows])) for i, (test, rows) in enumerate(pairs)]
                curve[record.round] = mean(accuracy(i, test) for i, (test, _) in enumerate(pairs)), mean(own)
    except RuntimeError as error:  # the training diverged: its curve ends here
        print(f"{key}: {error}", flush=True)
    last = curve.get(ROUNDS, (math.nan, math.nan))
    frozen = curve.get(ROUNDS // 2, (math.nan, math.nan))[0]
    lowest = min((value for at, (value, _) in curve.items() if at > ROUNDS // 2), default=math.nan)
    numbers = (*(round(value, 1) for value in (*last, frozen, lowest)), round(time.process_time() - begin, 1))
    return dict(zip(FIELDS, (*key, *numbers, commit_of(fl_bn.__file__)), strict=True))


def commit_of(file: str) -> str:
    """Return the short hash of the commit that is checked out in the git repository of ``file``."""
    command = ["git", "-C", str(Path(file).parent), "describe", "--always", "--exclude=*", "--abbrev=7"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def read(path: Path) -> dict[Key, Row]:
    """Return the cells in a results file, each with its line; an empty dict if the file does not exist."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {(row["regime"], row["method"], int(row["seed"])): row for row in csv.DictReader(file)}


def shown(rows: list[Row], field: str) -> str:
    """Format the mean of a field and, if there are several rows, the standard deviation; say how many runs diverged."""
    values = [value for row in rows if not math.isnan(value := float(row[field]))]
    lost = len(rows) - len(values)
    if not values:
        return f"{lost} of {len(rows)} diverged" if lost else "-"
    said = f"{mean(values):.1f} ({stdev(values):.1f})" if len(values) > 1 else f"{values[0]:.1f}"
    return f"{said}, {lost} of {len(rows)} diverged" if lost else said


def whole(rows: Mapping[Key, Row]) -> dict[Key, Row]:
    """Return the rows of the complete seeds. A seed is complete if every cell was run with it.

    Other seeds are left out, because means over different seeds cannot be compared.
    """
    seeds = [seed for seed in SEEDS if all((regime, method, seed) in rows for regime in REGIMES for method in METHODS)]
    return {key: row for key, row in rows.items() if key[2] in seeds}


def table(rows: Mapping[Key, Row], before: Mapping[Key, Row]) -> str:
    """Return the results as Markdown, over the complete seeds.

    Args:
        rows: The cells of this version.
        before: The cells of an older version, for the last part of the page; empty: the part is left out.
    """
    run, left, rows = len(rows), sum(key not in rows for key in cells()), whole(rows)
    lines = [
        "# A newcomer's table",
        "",
        f"Five sites, scikit-learn's digits, {ROUNDS} rounds of one local epoch, batches of {BATCH}. The rate is 0.05 in all rounds, "
        "`Federation`'s default, and nothing is tuned. Accuracy (%) of every site's own model under its own camera: mean over the sites, "
        "then mean (standard deviation) over seeds. Made by `benchmarks/newcomer.py`.",
        "",
    ]
    for title, field in (("Tested on all classes", "all_classes"), ("Tested on the site's own classes", "own_classes")):
        lines += [f"## {title}", "", f"| method | {' | '.join(REGIMES)} |", "|---|---:|---:|---:|"]
        for method in METHODS:
            own = [[row for key, row in rows.items() if key[:2] == (regime, method)] for regime in REGIMES]
            lines.append(f"| {method} | {' | '.join(shown(of, field) for of in own)} |")
        lines.append("")
    lines += ["## FixBN after it freezes", "", "| regime | at the freeze | lowest afterwards | last |", "|---|---:|---:|---:|"]
    for regime in REGIMES:
        of = [row for key, row in rows.items() if key[:2] == (regime, "fixbn")]
        lines.append(f"| {regime} | {' | '.join(shown(of, field) for field in ('at_freeze', 'lowest', 'all_classes'))} |")
    seeds = sorted({key[2] for key in rows})
    lines += ["", f"Complete seeds: {', '.join(map(str, seeds))}. {run} cells were run, {left} were not.", ""]
    if before := whole(before):
        commits, seeds = sorted({row["commit"] for row in before.values()}), sorted({key[2] for key in before})
        lines += [f"## Before: commit {', '.join(commits)}, seeds {', '.join(map(str, seeds))}", ""]
        lines += ["| method | features | two classes | both | both, on the site's own classes |", "|---|---:|---:|---:|---:|"]
        for method in METHODS:
            asked = [*((regime, "all_classes") for regime in REGIMES), ("both", "own_classes")]
            said = [shown([row for key, row in before.items() if key[:2] == (regime, method)], field) for regime, field in asked]
            lines.append(f"| {method} | {' | '.join(said)} |")
        lines.append("")
    return "\n".join(lines)


def excerpt(rows: Mapping[Key, Row]) -> str:
    """Return the table for docs/methods/choosing.md, over the complete seeds."""
    rows = whole(rows)
    head = "| method | features differ | labels differ | both, on all classes | both, on the site's own classes |"
    lines = [head, "|---|---:|---:|---:|---:|"]
    columns = (("features", "all_classes"), ("two classes", "all_classes"), ("both", "all_classes"), ("both", "own_classes"))
    for method in METHODS:
        said = [shown([row for key, row in rows.items() if key[:2] == (regime, method)], field) for regime, field in columns]
        lines.append(f"| `{method}` | {' | '.join(said)} |")
    return "\n".join(lines) + "\n"


def main(
    output: Annotated[Path | None, typer.Option(help="CSV file of the results; missing cells are run and appended")] = None,
    seconds: Annotated[float, typer.Option(help="begin no new cell after this many seconds")] = math.inf,
    table_of: Annotated[Path | None, typer.Option("--table", help="folder with cells.csv; table.md is written there")] = None,
) -> None:
    """Run the cells that ``--output`` lacks, or write the tables of finished cells with ``--table``."""
    if table_of is not None:
        sys.path.insert(0, str(Path(__file__).parent.parent))
        from experiments.marks import replaced

        rows = read(table_of / "cells.csv")
        (table_of / "table.md").write_text(table(rows, read(table_of / "before.csv")))
        PAGE.write_text(replaced(PAGE.read_text(), MARK, excerpt(rows)))
    if output is None:
        return
    done, begin = read(output), time.monotonic()
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if not done:
            writer.writeheader()
        for key in cells():
            if key in done:
                continue
            if time.monotonic() - begin > seconds:
                break
            row = cell(key)
            writer.writerow(row)
            file.flush()
            print(row, flush=True)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
