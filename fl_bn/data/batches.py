"""Divide a client's samples into batches that have a variance, and make them inputs."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Indices = NDArray[np.int64]


def to_input(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert samples to a network's input.

    The constants for images are fixed. The data's own mean and deviation would
    centre better, but would have to leave the clients before training.

    >>> to_input(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([-1.,  1.])

    Args:
        x: uint8 images, which become -1..1; floats, which keep their values; or
            other whole numbers (indices of an embedding), which stay.
        dtype: of images and floats in the result.
    """
    if x.dtype == torch.uint8:
        return x.to(dtype).div_(255).sub_(0.5).div_(0.5)
    return x.to(dtype) if x.is_floating_point() else x


class ClientTooSmall(ValueError):
    """Signal that a client has too few samples for batch statistics."""


def epoch_batches(n: int, batch_size: int, rng: np.random.Generator, least: int = 2, drop_last: bool = False) -> list[Indices]:
    """Divide ``n`` samples into batches at random, for one pass.

    The last batch may be smaller, but a single sample joins the batch before, since
    it has no variance. With ``n < batch_size`` there is one batch.

    Args:
        n: number of samples.
        batch_size: samples per batch, at least 2.
        rng: draws the order.
        least: the fewest samples: 2, or 1 if training uses no batch statistics.
        drop_last: leave out a smaller last batch.

    Returns:
        One array of indices per batch.

    Raises:
        ClientTooSmall: ``n`` is below ``least``, or with ``drop_last`` below
            ``batch_size``.
        ValueError: ``batch_size`` is below 2.
    """
    if batch_size < 2:
        raise ValueError(f"batch_size must be at least 2 (a batch of one has no variance), but got {batch_size}")
    check_size(n, least)
    if drop_last and n < batch_size:
        raise ClientTooSmall(f"drop-last leaves out a batch of fewer than {batch_size} samples, and this client has {n}: add samples")
    used = rng.permutation(n)[: whole(n, batch_size)] if drop_last else rng.permutation(n)
    return np.split(used, cuts(len(used), batch_size))


def whole(n: int, batch_size: int) -> int:
    """Return how many of ``n`` samples fill whole batches."""
    return n - n % batch_size


def cuts(n: int, batch_size: int) -> list[int]:
    """Return the positions at which a pass over ``n`` samples is cut into batches."""
    positions = list(range(batch_size, n, batch_size))
    return positions[:-1] if positions and n - positions[-1] == 1 else positions


def distinct(n: int, batch_size: int, *, epochs: int = 0, steps: int = 0, drop_last: bool = False) -> int:
    """Return how many different samples the batches of ``draw_batches`` have.

    It is 0 for a client too small for any batch, or of one sample, even with
    ``least=1``. With ``drop_last`` and several passes it is a lower bound, since
    each pass leaves out other samples.
    """
    n = whole(n, batch_size) if drop_last else n
    whole_pass = epochs > 0 or steps > len(cuts(n, batch_size))
    return 0 if n < 2 else n if whole_pass else steps * batch_size


def draw_batches(
    n: int, batch_size: int, rng: np.random.Generator, *, epochs: int = 0, steps: int = 0, least: int = 2, drop_last: bool = False
) -> list[Indices]:
    """Draw the batches of ``epochs`` passes, or of ``steps`` local steps.

    Each pass has a new order. Steps take as many passes as they need.

    Args:
        n: number of samples.
        batch_size: samples per batch, at least 2.
        rng: draws the orders.
        epochs: passes, or 0.
        steps: local steps, or 0.
        least: as in ``epoch_batches``.
        drop_last: leave out a smaller last batch of a pass.

    Returns:
        Index arrays, one per step.

    Raises:
        ClientTooSmall: ``n`` is below ``least``, or with ``drop_last`` below
            ``batch_size``.
        ValueError: ``batch_size`` is below 2.
    """
    batches = list[Indices]()
    for _ in range(epochs):
        batches += epoch_batches(n, batch_size, rng, least, drop_last)
    while len(batches) < steps:
        batches += epoch_batches(n, batch_size, rng, least, drop_last)
    return batches[:steps] if steps else batches


def check_size(n: int, least: int = 2) -> None:
    """Check that a client has at least ``least`` samples."""
    if least == 1 and n < 1:
        raise ClientTooSmall("a client needs at least 1 sample, but this client has none: use fewer clients, or another partition")
    if n < least:
        raise ClientTooSmall(f"batch statistics need at least 2 samples, but this client has {n}: use fewer clients")
