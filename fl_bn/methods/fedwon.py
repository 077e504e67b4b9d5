"""Define FedWon: a network without BatchNorm, whose convolutions use scaled standardised weights.

FedWon: Triumphing Multi-domain Federated Learning Without Normalization, Zhuang, Lyu, ICLR 2024, section 3
(scaled weight standardisation, WSConv). The reparametrisation is that of Characterizing Signal Propagation to
Close the Performance Gap in Unnormalized ResNets, Brock, De, Smith, ICLR 2021, section 4 (NF-ResNets).

``W^ = gain * (W - mean(W)) / (std(W) * sqrt(N))``. Mean and (biased) standard deviation are over the N weights of
each output channel, its fan-in. Inputs of independent channels with mean square 1 yield outputs of variance
``gain^2``, and the weights add no shift to the outputs' mean. W itself is trained, sent and averaged.

The gain has two factors. The fixed one, as in FedWon, is ``sqrt(2 / (1 - 1/pi))``: one over the standard
deviation of ReLU(x) for a standard normal x. It is exact for ReLU, and
nearly right for similar functions.

The learnable factor, one per output channel, is as in High-Performance Large-Scale Image Recognition Without
Normalization, Brock et al., ICML 2021 (NF-Nets). It is the scale of the former BatchNorm, whose shift is the
bias: ``scale * (W^ x) + shift`` is NF-Nets' convolution with gain and bias. Most networks' convolutions before a
BatchNorm have no bias of their own, so this shift is their only bias.

The papers train with adaptive gradient clipping (AGC, NF-Nets section 4.1) at the client: ``clip='adaptive'``
in the run config. Linear layers do not change. Residual branches are not scaled as in NF-ResNets (alpha and
beta there), because FedWon does without it.

Symbols: gamma -> GAIN, N -> fan_in.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fl_bn.bn.composed import Unconvertible
from fl_bn.methods.method import Method
from fl_bn.methods.unnormalised import ScaleShift, per_channel
from fl_bn.methods.weight_standardisation import replace_convolutions

GAIN = math.sqrt(2 / (1 - 1 / math.pi))
LEAST = 1e-4  # lower bound of var(W) * N, as in NF-Nets' code; it matters only for weights that are almost equal


def scaled_standardise(weight: Tensor) -> Tensor:
    """Scale ``weight`` (O, I, *) to mean 0 and variance GAIN^2 / fan_in over all axes but the first."""
    dims = list(range(1, weight.dim()))
    variance, mean = torch.var_mean(weight, dims, correction=0, keepdim=True)
    fan_in = weight[0].numel()
    return (weight - mean) * (GAIN * torch.rsqrt((variance * fan_in).clamp_min(LEAST)))


class ScaledStandardisedConv1d(nn.Conv1d):
    """Convolve in one dimension with scaled standardised weights."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, scaled_standardise(weight), bias)  # type: ignore[no-any-return]


class ScaledStandardisedConv2d(nn.Conv2d):
    """Convolve in two dimensions with scaled standardised weights."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, scaled_standardise(weight), bias)  # type: ignore[no-any-return]


class ScaledStandardisedConv3d(nn.Conv3d):
    """Convolve in three dimensions with scaled standardised weights."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, scaled_standardise(weight), bias)  # type: ignore[no-any-return]


KINDS: dict[type[nn.Module], type[Any]] = {
    nn.Conv1d: ScaledStandardisedConv1d,
    nn.Conv2d: ScaledStandardisedConv2d,
    nn.Conv3d: ScaledStandardisedConv3d,
}
INSTEAD = "use fedfn, fixup or gn"


def scale_convolutions(model: nn.Module) -> nn.Module:
    """Make every convolution of ``model`` standardise its weights and divide them by the root of its fan-in.

    The weights of each output channel then have mean 0 and variance ``GAIN**2 / fan_in`` (``scaled_standardise``). For this,
    the class of each convolution changes. ``model`` is changed in place, and returned. The log of a run shows the first line
    of this docstring.

    Raises:
        Unconvertible: the model has BatchNorm but no convolution. Or a convolution is not of torch's own class Conv1d,
            Conv2d or Conv3d, or has only one weight per output channel.
    """
    if any(isinstance(m, ScaleShift) for m in model.modules()) and not any(isinstance(m, _ConvNd) for m in model.modules()):
        raise Unconvertible(f"fedwon replaces BatchNorm by scaled convolutions, but the model has BatchNorm and no convolution: {INSTEAD}")
    return replace_convolutions(model, KINDS, INSTEAD)


def fedwon() -> Method:
    """Make the method FedWon: no BatchNorm, and convolutions with scaled standardised weights. It has no options."""
    return Method("fedwon", layer=per_channel, prepare=scale_convolutions)
