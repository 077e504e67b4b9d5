"""Batches of a client's own data, as the library's federation goes through them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from fl_bn.data.batches import cuts, draw_batches
from fl_bn.federation.local import Samples
from fl_bn.federation.settings import seeded
from fl_bn.federation.sources import BATCHES, IndexBatches

Loader = Iterable[Any]
"""Batches that can be gone through again and again: a DataLoader, a list; in a form that the task reads."""


REITERABLE = (
    "A loader is gone through in every round, and a generator is empty after its first pass: give a list of batches, a DataLoader or "
    "SeededBatches"
)


def check_loader(whose: str, loader: Loader, again: bool = True) -> None:
    """Look whether ``loader`` can be gone through, more than once if it will be gone through ``again``.

    Raises:
        ValueError: it is an iterator (a generator, ``zip``, ``map``), or no iterable at all; the message begins with ``whose``.
    """
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise ValueError(f"{whose}: expected batches, but got a {type(loader).__name__}. {REITERABLE}")
    if again and isinstance(loader, Iterator):
        raise ValueError(f"{whose}: expected batches that can be gone through again, but got a {type(loader).__name__}. {REITERABLE}")


class SeededBatches:
    """A client's samples in batches whose order depends on the seed, the client and the round alone: runs repeat bit for bit.

    ``x`` (N, ...): float inputs as the network takes them, or uint8 images (N, C, H, W), which become -1..1. ``y``: the task's targets.
    A single sample joins the batch before, since it has no variance. A client of one sample trains only where the method needs no batch
    statistics.

    >>> from fl_bn import SeededBatches
    >>> batches = SeededBatches(torch.randn(20, 4), torch.zeros(20, dtype=torch.int64), batch_size=8)
    >>> [len(y) for x, y in batches.epochs(seed=0, client=0, round=1, epochs=1)]
    [8, 8, 4]
    """

    def __init__(self, x: torch.Tensor, y: torch.Tensor, batch_size: int) -> None:
        self.samples, self.batch_size = Samples(x, y), batch_size

    def __len__(self) -> int:
        """The number of batches of one pass."""
        return min(1, len(self.samples)) + len(cuts(len(self.samples), self.batch_size))

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """In order, for measurements and evaluation."""
        like = torch.zeros(0, dtype=self.samples.x.dtype if self.samples.x.is_floating_point() else torch.get_default_dtype())
        if not len(self.samples):
            return
        for index in np.split(np.arange(len(self.samples)), cuts(len(self.samples), self.batch_size)):
            yield self.samples.batch(index, like)

    def epochs(self, seed: int, client: int, round: int, epochs: int) -> IndexBatches:
        """The batches of ``epochs`` passes in ``round``."""
        rng, n = seeded(seed, client, round, BATCHES), len(self.samples)
        drawn = draw_batches(n, self.batch_size, rng, epochs=epochs, least=1) if n else iter(())
        like = torch.zeros(0, dtype=self.samples.x.dtype if self.samples.x.is_floating_point() else torch.get_default_dtype())
        return IndexBatches(self.samples, list(drawn), like)


def generators(loader: Loader) -> list[torch.Generator]:
    """Torch's generators that a DataLoader was given: they remember where they are from one pass to the next."""
    found = [getattr(part, "generator", None) for part in (loader, getattr(loader, "sampler", None))]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
