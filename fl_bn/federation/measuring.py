"""Measure what normalisation layers see of data (the statistics pass), and leave the network unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fl_bn.federation.layer_by_layer import Forward, called
from fl_bn.federation.one_sample import NO_VARIANCE
from fl_bn.federation.pooling import quick_pooling
from fl_bn.layers import HybridBatchNorm, inputs, normalisers, observe, pooled
from fl_bn.methods import NORMALISERS, StatisticsPass
from fl_bn.modes import held_layers
from fl_bn.moments import Moments


@torch.no_grad()
def measured(
    model: nn.Module,
    batches: Iterable[Any],
    how: StatisticsPass,
    forward: Forward = called,
) -> dict[str, Moments]:
    """Measure the moments that ``how`` describes, of every BatchNorm layer over ``batches`` of inputs.

    The model is in evaluation mode and stays unchanged: no gradient, no random number, no statistic, the mode of every
    module as before. A batch with one value per channel in a layer that normalises as in training is left out.
    """
    with measuring(model, how) as observed:
        for x in batches:
            before = {name: len(parts) for name, parts in observed.items()}
            try:
                forward(model, x)
            except ValueError as error:
                if NO_VARIANCE not in str(error):
                    raise
                for name, seen in before.items():  # a batch of one sample is left out of the pass as of training
                    del observed[name][seen:]
    return pooled(observed)


@contextmanager
def measuring(model: nn.Module, how: StatisticsPass) -> Iterator[dict[str, list[Moments]]]:
    """Put ``model`` into the modes of the pass ``how``; each of its forward passes adds moments by BatchNorm layer."""
    training = {module: module.training for module in model.modules()}
    held = held_layers(model)
    model.eval()
    if how.lower_layers == "hybrid":
        for name, layer in model.named_modules():
            layer.training = isinstance(layer, HybridBatchNorm) and name not in held
    try:
        with quick_pooling(model), observe(model, normalisers if how.measured == NORMALISERS else inputs) as observed:
            yield observed
    finally:
        for module, mode in training.items():
            module.training = mode
