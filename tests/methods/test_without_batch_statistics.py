"""GN-WS, FedWon, Fixup and FedFN: the branches of known networks, and what cannot be converted."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from fl_bn import convert
from fl_bn.methods import METHODS
from fl_bn.methods.unnormalised import residual_branches
from tests.networks import seeded_network

GN_WS, FEDWON, FIXUP, FEDFN = (METHODS[name]() for name in ("gn-ws", "fedwon", "fixup", "fedfn"))
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def test_the_branches_of_known_networks() -> None:
    def sizes(name: str) -> list[int]:
        with torch.device("meta"):
            model = models.get_model(name, weights=None)
        return [len(branch.weighted) for branch in residual_branches(model)]

    assert sizes("resnet18") == [2] * 8
    assert sizes("resnet50") == [3] * 16
    assert sizes("mobilenet_v2") == [3] * 10
    assert sizes("vgg11_bn") == sizes("densenet121") == []  # control: the latter concatenates
    assert [branch.weighted for branch in residual_branches(Strange())] == [("body.body.0.first",), ("body.body.1.first",)]


class Strange(nn.Module):
    """Its forward depends on a value, so that only its parts can be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = seeded_network("resnet")

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if x.sum() > 0 else self.body(-x)


def deviation(layer: nn.Module) -> float:
    return float(layer.weight.detach().square().mean().sqrt())


def test_fixup_of_branches_of_three_layers() -> None:
    """Every branch yields 0, so its block is the identity; and rule 2 with L = 16, m = 3: He's deviation times 16 ** (-1/4)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = models.resnet50(weights=None, num_classes=4)
    model = convert(plain, FIXUP).eval()
    x = torch.rand(2, 256, 8, 8)  # not negative, as after a ReLU
    assert torch.equal(model.layer1[1](x), x)
    assert torch.equal(model.layer2[0](x), torch.relu(model.layer2[0].downsample(x)))
    assert not torch.equal(plain.eval().layer1[1](x), x)  # control
    assert torch.equal(model(torch.rand(2, 3, 32, 32)), torch.zeros(2, 4))  # and the classifier yields 0
    for name, fan_in in (("conv1", 256), ("conv2", 64 * 9)):
        assert deviation(model.layer1[1].get_submodule(name)) == pytest.approx(math.sqrt(2 / fan_in) / 2, rel=1e-5)
    assert deviation(model.layer2[0].downsample[0]) == pytest.approx(math.sqrt(2 / 256), rel=1e-5)


def test_a_convolutional_head_sees_pixels_of_one_length() -> None:
    head = nn.Conv2d(4, 2, 1).double()
    model = convert(nn.Sequential(nn.Conv2d(3, 4, 3).double(), nn.BatchNorm2d(4).double(), head), FEDFN)
    hidden = model[:2](X)
    assert torch.allclose(model(X), head(hidden * 2 / hidden.norm(dim=1, keepdim=True)), rtol=0, atol=1e-12)


class OwnConvolution(nn.Conv2d): ...


class OwnHead(nn.Linear): ...


def test_what_cannot_be_converted_is_refused() -> None:
    layers = (nn.ConvTranspose2d(3, 4, 2), OwnConvolution(3, 4, 2), nn.Conv2d(1, 4, 1))
    wrong = [(method, layer) for method in (GN_WS, FEDWON) for layer in layers]
    for method, layer in [*wrong, (FEDWON, nn.Linear(3, 4)), (FEDFN, OwnHead(4, 2))]:
        with pytest.raises(ValueError, match="use fedfn|use gn|choose gn"):
            convert(nn.Sequential(nn.BatchNorm2d(4), layer), method)
