"""Define the baselines without normalisation: FedFN, FedWon and Fixup.

**FedFN**: FedFN: Feature Normalization for Alleviating Data Heterogeneity Problem
in Federated Learning, Kim, Lee, Oh, Yun, FL@FM-NeurIPS 2023. The classifier's
features have equal lengths.

As in the HBN paper's comparison, BatchNorm layers keep scale and shift, since most
layers before them have no bias, and d features get the length sqrt(d). With length
1, a classifier of small weights learns very slowly. The comparison normalises
before two linear layers, this file only before the last.

**FedWon**: Triumphing Multi-domain Federated Learning Without Normalization,
Zhuang, Lyu, ICLR 2024, section 3 (scaled weight standardisation, WSConv). The
reparametrisation is that of Characterizing Signal Propagation to Close the
Performance Gap in Unnormalized ResNets, Brock, De, Smith, ICLR 2021, section 4
(NF-ResNets).

``W^ = gain * (W - mean(W)) / (std(W) * sqrt(N))``. Mean and (biased) standard
deviation are over the N weights of each output channel, its fan-in. Outputs of
independent inputs with mean square 1 have variance ``gain^2``. W itself is trained,
sent and averaged.

The gain has two factors. The fixed one is ``sqrt(2 / (1 - 1/pi))``, from ReLU(x) of
a standard normal x. The learnable one, per output channel, is as in
High-Performance Large-Scale Image Recognition Without Normalization, Brock et al.,
ICML 2021 (NF-Nets). It is the scale of the former BatchNorm, whose shift is the
bias: ``scale * (W^ x) + shift``.

The papers train with adaptive gradient clipping (NF-Nets section 4.1):
``clip='adaptive'`` in the run config. Linear layers do not change. As in FedWon,
residual branches are not scaled.

**Fixup**: Fixup Initialization: Residual Learning Without Normalization, Zhang,
Dauphin, Ma, ICLR 2019, section 3 (the three rules) and equation 5.

1. The last layer of every residual branch, and the classifier, start at 0.
2. All other layers start with He's standard deviation, ``sqrt(2 / fan_in)``,
   multiplied by ``L^(-1 / (2m - 2))`` inside a branch of m layers, for L branches
   in all.
3. Every branch ends in a scalar multiplier (1), and a scalar bias (0) replaces
   every BatchNorm.

Unlike in the paper, biases stand only in place of a BatchNorm. The network's
initial weights are rescaled, so pre-trained weights would lose their scale.
Networks without residual branches, which the paper does not cover, keep a
multiplier and a bias in place of every BatchNorm, with rule 1 (for the classifier)
and rule 2 (L = 0).

Symbols: gamma -> GAIN, N -> fan_in (FedWon); L -> branches, m -> weighted layers of
a branch (Fixup).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd

from fl_bn.bn.derived import derivation
from fl_bn.bn.kinds import Composed, Unconvertible, composed
from fl_bn.bn.layers import in_place_of
from fl_bn.methods.method import Method
from fl_bn.methods.normalisers import Standardised, replace_convolutions
from fl_bn.models.head import head_of


class ScaleShift(_NormBase):
    """Compute ``x * weight + bias`` per channel, or by scalars if ``num_features`` is 1.

    As it derives from torch's norm layers, its tensors have their roles.
    """

    def forward(self, x_BC: Tensor) -> Tensor:
        """Scale and shift ``x_BC``."""
        shape = (1, -1, *([1] * (x_BC.dim() - 2)))
        if self.weight is not None:
            x_BC = x_BC * self.weight.view(shape)
        return x_BC if self.bias is None else x_BC + self.bias.view(shape)


def per_channel(layer: _BatchNorm, features: int = 0) -> ScaleShift:
    """Make a ``ScaleShift`` from ``layer``, with 1 and 0 for other ``features``."""
    momentum = 0.1 if layer.momentum is None else layer.momentum
    new = ScaleShift(features or layer.num_features, layer.eps, momentum, layer.affine, track_running_stats=False)
    return in_place_of(new, layer)


def scalars(layer: _BatchNorm) -> ScaleShift:
    """Make a ``ScaleShift`` with scalars 1 and 0, in place of ``layer``."""
    return per_channel(layer, 1)


class Normalised(Composed):
    """Apply a layer to features of d channels scaled to the Euclidean length sqrt(d)."""

    def forward(self, input: Tensor) -> Tensor:
        """Scale ``input`` (*, d), or the pixels of (B, d, H, W), and apply the layer."""
        dim = 1 if isinstance(self, nn.Conv2d) else -1
        scaled: Tensor = super().forward(F.normalize(input, dim=dim) * math.sqrt(input.shape[dim]))
        return scaled


KINDS = (nn.Linear, nn.Conv2d)


def normalise_features(model: nn.Module) -> nn.Module:
    """Make the head (last linear layer, else convolution) scale its d features to length sqrt(d).

    Raises:
        Unconvertible: the model has no head, or it is not torch's own Linear or
            Conv2d.
    """
    name, module = head_of(model) or ("the model", model)
    if type(module) not in KINDS:
        raise Unconvertible(
            f"fedfn normalises the input of the head, torch's own last Linear or Conv2d, but {name or 'the model'} is a "
            f"{type(module).__module__}.{type(module).__qualname__}: replace the head by one of these before converting, or choose gn"
        )
    module.__class__ = composed(Normalised, type(module))  # the same tensors, hooks and modes; only the forward differs
    return model


def fedfn() -> Method:
    """Make FedFN: no BatchNorm, and a head that normalises its features. It has no options."""
    return Method("fedfn", layer=per_channel, prepare=normalise_features)


GAIN = math.sqrt(2 / (1 - 1 / math.pi))
LEAST = 1e-4  # lower bound of var(W) * N, as in NF-Nets' code; it matters only for weights that are almost equal


def scaled_standardise(weight: Tensor) -> Tensor:
    """Scale ``weight`` (O, I, *) to mean 0 and variance GAIN^2 / fan_in per output channel."""
    dims = list(range(1, weight.dim()))
    variance, mean = torch.var_mean(weight, dims, correction=0, keepdim=True)
    fan_in = weight[0].numel()
    return (weight - mean) * (GAIN * torch.rsqrt((variance * fan_in).clamp_min(LEAST)))


class ScaledStandardised(Standardised):
    """Convolve with scaled standardised weights."""

    standardise = staticmethod(scaled_standardise)


INSTEAD = "use fedfn, fixup or gn"


def scale_convolutions(model: nn.Module) -> nn.Module:
    """Make ``model``'s convolutions standardise and scale their weights, in place.

    Raises:
        Unconvertible: the model has BatchNorm but no convolution. Or a convolution
            is not torch's own, or has only one weight per output channel.
    """
    if any(isinstance(m, ScaleShift) for m in model.modules()) and not any(isinstance(m, _ConvNd) for m in model.modules()):
        raise Unconvertible(f"fedwon replaces BatchNorm by scaled convolutions, but the model has BatchNorm and no convolution: {INSTEAD}")
    return replace_convolutions(model, ScaledStandardised, INSTEAD)


def fedwon() -> Method:
    """Make FedWon: no BatchNorm, and convolutions with scaled standardised weights."""
    return Method("fedwon", layer=per_channel, prepare=scale_convolutions)


WEIGHTED = (nn.Linear, _ConvNd)


@dataclass(frozen=True)
class Branch:
    """Name a residual branch's weighted layers and norm layers, in forward order."""

    weighted: tuple[str, ...]
    norms: tuple[str, ...]


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (*WEIGHTED, _NormBase)) or super().is_leaf_module(m, module_qualified_name)


def residual_branches(model: nn.Module, prefix: str = "") -> Iterator[Branch]:
    """Yield every branch that is added to a shortcut, in forward order.

    If two paths from one tensor meet in an addition, the longer is the branch (if
    equal, the first operand). A path that contains such an addition is none. A
    module whose forward pass depends on values or shapes cannot be traced. Then its
    submodules are searched, but not its own additions. ``prefix`` is put before the
    names.
    """
    if not any(model.children()):
        return
    try:
        graph = _Tracer().trace(model)
    except Exception:  # tracing runs the user's forward on stand-ins for tensors, which may raise any exception
        for name, child in model.named_children():
            yield from residual_branches(child, f"{prefix}{name}.")
        return
    before: dict[fx.Node, frozenset[fx.Node]] = {}
    joins: set[fx.Node] = set()
    for node in graph.nodes:
        before[node] = frozenset({node}).union(*(before[earlier] for earlier in node.all_input_nodes))
        if not _adds(node) or len(node.all_input_nodes) != 2:
            continue
        first, second = (before[operand] for operand in node.all_input_nodes)
        candidates = [_branch(model, graph, side, prefix) for side in (first - second, second - first)]
        branch = max(candidates, key=lambda side: len(side.weighted))
        side = first - second if branch is candidates[0] else second - first
        if first & second and branch.weighted and not side & joins:
            yield branch
        joins.add(node)


def _adds(node: fx.Node) -> bool:
    if node.op == "call_function":
        return node.target in (operator.add, operator.iadd, torch.add)
    return node.op == "call_method" and node.target in ("add", "add_")


def _branch(model: nn.Module, graph: fx.Graph, side: frozenset[fx.Node], prefix: str) -> Branch:
    called = [str(node.target) for node in graph.nodes if node in side and node.op == "call_module"]
    weighted = [prefix + name for name in called if isinstance(model.get_submodule(name), WEIGHTED)]
    norms = [prefix + name for name in called if isinstance(model.get_submodule(name), _NormBase)]
    return Branch(tuple(dict.fromkeys(weighted)), tuple(dict.fromkeys(norms)))


@torch.no_grad()
def initialise(model: nn.Module) -> nn.Module:
    """Zero the last layers of residual branches and the head, and scale other weights by Fixup's rule.

    The last ``ScaleShift`` of each branch keeps its multiplier (rule 3). A model
    that had no BatchNorm is not changed.

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
    """Make Fixup: initial weights with which a network trains without BatchNorm."""
    return Method("fixup", layer=scalars, prepare=initialise)
