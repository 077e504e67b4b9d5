"""Show how a run's data are divided among the clients, as a table and a picture, without training."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_bn.data.partition import Indices, label_counts
from fl_bn.run.assembly import dataset, partitions, shape
from fl_bn.run.config import SITES, ConfigError, RunConfig
from fl_bn.run.pictures import draw_labels


def write(config: RunConfig, folder: Path) -> tuple[Path, Path]:
    """Write the partition of a run to ``counts.csv`` and ``labels.png``.

    counts.csv has one line per client, or one per client and domain if the data have domains. A line has the number
    of samples of each class and their total. For masks, it has the number of pixels of each class and the number of
    images. For samples without a class, it has the total only.

    Args:
        config: The run config.
        folder: The folder of the files.

    Returns:
        The paths of both files.

    Raises:
        DataNotFound: A file of the data is missing.
        ConfigError: The data are at the sites, or cannot be divided as configured.
    """
    if config.dataset == SITES:
        raise ConfigError(f"dataset={SITES!r}: every client has data of its own, so there is no partition to show")
    data, parts = dataset(config), [part.numpy() for part in partitions(config)]
    domains = np.zeros(len(data.y_train), dtype=np.int64) if data.domain_train is None else data.domain_train.numpy()
    names = data.domains or ("",)
    rows = _counts(data.y_train.numpy(), domains, parts, shape(config)[0])
    folder.mkdir(parents=True, exist_ok=True)
    table, picture = folder / "counts.csv", folder / "labels.png"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["client", "domain", *(f"class-{label}" for label in range(len(rows[0][2]))), "total"])
        writer.writerows([client, names[domain], *counts.tolist(), total] for client, domain, counts, total in rows)
    counted = label_counts(data.y_train.numpy(), parts, shape(config)[0]).tolist()
    totals = {client: counts or [len(part)] for client, (counts, part) in enumerate(zip(counted, parts, strict=True))}
    held = {name: [int((domains[part] == index).sum()) for part in parts] for index, name in enumerate(names)}
    draw_labels(totals, config, picture, held if data.domains else None)
    return table, picture


def _counts(
    labels: NDArray[np.int64], domains: NDArray[np.int64], parts: list[Indices], classes: int
) -> list[tuple[int, int, NDArray[np.int64], int]]:
    """Return ``(client, domain, samples per class, samples)`` for each client and each domain that it has samples of."""
    held = [
        (client, int(domain), part[domains[part] == domain]) for client, part in enumerate(parts) for domain in np.unique(domains[part])
    ]
    counts = label_counts(labels, [own for _, _, own in held], classes)
    return [(client, domain, row, len(own)) for (client, domain, own), row in zip(held, counts, strict=True)]
