"""Measure the moments of BatchNorm layers over data (the statistics pass), and leave the network unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fl_bn.bn.layers import HybridBatchNorm
from fl_bn.bn.modes import held_layers
from fl_bn.bn.moments import Moments
from fl_bn.bn.observation import inputs, normalisers, observe, pooled, uncompiled
from fl_bn.federation.layer_by_layer import Forward, called
from fl_bn.federation.one_sample import NO_VARIANCE
from fl_bn.methods import NORMALISERS, StatisticsPass


@torch.no_grad()
def measured(
    model: nn.Module,
    batches: Iterable[Any],
    how: StatisticsPass,
    forward: Forward = called,
) -> dict[str, Moments]:
    """Measure, for every BatchNorm layer, the moments that ``how`` describes, over ``batches`` of inputs.

    The model runs in evaluation mode and stays unchanged: its gradients, its statistics and the modes of its modules. No
    random number is drawn. If ``how.lower_layers`` is "hybrid", HBN's layers run in training mode, so they normalise with
    the mixture of batch and shared statistics. Layers that the model's owner has put into evaluation mode (``held_layers``)
    stay in it. A batch that gives a layer in training mode only one value per channel is left out.

    Args:
        model: The network.
        batches: The batches of inputs.
        how: The statistics pass: which moments to measure.
        forward: A function that runs the network on a batch of inputs.

    Returns:
        Layer -> the moments over all batches.
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
    """Prepare ``model`` for the statistics pass ``how`` inside the ``with`` block.

    Yields:
        Layer -> its moments. Each forward pass adds one ``Moments`` per layer.
    """
    training = {module: module.training for module in model.modules()}
    held = held_layers(model)
    model.eval()
    if how.lower_layers == "hybrid":
        for name, layer in model.named_modules():
            layer.training = isinstance(layer, HybridBatchNorm) and name not in held
    try:
        with uncompiled(), observe(model, normalisers if how.measured == NORMALISERS else inputs) as observed:
            yield observed
    finally:
        for module, mode in training.items():
            module.training = mode
