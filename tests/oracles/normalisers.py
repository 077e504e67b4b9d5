"""Networks without batch statistics in plain PyTorch, which are trained by FedAvg: GN, LN, IN, GN with weight standardisation (Qiao et al.,
2019, equations 2 and 3), FedWon (Zhuang, Lyu, ICLR 2024), FedFN (Kim et al., 2023) and Fixup (Zhang, Dauphin, Ma, ICLR 2019)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.equivalence.row import Row
from tests.oracles.fedavg import FedAvg


class Affine(nn.BatchNorm2d):
    """Scale and shift, without normalising."""

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.weight is None else x * self.weight[:, None, None]) + self.bias[:, None, None]


class Standardised(nn.Conv2d):
    """W^ = (W - mean) / sqrt(var + 1e-5), one output channel at a time."""

    def forward(self, x: Tensor) -> Tensor:
        rows = [(row - row.mean()) / torch.sqrt(((row - row.mean()) ** 2).mean() + 1e-5) for row in self.weight]
        return F.conv2d(x, torch.stack(rows), self.bias, self.stride, self.padding)


class ScaledStandardised(nn.Conv2d):
    """W^ = γ (W - mean) / (std sqrt(N)), one output channel at a time, with γ = sqrt(2 / (1 - 1/π))."""

    def forward(self, x: Tensor) -> Tensor:
        γ, N = math.sqrt(2 / (1 - 1 / math.pi)), self.weight[0].numel()
        rows = [γ * (row - row.mean()) / torch.sqrt(((row - row.mean()) ** 2).mean() * N) for row in self.weight]
        return F.conv2d(x, torch.stack(rows), self.bias, self.stride, self.padding)


class Normalised(nn.Linear):
    """Scale the d features of each sample to the length sqrt(d)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / (x**2).sum(1, keepdim=True).sqrt() * math.sqrt(x.shape[1]))


def scalars(multiplier: bool) -> nn.Module:
    norm: Any = nn.BatchNorm2d(1).double()
    norm.__class__ = Affine
    if not multiplier:
        norm.weight = None
    return norm


def groups(count: int) -> type[nn.Module]:
    """Return a layer that normalises over so many groups of channels; 0: over each channel."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return F.group_norm(x, count or self.num_features, self.weight, self.bias, self.eps)

    return type("Groups", (nn.BatchNorm2d,), {"forward": forward})


def swap(net: nn.Module, *kinds: tuple[type[nn.Module], type[nn.Module]]) -> nn.Module:
    """Change the class of all layers, as ``kinds`` says: pairs of old and new."""
    for module in net.modules():
        module.__class__ = dict(kinds).get(type(module), type(module))
    return net


def fixup(net: nn.Module, without: int = 0) -> nn.Module:
    """Apply the three rules to a network without residual branches, or to the small ResNet, whose branches have one layer.

    ``without``: the rule that is left out, as a control: 1 for the classifier, or 2.
    """
    branches = {name for name, _ in net.named_modules() if name.endswith(".first")}
    ends = {name.replace("first", "norm") for name in branches}
    for name, module in list(net.named_modules()):
        if isinstance(module, nn.Conv2d) and name in branches:  # rule 1: the last layer of a branch is 0
            nn.init.zeros_(module.weight)
        elif isinstance(module, nn.Conv2d) and without != 2:  # rule 2: He's deviation
            module.weight.data *= math.sqrt(2 / module.weight[0].numel()) / module.weight.square().mean().sqrt().item()
        if isinstance(module, nn.Linear) and without != 1:
            nn.init.zeros_(module.weight), nn.init.zeros_(module.bias)
        if isinstance(module, nn.BatchNorm2d):  # rule 3
            parent, _, own = name.rpartition(".")
            setattr(net.get_submodule(parent), own, scalars(not branches or name in ends))
    return net


NORM, CONV, LINEAR = nn.BatchNorm2d, nn.Conv2d, nn.Linear
NETWORKS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "gn": lambda net: swap(net, (NORM, groups(2))),
    "ln": lambda net: swap(net, (NORM, groups(1))),
    "in": lambda net: swap(net, (NORM, groups(0))),
    "gn-ws": lambda net: swap(net, (NORM, groups(2)), (CONV, Standardised)),
    "fedwon": lambda net: swap(net, (NORM, Affine), (CONV, ScaledStandardised)),
    "fedfn": lambda net: swap(net, (NORM, Affine), (LINEAR, Normalised)),
    "neither": lambda net: swap(net, (NORM, Affine)),
    "BatchNorm": lambda net: net,
}


@dataclass
class Changed(FedAvg):
    change: Callable[[nn.Module], nn.Module] = swap

    def start(self) -> nn.Module:
        return self.change(super().start())


def of(change: Callable[[nn.Module], nn.Module]) -> Callable[[Row], Any]:
    """Train a changed network. Only learnt tensors are compared."""
    return lambda row: dict(Changed(row, change=change).run().named_parameters())


def trained(name: str, wrong: dict[str, Callable[[nn.Module], nn.Module]], network: str = "plain") -> Row:
    right, others = of(NETWORKS.get(name, fixup)), {other: of(change) for other, change in wrong.items() if other != name}
    return Row(f"{name}: fedavg of a {network} network in plain PyTorch", right, others, name, network=network, rate=0.02)


RULES = {f"without rule {rule}": partial(fixup, without=rule) for rule in (1, 2)}
ROWS = [trained(name, NETWORKS) for name in list(NETWORKS)[:-2]]
ROWS += [trained("fedwon", NETWORKS, "resnet"), trained("fixup", RULES), trained("fixup", RULES, "resnet")]
