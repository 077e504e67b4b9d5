"""FedAvg's accuracy before and after its averaged statistics are re-calibrated, with the same weights, by skew of the labels.

FedAvg averages running means and, apart from them, running variances: the spread of the clients' means is lost, and the statistics are
of local models, not of the averaged one. Re-calibration replaces them by the exact ones of the union of the data and leaves the weights
alone, so the difference is what the statistics cost; what is left to centralised training is in the weights.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np

from fl_bn.flower import run_in_process
from fl_bn.run.config import RunConfig
from fl_bn.run.palette import STYLE
from fl_bn.run.recalibrate import planned, rows

SPLITS = {"1 class each": ("classes", 1.0), "2 classes each": ("classes", 2.0), "IID": ("iid", 1.0)}
SEEDS = range(3)


class Result(NamedTuple):
    """Test accuracy (0..1) of one run's weights with the statistics after ``passes`` of them (0: FedAvg's own)."""

    split: str
    seed: int
    passes: int
    accuracy: float


def run(folder: Path, small: bool = True) -> list[Result]:
    """The study, written to ``folder``: ``recalibration.csv`` and ``.png``, and all runs below ``runs``. ``small``: 10 rounds, else 100."""
    found = []
    for split, (kind, parameter) in SPLITS.items():
        for seed in SEEDS:
            own = {"partition": kind, "partition-parameter": parameter, "seed": seed, "rounds": 10 if small else 100, "evaluate-every": 10}
            name = {"output": str(folder / "runs"), "name": f"{split.replace(' ', '-')}-seed{seed}", "pictures": False}
            trained = run_in_process(RunConfig.from_mapping({"method": "fedavg", **own, **name}).to_mapping())
            assert trained is not None
            after = run_in_process(planned(trained, {}).to_mapping())
            assert after is not None
            found += [Result(split, seed, row.number, row.metric or 0.0) for row in rows(after)]
    with (folder / "recalibration.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([Result._fields, *found])
    _draw(found, folder / "recalibration.png")
    return found


def _draw(found: Sequence[Result], path: Path) -> None:
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for index, split in enumerate(SPLITS):
            for seed in SEEDS:
                mine = [r for r in found if (r.split, r.seed) == (split, seed)]
                axes.plot([r.passes for r in mine], [100 * r.accuracy for r in mine], "-", lw=0.7, alpha=0.5, color=f"C{index}")
            mean = [
                100 * float(np.mean([r.accuracy for r in found if (r.split, r.passes) == (split, number)]))
                for number in range(1 + max(r.passes for r in found if r.split == split))
            ]
            label = f"{split}: {mean[0]:.1f} → {mean[-1]:.1f} %"
            axes.plot(range(len(mean)), mean, "o-", ms=4, color=f"C{index}", label=label)
        axes.set(xlabel="passes (0: FedAvg's averaged statistics)", ylabel="test accuracy (%)", ylim=(0, 100))
        axes.set_xticks(range(1 + max(r.passes for r in found)))
        axes.set_title("the same weights, re-calibrated (thin: seeds; last pass: exact in every layer)")
        axes.legend(frameon=False)
        figure.savefig(path)
        plt.close(figure)
