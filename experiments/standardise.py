"""Standardise inputs by the published constants of a data set.

The clients' own means are not used, because they would have to leave the clients.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

STANDARDS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "mnist": ((0.1307,), (0.3081,)),
}
"""Mean and standard deviation of each channel, for pixels from 0 to 1, by data set."""


def standardised(model: nn.Module, name: str, channels: int) -> nn.Module:
    """Add a hook to ``model`` that standardises its inputs (B, C, *). ``model`` is changed in place.

    The inputs are pixels from -1 to 1. The hook first maps them to 0..1. Then it subtracts each channel's mean in the data
    set ``name``, and divides by the channel's standard deviation there. The hook adds no tensor to the state_dict. So
    saved weights can be loaded into the network without the hook, if its inputs are standardised in another way.

    Args:
        model: the network.
        name: one of ``STANDARDS``, or ``none`` for no change.
        channels: number of channels of the images.

    Returns:
        ``model``.

    Raises:
        ValueError: the constants are for another number of channels.
    """
    if name == "none":
        return model
    mean, deviation = STANDARDS[name]
    if len(mean) != channels:
        raise ValueError(f"standardise={name!r} has constants for {len(mean)} channels, but the images have {channels}: set it to 'none'")
    model.register_forward_pre_hook(partial(_standardise, mean, deviation))
    return model


def _standardise(mean: tuple[float, ...], deviation: tuple[float, ...], model: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    (x,) = args
    shape = (1, -1, *([1] * (x.dim() - 2)))
    centre, scale = (torch.tensor(v, dtype=x.dtype, device=x.device).view(shape) for v in (mean, deviation))
    return (x / 2 + 0.5 - centre) / scale
