"""Name the kinds of targets, and handle tensors in the tuples, lists and dicts of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

LABELS, MASKS, VALUES, LABEL_SETS = "one label per sample", "masks", "values", "a set of labels per sample"


def kind_of(targets: Tensor) -> str:
    """Return the kind of targets.

    Returns:
        ``LABELS`` for int64 (N,), ``LABEL_SETS`` for int64 (N, K), ``MASKS`` for int64 (N, H, W),
        ``VALUES`` for floats (N,) or (N, D).
    """
    return VALUES if targets.is_floating_point() else {1: LABELS, 2: LABEL_SETS}.get(targets.ndim, MASKS)


def alike(task: str, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and targets in one shape: (B,) if one is (B, 1) and the other (B,).

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
    """Copy a batch to ``device``: its tensors, in nested tuples, lists and dicts."""
    return changed(batch, lambda part: part.to(device))


def changed(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to each tensor of a batch, in nested tuples, lists and dicts."""
    if isinstance(batch, Mapping):
        return {key: changed(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields") and not isinstance(batch, PackedSequence):
        return type(batch)(*(changed(value, change) for value in batch))
    if isinstance(batch, tuple | list) and not isinstance(batch, PackedSequence):
        return (tuple if isinstance(batch, tuple) else list)(changed(value, change) for value in batch)
    return change(batch) if isinstance(batch, Tensor | PackedSequence) else batch


def batch_size(inputs: Any, targets: Any) -> int:
    """Return the number of samples of a batch.

    Targets may be a tensor (B, ...), a list with one entry per sample, or several tensors (B, ...)
    in a tuple, list or dict. A list of tensors has one tensor per sample if its length is the
    number of inputs. But if every tensor has that length, each tensor covers the batch.

    Args:
        inputs: The inputs of the batch: tensors (B, ...), or a list with one entry per sample.
        targets: The targets of the batch. They may also be of another form if the inputs show the
            number of samples.

    Raises:
        ValueError: Neither shows how many samples the batch has.
    """
    if isinstance(targets, Tensor | np.ndarray) and targets.ndim:
        return len(targets)
    shown = next((len(x) for x in tensors_in(inputs) if x.dim()), None)
    rows = {len(y) for y in tensors_in(targets) if y.dim()}
    if isinstance(targets, list) and rows != {shown}:
        per_sample = not all(isinstance(one, Tensor) for one in targets)  # the boxes of each image, say
        if per_sample or not rows or len(targets) == shown or (isinstance(inputs, list) and len(inputs) == len(targets)):
            return len(targets)
    if len(rows) == 1:
        return rows.pop()
    if shown is None:
        raise ValueError(f"a batch of {type(inputs).__name__} and {type(targets).__name__} shows no number of samples: override read")
    return shown


def one_number(loss: Any) -> Tensor:
    """Check the loss of a batch, and return it.

    Raises:
        ValueError: ``loss`` is no tensor with one number.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    got = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r}"
    raise ValueError(f"the loss of a batch must be one number, a tensor with the mean over the batch, but it is {got}")


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield all tensors of a batch, in nested tuples, lists and dicts, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(part)
