"""Batches of a client's own samples: every one large enough to have a variance."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


class ClientTooSmall(ValueError):
    """A client has too few samples to compute batch statistics."""


def epoch_batches(n: int, batch_size: int, rng: np.random.Generator, least: int = 2, drop_last: bool = False) -> list[Indices]:
    """Return one pass over ``n`` samples in random order, as index arrays of ``batch_size``.

    The last batch may be smaller, but never a single sample, which has no variance: that sample joins the batch before.
    With ``n < batch_size`` there is one batch of all samples. ``least``: 1 where no batch statistics are needed. ``drop_last``: a smaller
    batch is left out.

    Raises:
        ClientTooSmall: if ``n`` is below ``least``, or with ``drop_last`` below ``batch_size``.
        ValueError: if ``batch_size`` is below 2.
    """
    _check(n, batch_size, least, drop_last)
    used = rng.permutation(n)[: whole(n, batch_size)] if drop_last else rng.permutation(n)
    return np.split(used, cuts(len(used), batch_size))


def whole(n: int, batch_size: int) -> int:
    """Return how many of ``n`` samples fill whole batches."""
    return n - n % batch_size


def cuts(n: int, batch_size: int) -> list[int]:
    """Where one pass over ``n`` samples is cut into batches."""
    found = list(range(batch_size, n, batch_size))
    return found[:-1] if found and n - found[-1] == 1 else found


def distinct(n: int, batch_size: int, *, epochs: int = 0, steps: int = 0, drop_last: bool = False) -> int:
    """Return how many different samples are in the batches of ``draw_batches``; 0 for a client that is too small for any.

    With ``drop_last`` this is exact within one pass. Further passes leave out other samples, so that it is a lower bound.
    """
    n = whole(n, batch_size) if drop_last else n
    whole_pass = epochs > 0 or steps > len(cuts(n, batch_size))
    return 0 if n < 2 else n if whole_pass else steps * batch_size


def draw_batches(
    n: int, batch_size: int, rng: np.random.Generator, *, epochs: int = 0, steps: int = 0, least: int = 2, drop_last: bool = False
) -> Iterator[Indices]:
    """The batches of ``epochs`` passes, or of ``steps`` local steps, over ``n`` samples; each pass is shuffled afresh.

    Steps run on into as many passes as they need; the last one may stay unfinished. ``least`` and ``drop_last``: as in ``epoch_batches``.

    Raises:
        ClientTooSmall: if ``n`` is below ``least``, or with ``drop_last`` below ``batch_size``.
        ValueError: if ``batch_size`` is below 2, or unless exactly one of ``epochs`` and ``steps`` is positive and the
            other is 0.
    """
    _check(n, batch_size, least, drop_last)
    if min(epochs, steps) != 0 or max(epochs, steps) <= 0:
        raise ValueError(f"exactly one of epochs and steps must be positive and the other 0, but got epochs={epochs} and steps={steps}")
    return _draw(n, batch_size, rng, epochs, steps, least, drop_last)


def _draw(n: int, batch_size: int, rng: np.random.Generator, epochs: int, steps: int, least: int, drop_last: bool) -> Iterator[Indices]:
    """The generator of ``draw_batches``, apart from it so that wrong arguments are reported at the call."""
    for _ in range(epochs):
        yield from epoch_batches(n, batch_size, rng, least, drop_last)
    while steps > 0:
        for batch in epoch_batches(n, batch_size, rng, least, drop_last)[:steps]:
            steps -= 1
            yield batch


def check_size(n: int, least: int = 2) -> None:
    """Raises ClientTooSmall for a client of ``n`` samples that have no variance. ``least``: 1 where no batch statistics are needed."""
    if least == 1 and n < 1:
        raise ClientTooSmall("this client has no sample")
    if n < least:
        raise ClientTooSmall(
            f"batch statistics need at least 2 samples, but this client has {n}; use fewer clients, "
            "or a partition that leaves none so small"
        )


def _check(n: int, batch_size: int, least: int, drop_last: bool) -> None:
    if batch_size < 2:
        raise ValueError(f"batch_size must be at least 2 (a batch of one has no variance), but got {batch_size}")
    check_size(n, least)
    if drop_last and n < batch_size:
        raise ClientTooSmall(
            f"drop-last leaves out a batch of fewer than {batch_size} samples, and this client has {n}; use fewer clients, a smaller "
            "batch-size, or a partition that leaves none so small"
        )
