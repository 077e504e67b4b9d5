"""Iterate over batches of a client's own data, in a ``Federation``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from fl_bn.data.batches import cuts, draw_batches
from fl_bn.federation.local import Samples
from fl_bn.federation.settings import seeded
from fl_bn.federation.training import BATCHES, IndexBatches
from fl_bn.task import Task

Loader = Iterable[Any]
"""Batches to iterate over many times, such as a DataLoader or a list."""


def check_loader(whose: str, loader: Loader, again: bool = True) -> None:
    """Check that ``loader`` can be iterated over, more than once if ``again``.

    ``whose`` begins the error message, such as ``client 3``.

    Raises:
        ValueError: It is no iterable, a list of loaders, or a generator despite
            ``again``.
    """
    loaders = isinstance(loader, list | tuple) and loader and isinstance(loader[0], DataLoader | SeededBatches)
    iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if loaders or not iterable or (again and isinstance(loader, Iterator)):
        what = f"a {type(loader).__name__}{' of loaders' if loaders else ''}"
        raise ValueError(
            f"{whose}: expected batches that can be iterated over again in every round, but got {what}: give a list of batches, a "
            "DataLoader or SeededBatches"
        )


def described(loader: Loader) -> str:
    """Return type, number of samples and batch size of ``loader``, as far as it tells them."""
    samples = length_hint(getattr(loader, "dataset", None), -1)  # -1: it has no length
    told = {"samples": None if samples < 0 else samples} | {name: getattr(loader, name, None) for name in ("batch_size", "drop_last")}
    return ", ".join([type(loader).__name__, *(f"{name}={value}" for name, value in told.items() if value is not None)])


def check_not_one_batch(whose: str, loader: Loader, task: Task) -> None:
    """Check that ``loader`` is no single batch, and no list or dataset of single samples.

    A task that overrides ``read`` may take any batches.

    Raises:
        ValueError: ``loader`` is a tensor, a dict, or has tensors or samples as
            elements.
    """
    first = loader[0] if isinstance(loader, list | tuple) and loader else None
    kinds = (Mapping, torch.Tensor, TensorDataset, Subset, ConcatDataset)
    numbers = isinstance(first, list | tuple) and isinstance(first[-1], int | float | np.number)
    if type(task).read is Task.read and (isinstance(loader, kinds) or isinstance(first, torch.Tensor) or numbers):
        raise ValueError(
            f"{whose}: expected batches, but got one, or single samples, in a {type(loader).__name__}: give a list of batches, "
            "[(inputs, targets)], or DataLoader(samples, batch_size=32, shuffle=True)"
        )


def check_clients(clients: Any) -> None:
    """Raise ValueError unless ``clients`` is a list with a loader for each client."""
    several = hasattr(clients, "__len__") and hasattr(clients, "__iter__")
    if not several or isinstance(clients, Mapping | DataLoader | SeededBatches):
        raise ValueError(
            f"clients: expected a list of loaders, one for each client, but got a {type(clients).__name__}: give [loader, ...], or "
            "list(clients) of a generator, or list(clients.values()) of a dict"
        )


class SeededBatches:
    """Divide a client's samples into batches, in an order that the seed decides.

    The order depends only on seed, client and round. A single sample at the end,
    which has no variance, joins the batch before. A client with one sample trains
    only if the method needs no batch statistics.

    >>> from fl_bn import SeededBatches
    >>> batches = SeededBatches(torch.randn(20, 4), torch.zeros(20, dtype=torch.int64), batch_size=8)
    >>> [len(y) for x, y in batches.epochs(seed=0, client=0, round=1, epochs=1)]
    [8, 8, 4]

    Args:
        x: Inputs (N, ...): floats (a ``Federation`` converts them to the network's
            dtype) or whole numbers, or uint8 images (N, C, H, W), scaled to -1..1.
        y: The task's targets (N, ...).
        batch_size: The number of samples of a batch.

    Raises:
        ValueError: ``x`` and ``y`` are no tensors or differ in length,
            ``batch_size`` is no positive whole number, or ``x`` is uint8 with fewer
            than 3 axes, or has other whole numbers and more axes.
    """

    def __init__(self, x: torch.Tensor, y: torch.Tensor, batch_size: int) -> None:
        pairs = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.dim() and y.dim() and len(x) == len(y)
        if not pairs or isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            shapes = [tuple(getattr(part, "shape", ())) or type(part).__name__ for part in (x, y)]
            raise ValueError(
                f"SeededBatches takes a tensor of inputs, a tensor of as many targets, and batch_size >= 1, but got {shapes}, batch_size="
                f"{batch_size!r}"
            )
        scaled, floats = x.dtype == torch.uint8, x.is_floating_point() or x.is_complex()
        if (scaled and x.dim() < 3) or (x.dim() > 3 and not scaled and not floats):
            raise ValueError(
                f"SeededBatches scales uint8 inputs as images (N, C, H, W), and no others, but got {tuple(x.shape)} of {x.dtype}: for "
                "pixels of 0..255 give images of uint8 or x.float() / 127.5 - 1, for measurements x.float(), for indices x.long()"
            )
        self.samples, self.batch_size = Samples(x, y), batch_size
        self.dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()

    def like(self, dtype: torch.dtype) -> SeededBatches:
        """Return the same batches, with floats and images of ``dtype``."""
        made = copy(self)
        made.dtype = dtype
        return made

    def __len__(self) -> int:
        return min(1, len(self.samples)) + len(cuts(len(self.samples), self.batch_size))

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield batches in the samples' order, for statistics passes and evaluation."""
        like = torch.zeros(0, dtype=self.dtype)
        if not len(self.samples):
            return
        for index in np.split(np.arange(len(self.samples)), cuts(len(self.samples), self.batch_size)):
            yield self.samples.batch(index, like)

    def epochs(self, seed: int, client: int, round: int, epochs: int) -> IndexBatches:
        """Return batches for ``epochs`` passes of a client's round (from 1), in seeded order."""
        rng, n = seeded(seed, client, round, BATCHES), len(self.samples)
        drawn = draw_batches(n, self.batch_size, rng, epochs=epochs, least=1) if n else []
        like = torch.zeros(0, dtype=self.dtype)
        return IndexBatches(self.samples, drawn, like)


def in_dtype(loaders: Sequence[Loader], dtype: torch.dtype) -> tuple[Loader, ...]:
    """Return ``loaders``, ``SeededBatches`` in ``dtype``. A repeated one stays one object."""
    made = {id(one): one.like(dtype) if isinstance(one, SeededBatches) and one.dtype != dtype else one for one in loaders}
    return tuple(made[id(one)] for one in loaders)
