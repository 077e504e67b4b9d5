"""Define FedFN: a network without BatchNorm, whose classifier receives feature vectors that all have the same length.

FedFN: Feature Normalization for Alleviating Data Heterogeneity Problem in Federated Learning, Kim, Lee, Oh,
Yun, FL@FM-NeurIPS 2023.

BatchNorm layers no longer normalise, as in the HBN paper's comparison of methods. They keep scale and shift,
since most layers before a BatchNorm have no bias. As in that comparison, features are scaled to the length sqrt(d),
for d features, so that the mean square of a feature is 1. With a length of 1, a classifier of small weights learns
very slowly. The comparison's code normalises before two linear layers, this file only before the last.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn.bn.composed import Unconvertible
from fl_bn.methods.method import Method
from fl_bn.methods.unnormalised import per_channel
from fl_bn.models.head import head_of


class NormalisedLinear(nn.Linear):
    """Apply a linear layer to inputs (*, d) that are first scaled to the Euclidean length sqrt(d)."""

    def forward(self, input: Tensor) -> Tensor:
        """Scale ``input`` (*, d) to length sqrt(d) and apply the layer."""
        return super().forward(F.normalize(input, dim=-1) * math.sqrt(input.shape[-1]))


class NormalisedConv2d(nn.Conv2d):
    """Apply a convolution after scaling the features of every pixel of the input (B, C, H, W) to the length sqrt(C)."""

    def forward(self, input: Tensor) -> Tensor:
        """Scale the pixels of ``input`` (B, C, H, W) to length sqrt(C) and apply the layer."""
        return super().forward(F.normalize(input, dim=1) * math.sqrt(input.shape[1]))


KINDS: dict[type[nn.Module], type[Any]] = {nn.Linear: NormalisedLinear, nn.Conv2d: NormalisedConv2d}


def normalise_features(model: nn.Module) -> nn.Module:
    """Make the head (the last linear layer, or else the last convolution) scale its input of d features to length sqrt(d).

    ``model`` is changed in place, and returned. The log of a run shows the first line of this docstring.

    Raises:
        Unconvertible: the model has no head, or the head is not of torch's own class Linear or Conv2d.
    """
    head = head_of(model)
    if head is None:
        raise Unconvertible("fedfn normalises the input of the last linear layer or convolution, but the model has neither")
    name, module = head
    if type(module) not in KINDS:
        raise Unconvertible(
            f"{name or 'the model'} ({type(module).__name__}): fedfn takes torch's own Linear or Conv2d for the head, not "
            f"{type(module).__module__}.{type(module).__qualname__}: replace the head by one of these before converting, or choose gn"
        )
    module.__class__ = KINDS[type(module)]  # the same tensors, hooks and modes; only the forward differs
    return model


def fedfn() -> Method:
    """Make the method FedFN: no BatchNorm, and a head that normalises its features. It has no options."""
    return Method("fedfn", layer=per_channel, prepare=normalise_features)
