"""Train on all domains of digits except one; adapt the model to the domain left out, in every way of ``fl-bn adapt``.

Paper: Li et al.: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021,
appendix G. The study does so for each method, each domain and each seed. The domains, the network and the settings are
those of the five-domain task (``experiments/definitions/001-T11.toml``), with one client per remaining domain. The
variant ``evidence`` has the settings of the variant ``shared``, and the domains in ``DIGITS``.

Two methods are left out. FedAvg trains the same weights and affine parameters as SiloBN, bit for bit, because running
statistics take no part in training. With new statistics, both give the same model. FixBN fails in this study, at a
constant learning rate. With frozen statistics it reaches 26 % on the known domains of the small variant, as a mean over
domains and seeds.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.data.digits_five import sources
from fl_bn.app.adapt import adapt, newcomer, read_run, ways
from fl_bn.app.config import ConfigError
from fl_bn.app.sweep.cells import Cell, run_cells
from fl_bn.app.usage import Usage
from fl_bn.federation.recalibration import HOW

SEEDS = (0, 1, 2)
BATCH = 64  # the batch size of the adaptation ``test-batch``
DIGITS = ("chars74k-street-for-SVHN", "USPS", "chars74k-font-for-SynthDigits", "MNIST-M", "MNIST")
METHODS = {"FedBN": "fedbn", "SiloBN": "silobn"}
SHIFTS = ("none", "invert", "contrast", "noise", "background")
COMMON: dict[str, Any] = {
    "setup": "experiments.papers:Papers",
    "dataset": "digits-five", "model": "digits-cnn", "image-size": 28, "samples-per-domain": 743, "partition": "domain", "clients": 4,
    "rounds": 300, "local-epochs": 1, "local-steps": 0, "batch-size": 32, "learning-rate": 0.01, "learning-rate-schedule": "constant",
    "momentum": 0.0, "weight-decay": 0.0, "client-weights": "uniform", "evaluate-every": 10, "pictures": False,
}  # fmt: skip
SHARED = {**COMMON, "rounds": 40, "image-size": 16, "model": "digits-cnn-small", "learning-rate": 0.05}
SMALL = {
    **SHARED, "dataset": "digits-plain", "data-path": "", "shifts": ",".join(SHIFTS), "samples-per-domain": 0, "rounds": 8,
    "batch-size": 16, "evaluate-every": 8,
}  # fmt: skip
BEFORE, KNOWN = "before", "known domains"
AXIS = "statistics"
WAYS = (KNOWN, BEFORE, *HOW)


class Row(NamedTuple):
    """Hold one accuracy of one run: a row of ``adaptations.csv``.

    Attributes:
        held_out: The domain that was left out in training.
        method: The method.
        seed: The seed.
        how: The way in which the model was adapted to the domain left out. ``before``: it was not adapted. ``known
            domains``: the accuracy is on the domains of the training.
        accuracy: The accuracy in percent.
        note: A remark on the adaptation; empty: there is no remark.
    """

    held_out: str
    method: str
    seed: int
    how: str
    accuracy: float
    note: str = ""


def run(folder: Path, variant: str = "small", data: str = "data", jobs: int = 1) -> list[Row]:
    """Run the study, and write ``adaptations.csv``.

    Args:
        folder: The folder of the files. Its subfolder ``runs`` has the runs; finished runs are not repeated.
        variant: ``small``: generated domains. ``shared`` and ``evidence``: a small network on the digit domains in
            ``data``. Any other: the paper's setting.
        data: The folder of the data.
        jobs: The number of runs at a time.

    Returns:
        The rows of ``adaptations.csv``.

    Raises:
        ConfigError: The data cannot be used.
        RuntimeError: Runs failed. The message has the error of each.
    """
    cells = plan(folder, variant, data)
    if errors := run_cells(cells, jobs, lambda done, total: None):
        raise RuntimeError(f"{len(errors)} of {len(cells)} runs failed: {'; '.join(f'{name}: {text}' for name, text in errors.items())}")
    rows = [row for cell in cells for row in adapted(cell)]
    _write_csv(folder / "adaptations.csv", [Row._fields, *rows])
    return rows


def plan(folder: Path, variant: str, data: str) -> list[Cell]:
    """Return the cells of the study: one run per seed, domain left out, and method."""
    keys = {"small": SMALL, "shared": SHARED, "evidence": SHARED}.get(variant, COMMON)
    if variant == "small":
        domains: Sequence[str] = SHIFTS
    else:
        keys = {**keys, "data-path": data}
        domains = DIGITS if variant == "evidence" else [source.domain for source in sources(Path(data))]
    cells = []
    for seed in SEEDS:
        for domain in domains:
            for name, method in METHODS.items():
                own = {"method": method, "hold-out": domain, "seed": seed, "name": f"{method}-without-{domain}-seed{seed}"}
                config = Usage().config({**keys, **own, "output": str((folder / "runs").resolve())})
                cells.append(Cell(config, {"method": name, "held out": domain, "seed": seed}))
    for cell in cells:
        cell.finished()  # if the folder holds other runs, this raises ConfigError before the first run
    return cells


def adapted(cell: Cell) -> Iterator[Row]:
    """Yield the accuracies of a finished run: on its known domains, and on the domain left out, before and after adapting.

    Raises:
        ConfigError: The run's folder has no models of its clients.
    """
    at = (str(cell.axes["held out"]), str(cell.axes["method"]), cell.config.seed)
    yield Row(*at, KNOWN, 100 * float(cell.rows()[-1]["accuracy"]))
    made, client = read_run(cell.path), newcomer(cell.config).drawn(0, cell.config.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    outcomes = adapt(made, client, ways(made, "all"), BATCH, device)
    if outcomes[0].before is None:
        raise ConfigError(f"{cell.path} has no models of its clients: delete the folder, and repeat the run")
    yield Row(*at, BEFORE, 100 * outcomes[0].before["accuracy"])
    for outcome in outcomes:
        yield Row(*at, outcome.how, 100 * outcome.after["accuracy"], outcome.note)


def measured(cell: Cell) -> dict[str, float]:
    """Return the accuracies (0..1) of a finished run, by the names in ``WAYS``.

    ``known domains``: on the domains of the training. ``before``: on the domain left out, by the model as it was trained.
    The other names are ways of adapting the model, each with the accuracy on the domain left out after adapting.
    """
    return {row.how: row.accuracy / 100 for row in adapted(cell)}


def _write_csv(path: Path, lines: Iterable[Iterable[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(lines)
