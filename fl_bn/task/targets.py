"""Kinds of targets, and tensors in the tuples, lists and dicts of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

LABELS, MASKS, VALUES, LABEL_SETS = "one label per sample", "masks", "values", "a set of labels per sample"


def kind_of(targets: Tensor) -> str:
    """Return the kind of targets.

    Returns:
        ``LABELS`` for int64 (N,), ``LABEL_SETS`` for int64 (N, K), ``MASKS`` for int64 (N, H, W), ``VALUES``
        for floats (N,) or (N, D).
    """
    return VALUES if targets.is_floating_point() else {1: LABELS, 2: LABEL_SETS}.get(targets.ndim, MASKS)


def alike(task: str, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and targets in one shape: if one of them is (B, 1) and the other (B,), both become (B,).

    Nothing is broadcast.

    Args:
        task: the task's name, for the message.
        output: the prediction.
        targets: the targets.

    Raises:
        ValueError: the shapes differ in any other way.
    """
    if output.shape == targets.shape:
        return output, targets
    if output.numel() == targets.numel() == len(targets):
        return output.reshape(-1), targets.reshape(-1)
    raise ValueError(f"task {task}: outputs {tuple(output.shape)} do not fit targets {tuple(targets.shape)}: give both the same shape")


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy a batch to ``device``: a tensor, or a tuple, list or dict of tensors, which may be nested."""
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return (tuple if isinstance(batch, tuple) else list)(to_device(value, device) for value in batch)
    return batch.to(device) if isinstance(batch, Tensor) else batch


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield all tensors in a batch, in order. A batch is a tensor, or a tuple, list or dict that may be nested."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(part)
