"""Hold a client's samples, and measure statistics, loss and metrics on its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import call
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_bn.bn.layers import HybridBatchNorm
from fl_bn.bn.modules import held_layers, kept_modes
from fl_bn.bn.moments import Moments
from fl_bn.bn.observation import normalisers, observe, pooled, uncompiled
from fl_bn.bn.roles import inputs_like
from fl_bn.data.augment import Augment
from fl_bn.data.batches import to_input
from fl_bn.methods import INPUTS, NORMALISERS, StatisticsPass
from fl_bn.task import CLASSIFICATION, MetricState, Task, to_device

NO_VARIANCE = "more than 1 value per channel"
"""A part of the messages of torch and HBN about one value per channel."""
Forward = Callable[[nn.Module, Any], Any]
"""``forward(network, inputs)`` runs a network on a batch of inputs."""
PASS_BATCH = 256
"""The samples in one forward pass of a statistics pass."""


@dataclass(frozen=True)
class Samples:
    """Hold samples of one client.

    Attributes:
        x: Inputs: uint8 images (N, C, H, W), or float32 (N, ...) as the network
            takes them.
        y: Targets: classes int64 (N,); masks (N, H, W) with 255 for pixels without
            label; values float32 (N,) or (N, D); or sets of labels (N, K), each 0
            or 1.
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, index: np.ndarray, like: Tensor, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs (B, ...) and targets (B, ...) of samples ``index`` (B,).

        They have the device of ``like``, inputs its dtype. ``augment`` changes them
        before images are scaled to -1..1.
        """
        x, y = self.rows(index, augment)
        return to_input(x.to(like.device), like.dtype), y.to(like.device)

    def rows(self, index: np.ndarray, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """Return a batch, changed by ``augment``, but neither scaled nor moved."""
        chosen = torch.from_numpy(index)
        x, y = self.x.index_select(0, chosen), self.y.index_select(0, chosen)
        return (x, y) if augment is None else augment(x, y)


@contextmanager
def torch_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators of CPU and ``device`` for the block, then restore them."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every accelerator, forked or not
        with torch.cuda.device(device) if cuda else nullcontext():
            if cuda:
                torch.cuda.manual_seed(seed)
            yield


@torch.no_grad()
def statistics_pass(model: nn.Module, samples: Samples) -> dict[str, Moments]:
    """Measure the moments of every layer's inputs over all ``samples``, in evaluation mode."""
    like, how, unused = inputs_like(model), StatisticsPass.for_exchange(INPUTS), np.random.default_rng(0)
    return measured(model, (samples.batch(index, like)[0] for index in pieces(len(samples), how, unused)), how)


def pieces(n: int, how: StatisticsPass, rng: np.random.Generator, batch_size: int = PASS_BATCH) -> list[np.ndarray]:
    """Return each batch's indices, for a statistics pass over ``n`` samples.

    Moments with which training normalises (``NORMALISERS``) need random batches of
    training's ``batch_size``, on which they depend; there are none of fewer than
    two samples.
    """
    chosen = np.arange(n)
    if 0 < how.samples < n:
        chosen = np.sort(rng.choice(n, how.samples, replace=False))
    if how.measured == NORMALISERS:
        rng.shuffle(chosen)
        if len(chosen) < 2:
            return []
        batch_size = min(batch_size, len(chosen))
    # no batch of one beside others, which layers that need two activations would leave out
    most = len(chosen) // min(batch_size, 2)
    return np.array_split(chosen, max(1, min(round(len(chosen) / batch_size), most)))


@torch.no_grad()
def evaluate(model: nn.Module, data: Samples | Iterable[Any], batch_size: int = 0, task: Task = CLASSIFICATION) -> MetricState:
    """Return the metrics of ``task`` for ``model``, left in evaluation mode, on ``data``.

    For ``Samples``, a ``batch_size`` of 0 is 500, or 8 for masks, which are large.
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


@torch.no_grad()
def measured(
    model: nn.Module,
    batches: Iterable[Any],
    how: StatisticsPass,
    forward: Forward = call,
) -> dict[str, Moments]:
    """Measure the moments that ``how`` describes, of every layer, over ``batches`` of inputs.

    The model stays unchanged and in evaluation mode. If ``how.lower_layers`` is
    "hybrid", HBN's layers normalise with their mixture, as in training, but those
    of ``held_layers``. A batch that then gives a layer one value per channel is
    left out.
    """
    with measuring(model, how) as observed:
        for x in batches:
            before = {name: len(parts) for name, parts in observed.items()}
            try:
                forward(model, x)
            except ValueError as error:
                if NO_VARIANCE not in str(error):
                    raise
                for name, seen in before.items():  # the batch is left out, so its moments in earlier layers are removed
                    del observed[name][seen:]
    return pooled(observed)


@contextmanager
def measuring(model: nn.Module, how: StatisticsPass) -> Iterator[dict[str, list[Moments]]]:
    """Prepare ``model`` for a statistics pass, which adds a ``Moments`` per layer and batch."""
    held = held_layers(model)
    with kept_modes(model), uncompiled():
        model.eval()
        if how.lower_layers == "hybrid":
            for name, layer in model.named_modules():
                layer.training = isinstance(layer, HybridBatchNorm) and name not in held
        with observe(model, normalisers if how.measured == NORMALISERS else None) as observed:
            yield observed


def generators(loader: Any) -> list[torch.Generator]:
    """Return the ``torch.Generator`` objects of a DataLoader and its samplers, for checkpoints."""
    found: dict[int, torch.Generator] = {}
    seen, waiting = set[int](), [loader]
    while waiting:
        part = waiting.pop(0)
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(one := getattr(part, "generator", None), torch.Generator):
            found[id(one)] = one
        waiting += [getattr(part, name, None) for name in ("sampler", "batch_sampler")]  # which may have a generator of their own
    return list(found.values())


@contextmanager
def unmoved(loaders: Iterable[Any]) -> Iterator[None]:
    """Restore the generators of ``loaders`` at the end of the block."""
    before = {id(one): (one, one.get_state()) for loader in loaders for one in generators(loader)}
    try:
        yield
    finally:
        for one, state in before.values():
            one.set_state(state)
