"""Hold a client's samples, and measure statistics, loss and metrics on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_bn.bn.moments import Moments
from fl_bn.bn.roles import inputs_like
from fl_bn.data.augment import Augment
from fl_bn.data.dataset import to_input
from fl_bn.federation.layer_by_layer import Inputs
from fl_bn.federation.loader_generators import unmoved
from fl_bn.federation.measuring import measured
from fl_bn.methods import NORMALISERS, StatisticsPass
from fl_bn.task import CLASSIFICATION, MetricState, Task, to_device

if TYPE_CHECKING:
    from fl_bn.federation.client import LocalRound
    from fl_bn.federation.source import Source

Loss = Callable[[Tensor, Tensor], Tensor]
PASS_BATCH = 256
"""The number of samples in one forward pass of a statistics pass."""


@dataclass(frozen=True)
class Samples:
    """Hold samples of one client.

    Attributes:
        x: Inputs: uint8 images (N, C, H, W), or float32 (N, ...) as the network takes them.
        y: Targets: classes int64 (N,); masks (N, H, W) with 255 for pixels without label; values float32 (N,) or (N, D);
            or sets of labels (N, K), each 0 or 1.
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, index: np.ndarray, like: Tensor, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """Return a batch on the device of ``like``.

        Args:
            index: The indices of the samples of the batch (B,).
            like: A tensor with the device for both results, and the dtype for the inputs.
            augment: Changes inputs and targets before images are scaled. None: no changes.

        Returns:
            Inputs (B, ...), with images scaled to -1..1, and targets (B, ...).
        """
        x, y = self.rows(index, augment)
        return to_input(x.to(like.device), like.dtype), y.to(like.device)

    def rows(self, index: np.ndarray, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a batch, changed by ``augment``, but neither scaled nor moved to a device."""
        chosen = torch.from_numpy(index)
        x, y = self.x.index_select(0, chosen), self.y.index_select(0, chosen)
        return (x, y) if augment is None else augment(x, y)


@contextmanager
def torch_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators of the CPU and of ``device`` for the ``with`` block. Restore their states afterwards."""
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
    """Measure the moments that ``how`` describes, of every BatchNorm layer, in evaluation mode.

    The model stays unchanged: its gradients, its statistics and the modes of its modules. Random numbers come only from
    ``rng``. Moments with which training batches are normalised (``NORMALISERS``) depend on how samples are divided into
    batches, so for these the batches are random. With fewer than two samples, such moments are not measured.

    Args:
        model: The network.
        samples: The samples.
        how: The statistics pass: which moments to measure, and on how many random samples.
        rng: The generator of the random samples and batches.
        batch_size: The batch size. For ``NORMALISERS`` it should be the batch size of training.
        measure: A function that replaces ``measuring.measured``. It gets a function that returns the batches of inputs.

    Returns:
        Layer -> moments over all chosen samples.
    """
    like = inputs_like(model)
    parts = pieces(len(samples), how, rng, batch_size)

    def inputs() -> Iterator[Tensor]:
        return (samples.batch(index, like)[0] for index in parts)

    return measured(model, inputs(), how) if measure is None else measure(inputs)


def pieces(n: int, how: StatisticsPass, rng: np.random.Generator, batch_size: int = PASS_BATCH) -> list[np.ndarray]:
    """Return the indices of the samples of each batch, for a statistics pass over ``n`` samples.

    The list is empty if the pass measures ``NORMALISERS`` on fewer than two samples.
    """
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
    """Evaluate ``model`` in evaluation mode on ``data``. Return the task's metrics as a ``MetricState``.

    Args:
        model: The network. It stays in evaluation mode afterwards.
        data: Samples, or an iterable of batches that ``task.read`` takes (a DataLoader, say).
        batch_size: The batch size for ``Samples``. 0: 500, or 8 if the targets are masks, which are large.
        task: The task.
    """
    model.eval()
    state, like = task.state(), inputs_like(model)
    if isinstance(data, Samples):
        size = batch_size or (500 if data.y.ndim <= 2 else 8)
        pieces = np.array_split(np.arange(len(data)), max(1, -(-len(data) // size)))
        batches: Iterable[Any] = (data.batch(index, like) for index in pieces)
    else:
        batches = (to_device(task.read(batch), like.device) for batch in data)
    for x, y in batches:
        state.update(task.predict(model, x), y)
    return state


def tested(round: LocalRound, source: Source) -> float | None:
    """Evaluate a client's network as it is now on the client's own test data, by the task's metric.

    The network and the modes of its modules stay unchanged. So do torch's random generators of the CPU and of the network's
    device, and those of the test data's loader.

    Returns:
        The value of the metric. None without test data or ``local_evaluation``, or if the value is not finite.
    """
    if source.test is None or not round.settings.local_evaluation:
        return None
    modes = {module: module.training for module in round.model.modules()}
    try:
        cuda = [device] if (device := inputs_like(round.model).device).type == "cuda" else []
        with torch.random.fork_rng(devices=cuda), unmoved([source.test]):
            state = evaluate(round.model, source.test, task=source.task)
    finally:
        for module, mode in modes.items():
            module.training = mode
    value = state[source.task.metric] if state.sums else math.nan
    return value if math.isfinite(value) else None
