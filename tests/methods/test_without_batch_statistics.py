"""GN-WS, Fixup and FedFN: what their conversions compute, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models

from fl_bn.composed import Unconvertible
from fl_bn.conversion import convert
from fl_bn.flower.app.normalisation import describe_layers
from fl_bn.methods import METHODS
from fl_bn.methods.residual import residual_branches
from fl_bn.methods.unnormalised import ScaleShift
from fl_bn.models import build
from fl_bn.roles import batch_norms
from tests.methods.convolutions import CONVOLUTIONS
from tests.networks import seeded_network

GN_WS, FIXUP, FEDFN = (METHODS[name]() for name in ("gn-ws", "fixup", "fedfn"))
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


# Weight standardisation


def standardised(weight: Tensor) -> Tensor:
    """Qiao et al. 2019, equations 2 and 3, one output channel at a time."""
    weight = weight.detach()
    rows = []
    for row in weight:
        mu = row.sum() / row.numel()
        sigma = math.sqrt(float((row - mu).square().sum() / row.numel() + 1e-5))
        rows.append((row - mu) / sigma)
    return torch.stack(rows)


@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS)
def test_a_convolution_uses_its_standardised_weights(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer = layer.double()
    x = torch.randn(shape, dtype=torch.float64)
    converted = convert(nn.Sequential(layer), GN_WS)[0]
    reference, doubled = convert(nn.Sequential(layer), METHODS["gn"]())[0], convert(nn.Sequential(layer), GN_WS)[0]
    with torch.no_grad():
        reference.weight.copy_(standardised(layer.weight))
        doubled.weight.mul_(3).add_(0.7)  # of no consequence
    assert torch.allclose(converted(x), reference(x), rtol=0, atol=1e-12)
    assert torch.allclose(converted(x), doubled(x), rtol=5e-3, atol=5e-3)  # but for eps
    assert torch.equal(converted.weight, layer.weight)  # trained, sent and averaged as it is
    assert not torch.allclose(converted(x), layer(x), rtol=0, atol=0.1)  # control
    flat = standardised(layer.weight).flatten(1)
    assert float(flat.mean(1).abs().max()) < 1e-12
    assert torch.allclose(flat.var(1, correction=0), torch.ones(len(flat), dtype=torch.float64), atol=1e-2)


def test_every_convolution_and_every_batch_norm_is_replaced_and_the_saved_tensors_are_the_plain_networks() -> None:
    model = seeded_network("resnet", dtype=torch.float64)
    converted = convert(model, GN_WS)
    assert not any(type(module) in (nn.Conv2d, nn.BatchNorm2d) for module in converted.modules())
    reference = convert(model, METHODS["gn"]())
    with torch.no_grad():
        for module in reference.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.copy_(standardised(module.weight))
    assert torch.allclose(converted.eval()(X), reference.eval()(X), rtol=0, atol=1e-11)
    assert converted.state_dict().keys() == reference.state_dict().keys() <= model.state_dict().keys()
    assert METHODS["gn-ws"](groups=1).layer(nn.BatchNorm2d(4)).num_groups == 1


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.ConvTranspose2d(3, 4, 2), r"^0 \(ConvTranspose2d\): weight standardisation"),
        (nn.Conv2d(1, 4, 1), "one weight per output channel"),
    ],
)
def test_convolutions_that_cannot_be_standardised(layer: nn.Module, reason: str) -> None:
    with pytest.raises(Unconvertible, match=reason):
        convert(nn.Sequential(layer, nn.BatchNorm2d(4)), GN_WS)


# Fixup


def resnet20() -> nn.Module:
    return build("resnet20", classes=10, seed=0).double()


def deviation(layer: nn.Module) -> float:
    return float(layer.weight.detach().square().mean().sqrt())


def test_the_branches_of_known_networks() -> None:
    def sizes(name: str) -> list[int]:
        with torch.device("meta"):
            model = models.get_model(name, weights=None)
        return [len(branch.weighted) for branch in residual_branches(model)]

    assert [branch.weighted for branch in residual_branches(resnet20())][3] == ("stage2_block1.conv1", "stage2_block1.conv2")
    assert len(list(residual_branches(resnet20()))) == 9
    assert sizes("resnet18") == [2] * 8
    assert sizes("resnet50") == [3] * 16
    assert sizes("mobilenet_v2") == [3] * 10
    assert sizes("vgg11_bn") == sizes("densenet121") == []  # control: the latter concatenates
    assert [branch.weighted for branch in residual_branches(seeded_network("resnet"))] == [("body.0.first",), ("body.1.first",)]


class Strange(nn.Module):
    """Its forward depends on a value, so that only its parts can be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = seeded_network("resnet")

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if x.sum() > 0 else self.body(-x)


def test_where_a_forward_cannot_be_followed_its_parts_are() -> None:
    assert [branch.weighted for branch in residual_branches(Strange())] == [("body.body.0.first",), ("body.body.1.first",)]


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_at_the_start_every_branch_yields_zero_and_its_block_is_the_identity(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = models.get_model(name, weights=None, num_classes=4)
    model = convert(plain, FIXUP).eval()
    width = 64 if name == "resnet18" else 256
    x = torch.rand(2, width, 8, 8)  # not negative, as after a ReLU
    assert torch.equal(model.layer1[1](x), x)
    assert torch.equal(model.layer2[0](x), torch.relu(model.layer2[0].downsample(x)))
    assert not torch.equal(plain.eval().layer1[1](x), x)  # control
    assert torch.equal(model(torch.rand(2, 3, 32, 32)), torch.zeros(2, 4))  # and the classifier yields 0


def test_standard_deviations_multipliers_and_biases() -> None:
    """Rule 2 with L = 9 branches of m = 2 layers: He's standard deviation times 9 ** (-1/2)."""
    model = convert(resnet20(), FIXUP)
    found = {name: deviation(m) for name, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    for name, std in found.items():
        layer = model.get_submodule(name)
        he = math.sqrt(2 / (layer.in_channels * 9))
        assert std == pytest.approx({"conv": he}.get(name, 0.0 if name.endswith("conv2") else he / 3), rel=1e-12), name
    assert found["stage1_block1.conv1"] != pytest.approx(math.sqrt(2 / 144), rel=0.1)  # control: without the factor
    source = resnet20().get_parameter("conv.weight")
    ratio = model.get_parameter("conv.weight") / source
    assert torch.allclose(ratio, ratio.mean().expand_as(ratio))  # rescaled, not drawn anew
    scales = {name: m.weight is not None for name, m in model.named_modules() if isinstance(m, ScaleShift)}
    assert len(scales) == 19
    assert {name for name, has in scales.items() if has} == {name for name in scales if name.endswith("norm2")}
    assert all(p.numel() == 1 for m in model.modules() if isinstance(m, ScaleShift) for p in m.parameters())
    assert sum(p.numel() for p in model.parameters()) == 269_722 - 1_376 + 19 + 9


def test_branches_of_three_layers_have_another_factor() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = convert(models.resnet50(weights=None), FIXUP)
    for name, fan_in in (("conv1", 256), ("conv2", 64 * 9)):  # 16 branches, m = 3: 16 ** (-1/4) = 1/2
        assert deviation(model.layer1[1].get_submodule(name)) == pytest.approx(math.sqrt(2 / fan_in) / 2, rel=1e-5)
    assert deviation(model.layer2[0].downsample[0]) == pytest.approx(math.sqrt(2 / 256), rel=1e-5)


def test_a_network_without_branches_keeps_a_multiplier_and_a_bias_per_layer() -> None:
    model = convert(seeded_network("plain", dtype=torch.float64), FIXUP)
    for name, fan_in in (("0", 27), ("4", 36)):
        assert deviation(model.get_submodule(name)) == pytest.approx(math.sqrt(2 / fan_in), rel=1e-12)
    assert [(model[i].weight.item(), model[i].bias.item()) for i in (1, 5)] == [(1, 0), (1, 0)]
    with torch.no_grad():
        model[1].weight.fill_(2.0)
        model[1].bias.fill_(-0.5)
    expected = model[4](torch.relu(2 * model[0](X) - 0.5))
    assert torch.allclose(nn.Sequential(*model)[:5](X), expected, rtol=0, atol=1e-12)


def test_a_network_without_batch_norm_is_left_alone() -> None:
    model = build("lenet-cnn", classes=10, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(convert(model, FIXUP).parameters(), model.parameters(), strict=True))


# FedFN


def test_the_features_of_the_head_have_one_length() -> None:
    model = seeded_network("resnet", dtype=torch.float64)
    converted, seen = convert(model, FEDFN).eval(), []
    original = F.linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", lambda x, *rest: seen.append(x) or original(x, *rest))
        out = converted(X).detach()
    (features,) = seen
    length = features.shape[1] ** 0.5
    assert torch.allclose(features.norm(dim=1), torch.full((len(X),), length, dtype=torch.float64), rtol=0, atol=1e-12)
    weight, bias = converted.head.weight.detach(), converted.head.bias.detach()
    assert float((out - bias).norm(dim=1).max()) <= length * float(torch.linalg.matrix_norm(weight, 2)) + 1e-12
    assert torch.equal(converted.head.weight, model.head.weight)
    with torch.no_grad():
        plain: list[Tensor] = []
        model.head.register_forward_pre_hook(lambda module, args: plain.append(args[0]))
        model.eval()(X)
    assert float((plain[0].norm(dim=1) - length).abs().min()) > 1e-3  # control


def test_scale_and_shift_of_every_batch_norm_stay() -> None:
    model = seeded_network("plain", dtype=torch.float64)
    converted = convert(model, FEDFN).eval()
    hidden = X
    for layer in [*model][:9]:
        if isinstance(layer, nn.BatchNorm2d):
            hidden = hidden * layer.weight.view(1, -1, 1, 1) + layer.bias.view(1, -1, 1, 1)
        else:
            hidden = layer.eval()(hidden)
    assert torch.allclose(converted(X), model[9](hidden * (hidden.shape[1] ** 0.5) / hidden.norm(dim=1, keepdim=True)), rtol=0, atol=1e-12)
    assert not torch.allclose(converted(X), model[9](hidden), rtol=0, atol=1e-3)  # control


def test_a_convolutional_head_sees_pixels_of_one_length() -> None:
    head = nn.Conv2d(4, 2, 1).double()
    model = convert(nn.Sequential(nn.Conv2d(3, 4, 3).double(), nn.BatchNorm2d(4).double(), head), FEDFN)
    hidden = model[:2](X)
    assert torch.allclose(model(X), head(hidden * 2 / hidden.norm(dim=1, keepdim=True)), rtol=0, atol=1e-12)


def test_a_head_of_ones_own_is_refused() -> None:
    class Own(nn.Linear): ...

    with pytest.raises(Unconvertible, match=r"^0 \(Own\): fedfn takes torch's own Linear or Conv2d for the head, .* choose gn"):
        convert(nn.Sequential(Own(3, 2)), FEDFN)


# All of them


@pytest.mark.parametrize("name", ["gn-ws", "fixup", "fedfn"])
def test_no_output_depends_on_the_other_images_of_a_batch(name: str) -> None:
    model = convert(seeded_network("plain", dtype=torch.float64), METHODS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)  # Fixup's classifier is 0 at the start
    assert not batch_norms(model)
    assert torch.allclose(model.train()(X)[:2], model(X[:2]), rtol=0, atol=1e-12)
    control = seeded_network("plain", dtype=torch.float64).train()
    assert not torch.allclose(control(X)[:2], control(X[:2]), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "said"),
    [("gn-ws", "standardise its weights"), ("fixup", "the head to 0"), ("fedfn", "scale its input of d features to length sqrt(d)")],
)
def test_the_log_says_what_else_became_of_the_network(name: str, said: str) -> None:
    model = seeded_network("plain")
    lines = list(describe_layers(model, convert(model, METHODS[name]()), METHODS[name]()))
    assert any(said in line for line in lines)
    assert not any("\n" in line for line in lines)  # the docstring's first line alone, without what it raises
    assert not any(said in line for line in describe_layers(model, convert(model, METHODS["gn"]()), METHODS["gn"]()))
