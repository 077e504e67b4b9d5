"""GN-WS, FedWon, Fixup and FedFN: convolutions of every kind, the branches of known networks, and what cannot be converted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from fl_bn import convert
from fl_bn.methods import METHODS
from fl_bn.methods.unnormalised import residual_branches
from tests.networks import seeded_network

GN, GN_WS, FEDWON, FIXUP, FEDFN = (METHODS[name]() for name in ("gn", "gn-ws", "fedwon", "fixup", "fedfn"))
GAIN = math.sqrt(2) / math.sqrt(1 - 1 / math.pi)
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
CONVOLUTIONS = [
    pytest.param(nn.Conv1d(3, 4, 3), (2, 3, 8), id="1d"),
    pytest.param(nn.Conv2d(3, 4, 3, stride=2, padding=1, padding_mode="reflect"), (2, 3, 8, 8), id="2d"),
    pytest.param(nn.Conv2d(4, 4, 3, groups=4, bias=False), (2, 4, 8, 8), id="depthwise"),
    pytest.param(nn.Conv3d(3, 4, 3), (2, 3, 8, 8, 8), id="3d"),
]


def by_hand(weight: Tensor, scaled: bool) -> Tensor:
    """Qiao et al. 2019, equations 2 and 3, or (``scaled``) Zhuang and Lyu 2024, the equation of WSConv: one output channel at a time."""
    centred = [row - row.sum() / row.numel() for row in weight.detach()]
    if scaled:
        return torch.stack([GAIN * row / math.sqrt(float(row.square().sum())) for row in centred])
    return torch.stack([row / math.sqrt(float(row.square().sum() / row.numel() + 1e-5)) for row in centred])


@pytest.mark.parametrize("method", [GN_WS, FEDWON], ids=lambda method: method.name)
@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS)
def test_a_convolution_uses_its_standardised_weights(layer: nn.Module, shape: tuple[int, ...], method: Any) -> None:
    layer, x = layer.double(), torch.randn(shape, dtype=torch.float64)
    kinds = (method, method, GN, GN_WS if method is FEDWON else FEDWON)
    converted, moved, reference, other = (convert(nn.Sequential(layer), kind)[0] for kind in kinds)
    with torch.no_grad():
        reference.weight.copy_(by_hand(layer.weight, method is FEDWON))
        moved.weight.mul_(3).add_(0.7)  # of no consequence, but for eps
    assert torch.allclose(converted(x), reference(x), rtol=0, atol=1e-12)
    assert torch.allclose(converted(x), moved(x), rtol=5e-3, atol=5e-3 if method is GN_WS else 1e-12)
    assert torch.equal(converted.weight, layer.weight)  # trained, sent and averaged as it is
    assert not torch.allclose(converted(x), layer(x), rtol=0, atol=0.05)  # controls: the plain weights, and those of the other method
    assert not torch.allclose(converted(x), other(x), rtol=0, atol=0.1)


def test_equal_weights_are_no_division_by_zero() -> None:
    layer = convert(nn.Sequential(nn.Conv2d(3, 2, 3, bias=False)), FEDWON)
    nn.init.constant_(layer[0].weight, 0.5)
    out = layer(X.float())
    out.square().sum().backward()
    assert out.abs().max() == 0
    assert layer[0].weight.grad.isfinite().all()


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
