"""Define Fixup: residual networks without normalisation, thanks to their initial weights.

Fixup Initialization: Residual Learning Without Normalization, Zhang, Dauphin, Ma, ICLR 2019, section 3 (the
three rules) and equation 5.

1. The last layer of every residual branch, and the classifier, start at 0.
2. All other layers start with He's standard deviation, ``sqrt(2 / fan_in)``. Inside a branch of m layers it
is multiplied by ``L^(-1 / (2m - 2))``, for L branches in all.
3. Every branch ends in a scalar multiplier (1), and a scalar bias (0) replaces every BatchNorm.

This conversion of a given network differs from the paper's own in two things. Biases stand only in the place
of a BatchNorm, not before convolutions and linear layers. The initial weights are the network's, rescaled,
and not drawn again. So the conversion is for training from the start: pre-trained weights would lose their scale.

The paper does not cover networks without residual branches. Such networks keep a multiplier and a bias in place
of every BatchNorm, with rule 1 (for the classifier) and rule 2 (without the factor, since L = 0).

As the classifier starts at 0, the first step changes no layer below it.

Symbols: L -> branches, m -> weighted layers of a branch.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from fl_bn.bn.composed import Unconvertible
from fl_bn.bn.derived import derivation
from fl_bn.methods.method import Method
from fl_bn.methods.residual import WEIGHTED, residual_branches
from fl_bn.methods.unnormalised import ScaleShift, scalars
from fl_bn.models.head import head_of


@torch.no_grad()
def initialise(model: nn.Module) -> nn.Module:
    """Set the last layer of every residual branch and the head to 0, and scale the other weights by Fixup's rule, in place.

    The conversion has replaced BatchNorm layers by ``ScaleShift`` layers. If the model has residual branches, only the last
    ``ScaleShift`` of each branch keeps its multiplier (rule 3). A model that had no BatchNorm is not changed.

    Raises:
        Unconvertible: a layer computes its weight from other parameters.
    """
    if not any(isinstance(module, ScaleShift) for module in model.modules()):
        return model  # there was no BatchNorm to replace
    branches, head = list(residual_branches(model)), head_of(model)
    zero = {branch.weighted[-1] for branch in branches} | ({head[0]} if head else set())
    factor = {
        name: len(branches) ** (-1 / (2 * len(branch.weighted) - 2)) for branch in branches for name in branch.weighted[:-1]
    }  # in a branch of one layer, that layer is the last one and starts at 0
    ends = {branch.norms[-1] for branch in branches if branch.norms}
    for name, module in model.named_modules():
        if isinstance(module, WEIGHTED):
            if derived := derivation(module):
                raise Unconvertible(
                    f"{name or 'the model'} ({type(module).__name__}): fixup sets the initial weights, but here {derived} computes "
                    "them: remove it, or choose a method that keeps BatchNorm, or gn"
                )
            if name in zero:
                for parameter in module.parameters():
                    parameter.zero_()
            else:
                _rescale(module.weight, factor.get(name, 1.0) * math.sqrt(2 / module.weight[0].numel()))
        elif isinstance(module, ScaleShift) and branches and name not in ends:
            module.register_parameter("weight", None)
    return model


def _rescale(weight: torch.Tensor, deviation: float) -> None:
    weight.mul_(deviation / weight.square().mean().sqrt().clamp_min(torch.finfo(weight.dtype).tiny))


def fixup() -> Method:
    """Make the method Fixup: initial weights with which a network trains without BatchNorm. The method has no options."""
    return Method("fixup", layer=scalars, prepare=initialise)
