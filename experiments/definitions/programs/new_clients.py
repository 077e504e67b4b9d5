"""Test trained models on new clients, whose digits have changed strokes. The models know five domains of digits.

Paper: Li et al.: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021,
appendix G and table 17. The new clients have MNIST with changes as in Morpho-MNIST.

Under FedBN, a new client takes the mean of the trained clients' affine parameters, and the statistics of its own
samples. FedAvg and FedProx are tested with the shared model. This study also tests them with the statistics of the
new client, which the paper does not do. The settings are in ``experiments/definitions/001-T17.toml``.
"""

from __future__ import annotations

import csv
from functools import lru_cache
from pathlib import Path

from experiments.catalogue import FOLDER
from experiments.data.digits_five import SIZE, sources
from experiments.data.shift import Limit, limited, shifted
from fl_bn.app.adapt import Newcomer, read_run
from fl_bn.app.config import RunConfig
from fl_bn.app.sweep.cells import Cell, run_cells
from fl_bn.app.sweep.file import read
from fl_bn.bn.roles import Role
from fl_bn.data.dataset import load
from fl_bn.data.images import resize
from fl_bn.data.record import Dataset
from fl_bn.federation.local import Samples, evaluate
from fl_bn.federation.recalibration import AVERAGE_AFFINE

FILE = FOLDER / "001-T17.toml"
CLIENTS = {"Morpho-global": ("none", "thin", "thick"), "Morpho-local": ("none", "swelling", "fracture")}
OWN = ", own statistics"
AXIS = "client"
WAYS = (*CLIENTS, *(f"{client}{OWN}" for client in CLIENTS))
SAMPLES = 743  # the samples of a new client, as many as a trained client has
SEED = 0  # the seed of the new clients' data, which are the same for all runs


def run(folder: Path, variant: str = "small", data: str = "data", jobs: int = 1) -> list[tuple[str, int, str, float]]:
    """Run the study, and write ``new_clients.csv`` into ``folder``.

    Args:
        folder: The folder of the files and of the runs. Finished runs are not repeated.
        variant: The variant in ``001-T17.toml``.
        data: The folder of the data.
        jobs: The number of runs at a time.

    Returns:
        The rows of the CSV file: method, seed, way of testing (a name in ``WAYS``), accuracy in percent.

    Raises:
        RuntimeError: Runs failed. The message has the error of each.
    """
    cells = plan(folder, variant, data)
    if errors := run_cells(cells, jobs, lambda done, total: None):
        raise RuntimeError(f"{len(errors)} of {len(cells)} runs failed: {'; '.join(f'{name}: {text}' for name, text in errors.items())}")
    rows = [(str(cell.axes["method"]), cell.config.seed, way, 100 * value) for cell in cells for way, value in measured(cell).items()]
    with (folder / "new_clients.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("method", "seed", "client", "accuracy"), *rows])
    return rows


def plan(folder: Path, variant: str, data: str) -> list[Cell]:
    """Return the cells of the study: one run per method and seed."""
    return read(FILE, variant, data).cells(folder)


def measured(cell: Cell) -> dict[str, float]:
    """Return the accuracies (0..1) of a finished run on the test samples of the new clients, by the names in ``WAYS``.

    The name of a client stands for its accuracy in the method's own way of testing. The name with ``OWN`` appended stands for
    its accuracy with the statistics of its own samples.
    """
    made, found = read_run(cell.path), dict[str, float]()
    shared = made.before() if made.method.shares(Role.AFFINE) else None
    for client in newcomers(cell.config):
        adapted = made.adapt(AVERAGE_AFFINE, client.x)
        found[client.name] = evaluate(adapted if shared is None else shared, client.test)["accuracy"]
        found[f"{client.name}{OWN}"] = evaluate(adapted, client.test)["accuracy"]
    return {way: found[way] for way in WAYS}


def newcomers(config: RunConfig) -> tuple[Newcomer, ...]:
    """Return the new clients of a run. Their images are changed at MNIST's size, and then resized to the run's size."""
    return _newcomers(config.dataset, config.data_path, config.image_size)


@lru_cache(maxsize=1)
def _newcomers(name: str, path: str, image_size: int) -> tuple[Newcomer, ...]:
    data = limited(_digits(name, path), Limit(SAMPLES), SEED)
    clients = []
    for client, changes in CLIENTS.items():
        changed = shifted(data, changes, SEED)
        x_train, x_test = (resize(x, image_size).expand(-1, 3, -1, -1) for x in (changed.x_train, changed.x_test))
        clients.append(Newcomer(client, x_train, Samples(x_test, changed.y_test)))
    return tuple(clients)


def _digits(name: str, path: str) -> Dataset:
    """Return digits that are bright on a dark background, as the changes need.

    If ``name`` begins with digits-five, the result is the MNIST domain of these data. Else it is the data of the run itself.
    """
    if not name.startswith("digits-five"):
        return load(name, path)
    return sources(Path(path))[-1].load(Path(path), SIZE)
