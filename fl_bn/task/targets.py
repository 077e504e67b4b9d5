"""Name the kinds of targets, and handle tensors in nested tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

LABELS, MASKS, VALUES, LABEL_SETS = "one label per sample", "masks", "values", "a set of labels per sample"


def kind_of(targets: Tensor) -> str:
    """Return the kind of targets: int64 labels (N,), sets (N, K) or masks (N, H, W), or float values."""
    return VALUES if targets.is_floating_point() else {1: LABELS, 2: LABEL_SETS}.get(targets.ndim, MASKS)


def alike(task: str, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and targets in one shape: (B,) if one is (B, 1) and the other (B,).

    Nothing is broadcast. ``task`` is the task's name, for the message.

    Raises:
        ValueError: the shapes differ in any other way.
    """
    if output.shape == targets.shape:
        return output, targets
    if output.numel() == targets.numel() == len(targets):
        return output.reshape(-1), targets.reshape(-1)
    raise ValueError(f"task {task}: outputs {tuple(output.shape)} do not fit targets {tuple(targets.shape)}: give both the same shape")


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy a batch's tensors to ``device``."""
    return changed(batch, lambda part: part.to(device))


def changed(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to each tensor of a batch."""
    if isinstance(batch, Mapping):
        return {key: changed(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields") and not isinstance(batch, PackedSequence):
        return type(batch)(*(changed(value, change) for value in batch))
    if isinstance(batch, tuple | list) and not isinstance(batch, PackedSequence):
        return (tuple if isinstance(batch, tuple) else list)(changed(value, change) for value in batch)
    return change(batch) if isinstance(batch, Tensor | PackedSequence) else batch


def batch_size(inputs: Any, targets: Any) -> int:
    """Return the number of samples of a batch.

    Targets may be a tensor (B, ...), a list with one entry per sample, or several tensors
    (B, ...) in a tuple, list or dict. A list of tensors has one per sample if its length
    is the number of inputs, unless every tensor has that length.

    Args:
        inputs: tensors (B, ...), or a list with one entry per sample.
        targets: may be of another form if the inputs show the number of samples.

    Raises:
        ValueError: neither shows how many samples the batch has.
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
    """Check a batch's loss, and return it.

    Raises:
        ValueError: it is no tensor with one number.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    got = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r}"
    raise ValueError(f"the loss of a batch must be one number, a tensor with the mean over the batch, but it is {got}")


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield all tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(part)
