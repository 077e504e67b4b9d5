"""Define the baselines with group, layer, instance and static batch normalisation.

Group Normalization, Wu and He, ECCV 2018; The Non-IID Data Quagmire of
Decentralized Machine Learning, Hsieh et al., ICML 2020. Everything is averaged as
in FedAvg.

GN with weight standardisation: convolutions normalise their weights, too
(Micro-Batch Training with Batch-Channel Normalization and Weight Standardization,
Qiao, Wang, Liu, Shen, Yuille, 2019, equations 2-3). ``W^ = (W - mean(W)) /
sqrt(var(W) + eps)``, with the (biased) variance over the inputs of each output
channel. W itself is trained and sent.

Static BN: batch statistics in training, and statistics measured before each
evaluation. HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients, Diao, Ding, Tarokh, ICLR 2021, section 3 (sBN). In the paper
clients report them once, and layers below the measured one use batch statistics,
which is exact in the first layer only. Here passes follow until all layers have
those of the union of all data (``Refresh.EXACT``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from fl_bn.bn.kinds import Composed, Unconvertible, composed
from fl_bn.bn.layers import InstanceNorm, SharedNorm, group_norm
from fl_bn.methods.method import Method, Refresh
from fl_bn.options import Options, option, takes

EPS = 1e-5


@dataclass(frozen=True)
class GNOptions(Options):
    """Hold the options of ``gn``. 2 groups is as in the FixBN paper, with 16 channels."""

    name: ClassVar[str] = "gn"
    groups: int = option(2, "groups per layer", ">= 1", key="groups")


@takes(GNOptions)
def gn(options: GNOptions) -> Method:
    """Make the baseline with group normalisation, ``groups`` per layer."""
    return Method("gn", layer=partial(group_norm, groups=options.groups))


def ln() -> Method:
    """Make the baseline with layer normalisation over (C, *). It has no options."""
    return Method("ln", layer=partial(group_norm, groups=1))


def instance() -> Method:
    """Make the baseline with instance normalisation, for spatial inputs. It has no options."""
    return Method("in", layer=partial(group_norm, groups=0, kind=InstanceNorm))


def standardise(weight: Tensor) -> Tensor:
    """Scale ``weight`` (O, I, *) to mean 0 and variance 1 over all axes but the first."""
    dims = list(range(1, weight.dim()))
    variance, mean = torch.var_mean(weight, dims, correction=0, keepdim=True)
    return (weight - mean) * torch.rsqrt(variance + EPS)


class Standardised(Composed):
    """Convolve with standardised weights."""

    standardise = staticmethod(standardise)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, self.standardise(weight), bias)  # type: ignore[misc, no-any-return]


def standardise_convolutions(model: nn.Module) -> nn.Module:
    """Make every convolution of ``model`` standardise its weights, in place."""
    return replace_convolutions(model, Standardised, "use gn")


def replace_convolutions(model: nn.Module, way: type[Composed], advice: str) -> nn.Module:
    """Let ``model``'s convolutions compute in the way of base class ``way``, in place.

    Raises:
        Unconvertible: a convolution is not torch's own, or it has only one weight
            per output channel. The message ends with ``advice``.
    """
    for name, module in model.named_modules():
        if not isinstance(module, _ConvNd):
            continue
        if type(module) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d) or module.weight[0].numel() == 1:
            raise Unconvertible(
                f"{name or 'the model'} ({type(module).__name__}): weight standardisation is defined for torch's own Conv1d, Conv2d and "
                f"Conv3d with several weights per output channel, and not for transposed, parametrized or derived ones: {advice}"
            )
        module.__class__ = composed(way, type(module))  # only the forward differs
    return model


@takes(GNOptions)
def gn_ws(options: GNOptions) -> Method:
    """Make the baseline with group normalisation and standardised weights."""
    return replace(gn(options.groups), name="gn-ws", prepare=standardise_convolutions)


class StaticBatchNorm(SharedNorm):
    """Normalise training batches with their own statistics, without running average."""

    def normalised(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (B, C, *): in training with its own moments."""
        if self.observation is not None:
            self.observation(self, x)
        if not self.training:
            return self.normalise_shared(x)
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


def static_bn() -> Method:
    """Make Static BN: statistics are measured for evaluation only. It has no options."""
    return Method("static-bn", layer=StaticBatchNorm.from_batch_norm, refresh=Refresh.EXACT)
