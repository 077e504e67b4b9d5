"""Compare every method and centralised training on a CIFAR-10 subset: the tables in benchmarks/results/.

    python benchmarks/accuracy.py --data ../shared/data/cifar10.npz

Within a setting all budgets are equal. Every method takes the same number of local steps, on batches of the same
size, with the same learning-rate schedule. Centralised training takes as many steps on batches of the cohort's size.
Finished runs are not repeated.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from fl_bn.run.config import RunConfig
from fl_bn.run.pictures import partition_in_words
from fl_bn.sweep.compare import Variant, comparison, read_curves, write
from fl_bn.sweep.run import Place, check, plan, run

COMMON: dict[str, str | int | float] = {
    "dataset": "npz", "model": "simple-cnn", "batch-size": 32, "momentum": 0.9, "weight-decay": 1e-4,
    "learning-rate-schedule": "step", "learning-rate-decay": 0.1, "evaluate-every": 5,
    "hbn-stat-samples": 256, "hbn-lower-layers": "shared",
}  # fmt: skip
METHODS = [
    "centralised", "fedavg", "gn", "ln", "in", "fixbn", "fedbn", "silobn", "hbn", "hbn:hbn-lower-layers='hybrid'",
    "hbn:hbn-lam=0.1", "fbn", "fbn:learning-rate=0.005",
]  # fmt: skip
SETTINGS: dict[str, dict[str, str | int | float]] = {
    "classes-2": {
        "clients": 5, "partition": "classes", "partition-parameter": 2.0, "local-steps": 10, "rounds": 60, "learning-rate": 0.02,
    },
    "dirichlet-0.1": {
        "clients": 20, "partition": "dirichlet", "partition-parameter": 0.1, "local-steps": 5, "rounds": 20, "learning-rate": 0.02,
        "evaluate-every": 10,
    },
    "fedtan": {
        "clients": 5, "partition": "classes", "partition-parameter": 2.0, "local-steps": 5, "rounds": 120, "learning-rate": 0.1,
        "model": "resnet20", "image-size": 16, "momentum": 0.0, "weight-decay": 0.0, "evaluate-every": 10,
    },
}  # fmt: skip
METHODS_OF = {"fedtan": ["centralised", "fedtan", "fedtan2", "fedavg-alg2", "fedavg", "gn"]}


def main(
    data: Annotated[Path, typer.Option(help="npz file with x_train, y_train, x_test, y_test")],
    seeds: int = 3,
    jobs: int = 2,
    only: Annotated[str, typer.Option(help="the only setting to run, one of " + ", ".join(SETTINGS) + "; default: all")] = "",
    methods: Annotated[str, typer.Option(help="the methods to run, separated by commas; default: those of each setting")] = "",
    work: Annotated[Path, typer.Option(help="folder for the run directories")] = Path("runs/accuracy"),
    results: Annotated[Path, typer.Option(help="folder for the tables and pictures")] = Path(__file__).parent / "results",
) -> None:
    """Train with every method in every setting, and write the tables and pictures of the results."""
    console = Console()
    for name, setting in SETTINGS.items():
        if only not in ("", name):
            continue
        base = {**COMMON, **setting, "data-path": str(data.resolve())}
        folder = work / name
        chosen = methods.split(",") if methods else METHODS_OF.get(name, METHODS)
        title = f"CIFAR-10 subset (12,000 / 2,000), {describe(base)}"
        sweep = comparison([Variant.parse(text) for text in chosen], range(seeds), base, title)
        planned = plan(sweep, folder, retry=True)
        check(planned.todo)
        with Progress(console=console) as bar:
            task = bar.add_task(name, total=None)
            place = Place(jobs=jobs)
            errors = run(sweep, planned, folder, place, lambda done, total: bar.update(task, completed=done, total=total))  # noqa: B023
        write(read_curves(planned.cells), title, folder)
        (results / name).mkdir(parents=True, exist_ok=True)
        for file in ("table.md", "table.csv", "curves.csv", "comparison.png"):
            shutil.copy(folder / file, results / name / file)
        console.print((folder / "table.md").read_text(), markup=False)
        for cell, problem in errors.items():
            console.print(f"failed {cell}: {problem}", markup=False)


def describe(setting: dict[str, str | int | float]) -> str:
    """Describe a setting in one line."""
    split = partition_in_words(RunConfig.from_mapping({key: setting[key] for key in ("partition", "partition-parameter")}))
    return (
        f"{setting['model']}, {setting['clients']} clients, {split}, "
        f"{setting['rounds']} rounds of {setting['local-steps']} local steps on batches of 32, learning rate {setting['learning-rate']}"
    )


if __name__ == "__main__":
    typer.run(main)
