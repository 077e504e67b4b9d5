"""Compare FedAvg's accuracy before and after re-calibration of the statistics, at several levels of label skew.

FedAvg averages the running means and the running variances separately. The averaged variance lacks the spread of the
clients' means. Besides, the statistics belong to the local models, not to the averaged one. Re-calibration keeps the
weights, and replaces the statistics by the exact ones of all clients' data. The gain in accuracy is what the wrong
statistics cost. The remaining distance to centralised training is due to the weights.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, NamedTuple

from fl_bn.app.recalibrate import planned
from fl_bn.app.sweep.cells import Cell, run_cell, run_cells
from fl_bn.app.usage import Usage

SPLITS = {"1 class each": ("classes", 1.0), "2 classes each": ("classes", 2.0), "IID": ("iid", 1.0)}
SEEDS = range(3)
AXIS = "statistics"
WAYS = ("averaged", "exact")
DIGITS: dict[str, Any] = {"rounds": 10, "evaluate-every": 10}
CIFAR: dict[str, Any] = {
    "dataset": "npz", "model": "simple-cnn", "clients": 10, "rounds": 30, "local-steps": 20, "batch-size": 16, "learning-rate": 0.05,
    "learning-rate-decay": 0.3, "momentum": 0.9, "evaluate-every": 10,
}  # fmt: skip


class Result(NamedTuple):
    """Hold the test accuracy (0..1) of a run after ``passes`` re-calibration passes.

    If ``passes`` is 0, the model has FedAvg's own statistics.
    """

    split: str
    seed: int
    passes: int
    accuracy: float


def run(folder: Path, variant: str = "small", data: str = "data", jobs: int = 1) -> list[Result]:
    """Run the study, and write ``recalibration.csv``.

    Args:
        folder: The folder of the files. Its subfolder ``runs`` has the runs; finished runs are not repeated.
        variant: ``small``: digits, 10 rounds. ``evidence``: the subset of CIFAR-10 in ``data``. ``cause``: as
            ``evidence``, and each run a second time with one local step per round. Any other: digits, 100 rounds.
        data: The folder of the data.
        jobs: The number of runs at a time.

    Returns:
        The rows of the CSV file.

    Raises:
        RuntimeError: Runs failed. The message has the error of each.
    """
    cells = plan(folder, variant, data)
    if errors := run_cells(cells, jobs, lambda done, total: None):
        raise RuntimeError(f"{len(errors)} of {len(cells)} runs failed: {'; '.join(f'{name}: {text}' for name, text in errors.items())}")
    found = [result for cell in cells for result in recalibrated(cell)]
    with (folder / "recalibration.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([Result._fields, *found])
    return found


def plan(folder: Path, variant: str, data: str) -> list[Cell]:
    """Return the cells of the study: one run per seed and label skew.

    For the variant ``cause``, each run is made a second time, with the same number of local steps, but one step per
    round.
    """
    cifar = {**CIFAR, "data-path": f"{data}/cifar10.npz"}
    keys = {"small": DIGITS, "evidence": cifar, "cause": cifar}.get(variant, {**DIGITS, "rounds": 100})
    single = {"local-steps": 1, "rounds": CIFAR["rounds"] * CIFAR["local-steps"]}
    cells = []
    for seed in SEEDS:
        for split, (kind, parameter) in SPLITS.items():
            for said, changed in {"": {}, ", single steps": single}.items() if variant == "cause" else [("", {})]:
                own = {"method": "fedavg", "partition": kind, "partition-parameter": parameter, "seed": seed, "pictures": False}
                name = f"{split}{said}".replace(",", "").replace(" ", "-")
                place = {"output": str((folder / "runs").resolve()), "name": f"{name}-seed{seed}"}
                cells.append(Cell(Usage().config({**keys, **changed, **own, **place}), {"split": split + said, "seed": seed}))
    return cells


def recalibrated(cell: Cell) -> list[Result]:
    """Re-calibrate a finished run, unless that was done before; return its accuracy after each pass."""
    again = Cell(planned(cell.path, {}))
    if again.outcome().get("status") != "finished":
        run_cell(again)
    return [Result(str(cell.axes["split"]), cell.config.seed, row["round"], row["accuracy"] or 0.0) for row in again.rows()]


def measured(cell: Cell) -> dict[str, float]:
    """Return the accuracy (0..1) of a finished run with the averaged and with the exact statistics."""
    first, *_, last = recalibrated(cell)
    return {"averaged": first.accuracy, "exact": last.accuracy}
