"""Count the samples of a client, of which it tells the server before round 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import default_collate

from fl_bn.federation.checkpoint import generators, set_generators
from fl_bn.federation.loaders import check_not_one_batch
from fl_bn.task import Task, batch_size

MOST_BATCHES = 1_000_000
"""The most batches that are counted of a loader without a length."""


def samples_in(loader: Iterable[Any], task: Task) -> int:
    """Return the number of samples that a client may train on or measure in a pass over its loader.

    A sampler may draw more samples than the dataset has, and a collate function of the user's own may make several of one
    (crops of an image). So in its case a first batch is made.

    Raises:
        ValueError: ``loader`` has single samples, or is itself a single batch.
    """
    check_not_one_batch("batches(context)", loader, task)
    data: Any = getattr(loader, "dataset", None)
    if not hasattr(data, "__len__"):
        samples = 0
        for number, batch in enumerate(loader, 1):
            samples += int(batch_size(*task.read(batch)))
            if number == MOST_BATCHES:
                raise ValueError(
                    f"batches(context) has no length, and no end after {number:,} batches, so the client's samples cannot be counted: give "
                    "the batches of a finite dataset (itertools.islice(batches, 100))"
                )
        return samples
    sampler: Any = getattr(loader, "sampler", None)
    drawn: int = max(len(data), len(sampler) if hasattr(sampler, "__len__") else 0)
    size, collate = getattr(loader, "batch_size", None), getattr(loader, "collate_fn", default_collate)
    if not size or not len(data) or collate is default_collate:
        return drawn
    size = min(int(size), len(data))
    return drawn * max(1, -(-_samples_of(data, size, collate, task) // size))


def _samples_of(data: Any, rows: int, collate: Callable[[list[Any]], Any], task: Task) -> int:
    """Return how many samples ``collate`` makes of the first rows of a dataset; 0 if only the user's own loop can read its batch.

    Global random numbers are as before.

    Args:
        data: the dataset.
        rows: how many rows to take.
        collate: the DataLoader's function.
        task: reads the batch.
    """
    before = generators()
    try:
        return int(batch_size(*task.read(collate([data[index] for index in range(rows)]))))
    except Exception:  # whatever the user's dataset or function raises
        return 0
    finally:
        set_generators(before)
