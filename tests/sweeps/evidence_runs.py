"""Define an experiment of six cells, and write the files of its runs, with accuracies that a test chooses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from experiments.catalogue import Experiment
from experiments.claims import FILE, VARIANT
from experiments.evidence import compact
from fl_bn.app.sweep.cells import Cell
from fl_bn.app.sweep.file import read

DEFINITION = """
title = "Two methods"
[experiment]
paper = "Nobody's"
[run]
dataset = "npz"
data-path = "{data}/x.npz"
rounds = 2
seed = [0, 1, 2]
[axes.method]
FedAvg = { method = "fedavg" }
FedBN = { method = "fedbn" }
[report]
rows = "method"
[variants.evidence.run]
rounds = 4
[variants.cause.run]
rounds = 4
learning-rate = 0.5
"""
CLAIMS = """
[rules]
seeds = 3
[[claims]]
id = "X-1"
place = "Table 1; l. 5"
claim = "FedBN is ahead of FedAvg"
compare = [{ left = ["FedBN", "accuracy"], right = ["FedAvg", "accuracy"], paper = [70.5, 60.0] }]
"""
OWN = """
[[own]]
id = "own-rate"
explains = "X-1"
experiment = "X-1"
variant = "cause"
asks = "Is it the rate?"
compare = [{ left = ["FedBN", "accuracy"], right = ["FedAvg", "accuracy"] }]
yes = "It is."
no = "It is not."
"""


def finish(cell: Cell, accuracies: Sequence[float | None]) -> None:
    """Write the files of a run that reached these accuracies, each round in ten seconds; one of too few rounds was killed."""
    cell.path.mkdir(parents=True, exist_ok=True)
    (cell.path / "config.toml").write_text(tomli_w.dumps(cell.config.to_mapping()))
    rows = [{"round": n, "loss": 1.0 / n, "accuracy": value, "seconds": 10.0} for n, value in enumerate(accuracies, 1)]
    (cell.path / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if len(accuracies) == cell.config.rounds:
        cell.write_outcome("finished", 1.0)


def register(experiment: Experiment, text: str = CLAIMS) -> Path:
    """Write the register of claims into the folder of the experiment's file; return this folder."""
    (experiment.file.parent / FILE).write_text(text)
    return experiment.file.parent


def kept(experiment: Experiment, tmp_path: Path, accuracy: dict[str, float], out: str = "out", variant: str = VARIANT) -> Path:
    """Write finished runs, and write their results to the file of committed results; return the folder that has ``results``.

    ``accuracy`` has the accuracy (0..1) of each cell that is finished, by name.
    """
    place = tmp_path / f"runs-{out}-{variant}"
    for cell in read(experiment.file, variant, "/somewhere").cells(place):
        if cell.config.name in accuracy:
            finish(cell, [*[None] * (cell.config.rounds - 1), accuracy[cell.config.name]])
            (cell.path / "summary.md").write_text("done")
            (cell.path / "environment.json").write_text('{"commit": "abc1234"}')
    compact(experiment, variant, place, "/somewhere", tmp_path / out)
    return tmp_path / out


ALL = {
    f"{method}-seed{seed}": value
    for method, values in {"FedAvg": (0.5, 0.52, 0.51), "FedBN": (0.6, 0.63, 0.61)}.items()
    for seed, value in enumerate(values)
}
