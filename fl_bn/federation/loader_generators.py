"""Find the random generators from which a loader draws its batches, and keep their states while batches are only measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

PARTS = ("sampler", "batch_sampler")
"""The attributes of a loader or a sampler that may hold a sampler with a generator of its own."""


def generators(loader: Any) -> list[torch.Generator]:
    """Return the ``torch.Generator`` objects of a DataLoader and of its samplers, whose states a checkpoint stores.

    These are the loader's own generator, and those of ``sampler``, ``batch_sampler`` and ``batch_sampler.sampler``. A sampler
    of one's own may have further samplers under these names.
    """
    found: dict[int, torch.Generator] = {}
    seen, waiting = set[int](), [loader]
    while waiting:
        part = waiting.pop(0)
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(one := getattr(part, "generator", None), torch.Generator):
            found[id(one)] = one
        waiting += [getattr(part, name, None) for name in PARTS]
    return list(found.values())


@contextmanager
def unmoved(loaders: Iterable[Any]) -> Iterator[None]:
    """Restore the generators of ``loaders`` at the end of the ``with`` block, so that their next batches are as without it."""
    before = {id(one): (one, one.get_state()) for loader in loaders for one in generators(loader)}
    try:
        yield
    finally:
        for one, state in before.values():
            one.set_state(state)
