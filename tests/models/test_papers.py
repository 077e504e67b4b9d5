"""The papers' networks have the papers' numbers of parameters and layers: each derived here from the table's line."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fl_bn.bn.conversion import convert
from fl_bn.methods import METHODS
from fl_bn.models import build

Net = tuple[int, int, int]  # parameters, statistics, BatchNorm layers


def table(*lines: str) -> Net:
    """``c before after kernel`` a convolution, ``f before after`` a linear layer, both with bias; ``bn channels``."""
    parameters = statistics = norms = 0
    for line in lines:
        kind, *sizes = line.split()
        n = [int(size) for size in sizes]
        if kind == "bn":
            parameters, statistics, norms = parameters + 2 * n[0], statistics + 2 * n[0], norms + 1
        else:
            parameters += n[0] * n[1] * (n[2] ** 2 if kind == "c" else 1) + n[1]
    return parameters, statistics, norms


def found(model: nn.Module) -> Net:
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return sum(p.numel() for p in model.parameters()), sum(2 * norm.num_features for norm in norms), len(norms)


def digits(classes: int, channels: int, size: int) -> Net:
    flat = 128 * (size // 2 // 2) ** 2
    convolutions = (f"c {channels} 64 5", "bn 64", "c 64 64 5", "bn 64", "c 64 128 5", "bn 128")
    return table(*convolutions, f"f {flat} 2048", "bn 2048", "f 2048 512", "bn 512", f"f 512 {classes}")


def alexnet(classes: int, channels: int, size: int) -> Net:
    widths = ((channels, 64, 11), (64, 192, 5), (192, 384, 3), (384, 256, 3), (256, 256, 3))
    convolutions = [line for before, after, kernel in widths for line in (f"c {before} {after} {kernel}", f"bn {after}")]
    return table(*convolutions, "f 9216 4096", "bn 4096", "f 4096 4096", "bn 4096", f"f 4096 {classes}")


def fbn(classes: int, channels: int, size: int) -> Net:
    convolutions = (f"c {channels} 64 3", "bn 64", "c 64 64 3", "bn 64", "c 64 128 3", "bn 128", "c 128 128 3", "bn 128")
    return table(*convolutions, f"f {128 * (size // 4) ** 2} 128", f"f 128 {classes}")


def lenet(classes: int, channels: int, size: int) -> Net:
    flat = 16 * (((size - 4) // 2 - 4) // 2) ** 2
    return table(f"c {channels} 6 5", "c 6 16 5", f"f {flat} 120", "f 120 84", f"f 84 {classes}")


def lenet_bn(classes: int, channels: int, size: int) -> Net:
    plain, norms = lenet(classes, channels, size), table("bn 6", "bn 16", "bn 120", "bn 84")
    return plain[0] + norms[0], norms[1], norms[2]


def mnist(classes: int, channels: int, size: int) -> Net:
    return table(f"f {channels * size**2} 30", "bn 30", f"f 30 {classes}")


def abide(classes: int, channels: int, size: int) -> Net:
    return table(f"f {channels * size**2} 16", "bn 16", "f 16 16", "bn 16", f"f 16 {classes}")


def simple(classes: int, channels: int, size: int) -> Net:
    """Without the biases that a BatchNorm's shift makes redundant."""
    flat = 64 * (size // 8) ** 2
    convolutions = 9 * (channels * 16 + 16 * 32 + 32 * 64)
    rest = table("bn 16", "bn 32", "bn 64", f"f {flat} 128", f"f 128 {classes}")
    return convolutions + rest[0], rest[1], rest[2]


PAPERS = {  # classes, channels, image size; the numbers themselves
    "digits-cnn": (digits, (10, 3, 28), (14_219_210, 5_632, 5)),
    "alexnet-bn": (alexnet, (10, 3, 256), (57_063_498, 18_688, 7)),
    "fbn-cnn": (fbn, (10, 3, 32), (1_310_922, 768, 4)),
    "lenet-cnn": (lenet, (10, 3, 32), (62_006, 0, 0)),
    "lenet-cnn-bn": (lenet_bn, (10, 3, 32), (62_458, 452, 4)),
    "mnist-mlp": (mnist, (10, 1, 28), (23_920, 60, 1)),
    "abide-mlp": (abide, (2, 5995, 1), (96_306, 64, 2)),
    "simple-cnn": (simple, (10, 3, 32), (156_186, 224, 3)),
}


@pytest.mark.parametrize("name", PAPERS)
def test_sizes_are_those_of_the_table(name: str) -> None:
    derive, (classes, channels, size), number = PAPERS[name]
    with torch.device("meta"):
        model = build(name, classes=classes, channels=channels, image_size=size)
        other = build(name, classes=classes + 1, channels=channels, image_size=size)
    assert found(model) == derive(classes, channels, size) == number
    assert found(other) == derive(classes + 1, channels, size) != number  # control


@pytest.mark.parametrize("name", [name for name in PAPERS if name != "alexnet-bn"])
def test_another_image_is_another_size(name: str) -> None:
    derive, (classes, channels, size), number = PAPERS[name]
    with torch.device("meta"):
        model = build(name, classes=classes, channels=channels, image_size=size + 8)
    assert found(model) == derive(classes, channels, size + 8) != number


def test_resnet20_has_the_floats_of_fedtan() -> None:
    """271,098 floats, statistics among them; 269,722 with GN; 19 layers (FedTAN, Table 3)."""
    model = build("resnet20", classes=10)
    parameters, statistics, norms = found(model)
    assert (parameters + statistics, statistics, norms) == (271_098, 1_376, 19)
    group_normalised = convert(model, METHODS["gn"]())
    assert sum(t.numel() for t in group_normalised.state_dict().values()) == 269_722 == parameters
    projected = 16 * 32 + 2 * 32 + 32 * 64 + 2 * 64  # control: shortcuts of option B would have weights and norm layers
    assert parameters + projected != 269_722


def order(model: nn.Module) -> str:
    short = {"Conv2d": "c", "Linear": "f", "BatchNorm2d": "b", "BatchNorm1d": "b", "ReLU": "r", "MaxPool2d": "p", "Dropout": "d"}
    return "".join(short.get(type(module).__name__, "") for module in model.modules() if not list(module.children()))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("digits-cnn", "cbrp cbrp cbr fbr fbr f"),
        ("alexnet-bn", "cbrp cbrp cbr cbr cbrp fbr fbr f"),
        ("fbn-cnn", "crb crbpd crb crbpd fr f"),
        ("fbn-cnn-small", "crb crbpd crb crbpd fr f"),
        ("lenet-cnn", "crp crp fr fr f"),
        ("lenet-cnn-bn", "cbrp cbrp fbr fbr f"),
        ("mnist-mlp", "fbr f"),
        ("abide-mlp", "fbr fbr f"),
    ],
)
def test_layers_come_in_the_order_of_the_table(name: str, layers: str) -> None:
    with torch.device("meta"):
        assert order(build(name, classes=10, image_size=64)) == layers.replace(" ", "")


def test_alexnet_takes_the_papers_images_and_no_smaller_ones_than_it_says() -> None:
    with torch.device("meta"):
        model = build("alexnet-bn", classes=10, image_size=256)
        for size in (256, 63):
            assert model(torch.empty(2, 3, size, size)).shape == (2, 10)
        with pytest.raises(RuntimeError, match="small"):  # control
            model(torch.empty(2, 3, 62, 62))


def test_the_fbn_network_ends_in_log_probabilities_on_which_cross_entropy_is_the_negative_log_likelihood() -> None:
    model = build("fbn-cnn", classes=10, image_size=8, seed=0).double()
    x, y = torch.rand(6, 3, 8, 8, dtype=torch.float64), torch.arange(6)
    out = model.eval()(x)
    assert torch.allclose(out.exp().sum(1), torch.ones(6, dtype=torch.float64))
    assert torch.allclose(F.cross_entropy(out, y), F.nll_loss(out, y), rtol=0, atol=1e-14)
    scores = model[:-1](x)
    assert not torch.allclose(F.nll_loss(scores, y), F.nll_loss(out, y))  # control: of the scores themselves it is another loss
