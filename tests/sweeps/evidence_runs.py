"""Define an experiment of six cells, and write the files of its runs, with accuracies that a test chooses."""

from __future__ import annotations

from pathlib import Path

from experiments.catalogue import Experiment
from experiments.claims import FILE, VARIANT, Comparison, Side
from experiments.evidence import compact
from tests.sweeps.finished_cells import finish
from tests.sweeps.inner import read

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


def register(experiment: Experiment, text: str = CLAIMS) -> Path:
    """Write the register of claims into the folder of the experiment's file; return this folder."""
    (experiment.file.parent / FILE).write_text(text)
    return experiment.file.parent


def runs(experiment: Experiment, folder: Path, data: str, accuracy: dict[str, float], variant: str = VARIANT) -> None:
    """Write the files of finished runs into ``folder``. ``accuracy`` has the accuracy (0..1) of each cell that is finished, by name."""
    for cell in read(experiment.file, variant, data).cells(folder):
        if cell.config.name in accuracy:
            finish(cell, [*[None] * (cell.config.rounds - 1), accuracy[cell.config.name]])
            (cell.path / "summary.md").write_text("done")
            (cell.path / "environment.json").write_text('{"commit": "abc1234"}')


def kept(experiment: Experiment, tmp_path: Path, accuracy: dict[str, float], out: str = "out", variant: str = VARIANT) -> Path:
    """Write finished runs, and write their results to the file of committed results; return the folder that has ``results``."""
    place = tmp_path / f"runs-{out}-{variant}"
    runs(experiment, place, "/somewhere", accuracy, variant)
    compact(experiment, variant, place, "/somewhere", tmp_path / out)
    return tmp_path / out


ABOVE = Comparison(Side((("A", "x", 0),)), Side((("B", "x", 0),)), paper=(70.0, 60.0))
ALL = {
    f"{method}-seed{seed}": value
    for method, values in {"FedAvg": (0.5, 0.52, 0.51), "FedBN": (0.6, 0.63, 0.61)}.items()
    for seed, value in enumerate(values)
}
