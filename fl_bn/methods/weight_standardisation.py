"""Define GN with weight standardisation: convolutions normalise their weights, too, and nothing depends on a batch.

Micro-Batch Training with Batch-Channel Normalization and Weight Standardization, Qiao, Wang, Liu, Shen,
Yuille, 2019, equations 2-3.

``W^ = (W - mean(W)) / sqrt(var(W) + eps)``, with mean and (biased) variance over the inputs of each output
channel. W itself is trained, sent and averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fl_bn.bn.composed import Unconvertible
from fl_bn.methods.method import Method
from fl_bn.methods.normalisers import GNOptions, gn
from fl_bn.options import takes

EPS = 1e-5


def standardise(weight: Tensor) -> Tensor:
    """Scale ``weight`` (O, I, *) to mean 0 and, except for eps, variance 1 over all axes but the first."""
    dims = list(range(1, weight.dim()))
    variance, mean = torch.var_mean(weight, dims, correction=0, keepdim=True)
    return (weight - mean) * torch.rsqrt(variance + EPS)


class StandardisedConv1d(nn.Conv1d):
    """Convolve in one dimension with standardised weights."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, standardise(weight), bias)  # type: ignore[no-any-return]


class StandardisedConv2d(nn.Conv2d):
    """Convolve in two dimensions with standardised weights."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, standardise(weight), bias)  # type: ignore[no-any-return]


class StandardisedConv3d(nn.Conv3d):
    """Convolve in three dimensions with standardised weights."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, standardise(weight), bias)  # type: ignore[no-any-return]


KINDS: dict[type[nn.Module], type[Any]] = {
    nn.Conv1d: StandardisedConv1d,
    nn.Conv2d: StandardisedConv2d,
    nn.Conv3d: StandardisedConv3d,
}


def standardise_convolutions(model: nn.Module) -> nn.Module:
    """Make every convolution of ``model`` standardise its weights. ``model`` is changed in place, and returned."""
    return replace_convolutions(model, KINDS, "use gn")


def replace_convolutions(model: nn.Module, kinds: Mapping[type[nn.Module], type[Any]], advice: str) -> nn.Module:
    """Change the class of every convolution of ``model``, in place. Tensors, hooks and modes stay.

    Args:
        model: the network.
        kinds: old class -> new class.
        advice: what the user can do instead, for error messages.

    Returns:
        ``model``.

    Raises:
        Unconvertible: the class of a convolution is not in ``kinds``, or a convolution has only one weight per output channel.
    """
    for name, module in model.named_modules():
        if not isinstance(module, _ConvNd):
            continue
        if type(module) not in kinds:
            raise Unconvertible(
                f"{name or 'the model'} ({type(module).__name__}): weight standardisation is defined for torch's own Conv1d, Conv2d and "
                f"Conv3d, and not for transposed, parametrized or derived ones: {advice}"
            )
        if module.weight[0].numel() == 1:
            raise Unconvertible(
                f"{name or 'the model'} ({type(module).__name__}): one weight per output channel cannot be standardised: {advice}"
            )
        module.__class__ = kinds[type(module)]  # only the forward differs
    return model


@takes(GNOptions)
def gn_ws(options: GNOptions) -> Method:
    """Make the baseline with group normalisation, ``groups`` per layer, and standardised weights."""
    return replace(gn(options.groups), name="gn-ws", prepare=standardise_convolutions)
