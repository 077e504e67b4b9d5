"""Estimate the core hours of the claims that have no run yet, for ``fl-bn experiments evidence``.

    python benchmarks/core_hours.py --data DATA         # writes experiments/results/cpu.json; some minutes on one core

A few local steps are timed for each combination of data set, network, image size, method and batch size. The seconds
per step are multiplied by the number of steps in the runs, as ``gpu.py`` does on a GPU. The times are processor time on
one thread, which other programs hardly change. Evaluations and FedTAN's exchanges of statistics are not counted.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from gpu_hours import DATA, Size, console, steps_of, timed_steps

from experiments.evidence import CORE_HOURS, RESULTS, gather
from fl_bn.federation.engines.vectorised import SEQUENTIAL
from fl_bn.run.config import RunConfig
from fl_bn.sweep.file import read

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
SIZE = Size(cohorts=(), steps=2, batch=0, timed=1, most=2)


def shape_of(config: RunConfig) -> tuple[int, int, int, int]:
    """Return the numbers of classes, of channels, of pixels per side and of training samples of a run's data set."""
    if config.dataset != "npz":
        classes, channels, side, samples = DATA[config.dataset.removesuffix("-pooled")]
        return classes, channels, side, 5 * config.samples_per_domain if config.samples_per_domain else samples
    with np.load(str(config.data_path)) as file:
        x, y = file["x_train"], file["y_train"]
    return int(y.max()) + 1, x.shape[3] if x.ndim == 4 else 1, x.shape[1], len(x)


def main(data: Annotated[str, typer.Option(help="the folder that experiments/evidence_data.py wrote")]) -> None:
    """Estimate the core hours of every claim that has no run yet, and write them to experiments/results/cpu.json."""
    torch.set_num_threads(1)
    spent: dict[tuple[object, ...], float] = {}
    hours: dict[str, float] = defaultdict(float)
    waiting = [one for one in gather(EXPERIMENTS) if one.outcomes and not one.was_run]
    for of, variant, file in sorted({(one.claim.of, one.claim.variant, one.experiment.file) for one in waiting}):
        for cell in read(file, variant, data).cells(Path("none")):
            config = cell.config
            shape = shape_of(config)
            cohort = max(1, round(config.clients * config.fraction))
            method = "centralised" if cell.centralised else config.method
            key = (config.dataset, config.model, config.image_size, method, config.batch_size)
            if key not in spent:
                spent[key] = timed_steps(config, 1, torch.device("cpu"), SIZE, shape, (SEQUENTIAL,))[0]
                console.print(*key, f"{spent[key]:.4f} s a step")
            hours[f"{of}.{variant}"] += spent[key] * cohort * steps_of(config, shape[3] // config.clients) * config.rounds / 3600
    said = {"device": "one core of a virtual machine", "hours": {name: round(value, 1) for name, value in hours.items()}}
    (EXPERIMENTS / RESULTS / CORE_HOURS).write_text(json.dumps(said, indent=1) + "\n")
    console.print(said["hours"])


if __name__ == "__main__":
    typer.run(main)
