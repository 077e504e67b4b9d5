"""FedWon: what a scaled standardised convolution computes, by hand, and that a network of them trains."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn.composed import Unconvertible
from fl_bn.conversion import convert
from fl_bn.federation.local import Samples
from fl_bn.flower.app.normalisation import describe_layers
from fl_bn.methods import METHODS
from fl_bn.methods.fedwon import GAIN, scaled_standardise
from fl_bn.methods.unnormalised import ScaleShift
from fl_bn.roles import Role, batch_norms, roles
from tests.in_process import run
from tests.methods.convolutions import CONVOLUTIONS
from tests.networks import seeded_network

Clients = Callable[..., list[Samples]]
FEDWON, GN_WS = METHODS["fedwon"](), METHODS["gn-ws"]()
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def by_hand(weight: Tensor) -> Tensor:
    """Zhuang and Lyu 2024, the equation of WSConv, one output channel at a time."""
    rows = []
    for row in weight.detach():
        mu, n = row.sum() / row.numel(), row.numel()
        sigma = math.sqrt(float((row - mu).square().sum() / n))
        rows.append(math.sqrt(2) / math.sqrt(1 - 1 / math.pi) * (row - mu) / (sigma * math.sqrt(n)))
    return torch.stack(rows)


@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS)
def test_a_convolution_uses_its_scaled_standardised_weights(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer = layer.double()
    x = torch.randn(shape, dtype=torch.float64)
    converted = convert(nn.Sequential(layer), FEDWON)[0]
    reference, moved = convert(nn.Sequential(layer), METHODS["gn"]())[0], convert(nn.Sequential(layer), FEDWON)[0]
    with torch.no_grad():
        reference.weight.copy_(by_hand(layer.weight))
        moved.weight.mul_(3).add_(0.7)  # of no consequence
    assert torch.allclose(converted(x), reference(x), rtol=0, atol=1e-12)
    assert torch.allclose(converted(x), moved(x), rtol=0, atol=1e-12)
    assert torch.equal(converted.weight, layer.weight)  # trained, sent and averaged as it is
    assert not torch.allclose(converted(x), layer(x), rtol=0, atol=0.05)  # controls: the plain weights, and those of gn-ws
    assert not torch.allclose(converted(x), convert(nn.Sequential(layer), GN_WS)[0](x), rtol=0, atol=0.1)


@pytest.mark.parametrize("scale", [1e-2, 1.0, 100.0])
def test_the_weights_have_mean_0_and_variance_1_over_fan_in_but_for_the_gain(scale: float) -> None:
    weight = scale * torch.randn(5, 7, 3, 3, dtype=torch.float64)
    flat = scaled_standardise(weight).flatten(1)
    assert float(flat.mean(1).abs().max()) < 1e-12
    assert torch.allclose(flat.var(1, correction=0), torch.full((5,), GAIN**2 / 63, dtype=torch.float64), rtol=1e-9)


def test_equal_weights_are_no_division_by_zero() -> None:
    weight = torch.full((2, 3, 3, 3), 0.5, requires_grad=True)
    scaled_standardise(weight).square().sum().backward()
    assert scaled_standardise(weight).abs().max() == 0
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


def test_the_gain_keeps_the_variance_through_many_layers_of_relu() -> None:
    """What it is for (Brock et al. 2021, section 4.3); without it each layer loses two thirds."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.ReLU(), nn.Conv2d(256, 256, 1, bias=False)) for _ in range(8)]
        x = torch.randn(2, 256, 8, 8)
    with torch.no_grad():
        assert 0.5 < float(convert(nn.Sequential(*layers), FEDWON)(x).var(dim=(0, 2, 3)).mean()) < 2
        plain = x
        for layer in layers:
            weight = scaled_standardise(layer[1].weight) / GAIN
            plain = nn.functional.conv2d(plain.relu(), weight)
        assert float(plain.var(dim=(0, 2, 3)).mean()) < 0.01  # control


def test_no_normalisation_is_left_and_scale_and_shift_are_the_gain_and_bias_of_nf_nets() -> None:
    model = seeded_network("resnet", dtype=torch.float64)
    converted = convert(model, FEDWON)
    assert not any(type(module) in (nn.Conv2d, nn.BatchNorm2d) for module in converted.modules())
    assert not batch_norms(converted)
    assert set(roles(converted).values()) == {Role.WEIGHT, Role.OTHER_AFFINE}
    assert converted.state_dict().keys() <= model.state_dict().keys()
    convolution, norm = converted.stem[0], converted.stem[1]
    assert isinstance(norm, ScaleShift)
    fused = nn.functional.conv2d(X, by_hand(convolution.weight) * norm.weight.view(-1, 1, 1, 1), norm.bias, padding=1)
    assert torch.allclose(converted.stem[:2](X), fused, rtol=0, atol=1e-12)


def test_no_output_depends_on_the_other_images_of_a_batch() -> None:
    model = convert(seeded_network("plain", dtype=torch.float64), FEDWON).train()
    assert torch.allclose(model(X)[:2], model(X[:2]), rtol=0, atol=1e-12)
    control = seeded_network("plain", dtype=torch.float64).train()
    assert not torch.allclose(control(X)[:2], control(X[:2]), rtol=0, atol=1e-3)


class Own(nn.Conv2d): ...


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.ConvTranspose2d(3, 4, 2), r"^0 \(ConvTranspose2d\): weight standardisation .*: use fedfn, fixup or gn"),
        (Own(3, 4, 2), r"^0 \(Own\): weight standardisation"),
        (nn.Conv2d(1, 4, 1), "one weight per output channel"),
        (nn.Linear(3, 4), "the model has BatchNorm and no convolution: use fedfn"),
    ],
)
def test_what_cannot_be_converted_is_refused(layer: nn.Module, reason: str) -> None:
    with pytest.raises(Unconvertible, match=reason):
        convert(nn.Sequential(layer, nn.BatchNorm2d(4)), FEDWON)


def test_it_trains_and_sends_no_statistics(tiny_clients: Clients) -> None:
    clients = tiny_clients((12, 9, 10))
    ran = run(FEDWON, clients, 12, policy={"rate": lambda round, rounds: 0.05})
    losses = [record.loss for record in ran.records]
    assert np.isfinite(losses).all()
    assert min(losses[-3:]) < losses[0]
    assert set(ran.records[0].bytes_up) == {"weights"}
    assert all(np.isfinite(array).all() for array in ran.trajectory[12].values())


def test_the_log_says_what_became_of_the_network() -> None:
    model = seeded_network("plain")
    assert any("divide them by the root of its fan-in" in line for line in describe_layers(model, convert(model, FEDWON), FEDWON))
    assert not any("fan-in" in line for line in describe_layers(model, convert(model, GN_WS), GN_WS))
