"""A client's samples, and what is measured on them: statistics, loss and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_bn.data.augment import Augment
from fl_bn.data.dataset import to_input
from fl_bn.federation.layer_by_layer import Inputs
from fl_bn.federation.measuring import measured
from fl_bn.federation.pooling import quick_pooling
from fl_bn.methods import NORMALISERS, StatisticsPass
from fl_bn.moments import Moments
from fl_bn.roles import inputs_like
from fl_bn.task import CLASSIFICATION, MetricState, Task, to_device

Loss = Callable[[Tensor, Tensor], Tensor]
PASS_BATCH = 256
"""Samples of one forward pass that measures."""


@dataclass(frozen=True)
class Samples:
    """Samples of one client: ``x`` uint8 images (N, C, H, W), or float32 (N, ...) as the network takes them; ``y`` int64 (N,).

    ``y`` may also be masks (N, H, W), 255 where a pixel has no label, values float32 (N,) or (N, D), or sets of labels, 0 or 1 (N, K).
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, index: np.ndarray, like: Tensor, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """Inputs (B, ...) in the dtype of ``like``, images as -1..1, and labels (B,), on its device; ``augment``: changes them before."""
        x, y = self.rows(index, augment)
        return to_input(x.to(like.device), like.dtype), y.to(like.device)

    def rows(self, index: np.ndarray, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """``batch`` as it lies in memory: not yet scaled, not yet on a device."""
        chosen = torch.from_numpy(index)
        x, y = self.x[chosen], self.y[chosen]
        return (x, y) if augment is None else augment(x, y)


@contextmanager
def torch_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout and the like draw from ``seed`` inside the block; outside, torch's generators are as they were."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every accelerator, forked or not
        with torch.cuda.device(device) if cuda else nullcontext():
            if cuda:
                torch.cuda.manual_seed(seed)
            yield


@torch.no_grad()
def statistics_pass(
    model: nn.Module,
    samples: Samples,
    how: StatisticsPass,
    rng: np.random.Generator,
    batch_size: int = PASS_BATCH,
    measure: Callable[[Inputs], dict[str, Moments]] | None = None,
) -> dict[str, Moments]:
    """Moments that ``how`` asks for, of every BatchNorm layer over (a seeded random subset of) ``samples``, in evaluation mode.

    Changes nothing: no gradient, no random number but from ``rng``, no statistic, the mode of every module as before. Normalisers depend
    on how data fall into batches: they are measured in random batches of about ``batch_size``, which should be that of training. A
    normaliser needs two samples: of fewer nothing is measured. ``measure``: takes the batches of inputs in place of ``measured``.
    """
    like = inputs_like(model)
    parts = pieces(len(samples), how, rng, batch_size)

    def inputs() -> Iterator[Tensor]:
        return (samples.batch(index, like)[0] for index in parts)

    return measured(model, inputs(), how) if measure is None else measure(inputs)


def pieces(n: int, how: StatisticsPass, rng: np.random.Generator, batch_size: int = PASS_BATCH) -> list[np.ndarray]:
    """The index arrays that a statistics pass over ``n`` samples goes through; none where there are too few."""
    chosen = np.arange(n)
    if 0 < how.samples < n:
        chosen = np.sort(rng.choice(n, how.samples, replace=False))
    if how.measured == NORMALISERS:
        rng.shuffle(chosen)
        if len(chosen) < 2:
            return []
        batch_size = min(batch_size, len(chosen))
    return np.array_split(chosen, max(1, round(len(chosen) / batch_size)))


@torch.no_grad()
def evaluate(model: nn.Module, data: Samples | Iterable[Any], batch_size: int = 0, task: Task = CLASSIFICATION) -> MetricState:
    """``model`` in evaluation mode on ``data``: samples, or batches of any iterable as ``task.read`` takes them (a DataLoader's, say).

    ``batch_size``: of samples; 0: 500, or 8 with masks, which are large.
    """
    model.eval()
    state, like = task.state(), inputs_like(model)
    if isinstance(data, Samples):
        size = batch_size or (500 if data.y.ndim <= 2 else 8)
        pieces = np.array_split(np.arange(len(data)), max(1, -(-len(data) // size)))
        batches: Iterable[Any] = (data.batch(index, like) for index in pieces)
    else:
        batches = (to_device(task.read(batch), like.device) for batch in data)
    with quick_pooling(model):
        for x, y in batches:
            state.update(task.predict(model, x), y)
    return state
