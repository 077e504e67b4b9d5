"""The papers' networks have the papers' numbers of parameters and layers: each derived here from the table's line."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from experiments.networks import DEEPLAB, NETWORKS, maker_of, small_stem
from fl_bn.bn.conversion import convert
from fl_bn.bn.roles import batch_norms, roles
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


def made(name: str, classes: int = 10, channels: int = 3, size: int = 32, stem: str = "auto") -> nn.Module:
    """The network without memory for its tensors."""
    with torch.device("meta"):
        return build(name, classes=classes, channels=channels, image_size=size, maker=maker_of(name, stem))


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
    assert found(made(name, classes, channels, size)) == derive(classes, channels, size) == number
    assert found(made(name, classes + 1, channels, size)) == derive(classes + 1, channels, size) != number  # control
    assert found(made(name, classes, channels, size + 8)) == derive(classes, channels, size + 8)


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
        ("alexnet-bn-small", "cbrp cbrp cbr cbr cbrp fbr fbr f"),
        ("fbn-cnn", "crb crbpd crb crbpd fr f"),
        ("fbn-cnn-small", "crb crbpd crb crbpd fr f"),
        ("lenet-cnn", "crp crp fr fr f"),
        ("lenet-cnn-bn", "cbrp cbrp fbr fbr f"),
        ("mnist-mlp", "fbr f"),
        ("abide-mlp", "fbr fbr f"),
    ],
)
def test_layers_come_in_the_order_of_the_table(name: str, layers: str) -> None:
    assert order(made(name, size=64)) == layers.replace(" ", "")


@pytest.mark.parametrize(
    ("name", "least"),
    [("digits-cnn", 4), ("alexnet-bn", 63), ("alexnet-bn-small", 32), ("fbn-cnn", 4), ("fbn-cnn-small", 4), ("lenet-cnn-bn", 16)],
)
def test_networks_take_images_down_to_the_size_that_they_name(name: str, least: int) -> None:
    assert made(name, size=least)(torch.empty(2, 3, least, least, device="meta")).shape == (2, 10)
    with pytest.raises(ValueError, match=f"image_size={least - 1}"):
        made(name, size=least - 1)


def test_small_networks_have_the_parameters_that_they_name() -> None:
    convolutions = 25 * (3 * 32 + 32 * 64) + 9 * (64 * 128 + 128 * 96 + 96 * 96)
    linear = 9 * 96 * 256 + 256 * 256 + 256 * 10 + 10
    assert found(made("alexnet-bn-small", size=64))[0] == convolutions + linear + 2 * (32 + 64 + 128 + 96 + 96 + 256 + 256) == 612_010
    assert found(made("fbn-cnn-small", size=16))[0] == 33_594


def test_the_fbn_network_ends_in_log_probabilities_on_which_cross_entropy_is_the_negative_log_likelihood() -> None:
    model = build("fbn-cnn", classes=10, image_size=8, seed=0, maker=NETWORKS["fbn-cnn"]).double()
    x, y = torch.rand(6, 3, 8, 8, dtype=torch.float64), torch.arange(6)
    out = model.eval()(x)
    assert torch.allclose(out.exp().sum(1), torch.ones(6, dtype=torch.float64))
    assert torch.allclose(F.cross_entropy(out, y), F.nll_loss(out, y), rtol=0, atol=1e-14)
    scores = model[:-1](x)
    assert not torch.allclose(F.nll_loss(scores, y), F.nll_loss(out, y))  # control: of the scores themselves it is another loss


def strides(model: nn.Module) -> int:
    return sum(module.stride == (2, 2) for module in model.modules() if isinstance(module, nn.Conv2d))


def test_stems_for_small_images() -> None:
    """The numbers of parameters are those usual for CIFAR-10."""
    for name in ("resnet18", "mobilenet_v2", "vgg11_bn"):
        assert str(made(name)) == str(made(name, stem="imagenet")) != str(made(name, stem="small"))
        assert made(name, 7, 1, stem="small")(torch.empty(2, 1, 32, 32, device="meta")).shape == (2, 7)
    small, own = made("resnet18", stem="small"), made("resnet18")
    assert (small.conv1.kernel_size, small.conv1.stride, small.conv1.padding) == ((3, 3), (1, 1), (1, 1))
    assert isinstance(small.maxpool, nn.Identity)
    assert [found(small)[0], found(own)[0]] == [11_173_962, 11_173_962 + 64 * 3 * (49 - 9)]
    assert [strides(made("mobilenet_v2", stem=stem)) for stem in ("small", "imagenet")] == [3, 5]
    assert found(made("vgg19_bn", stem="small"))[0] == 20_040_522


@pytest.mark.parametrize(("name", "size"), [("vgg11_bn", 28), ("densenet121", 32), ("simple-cnn", 32)])
def test_networks_without_a_small_stem(name: str, size: int) -> None:
    with pytest.raises(ValueError, match=name):
        small_stem(name, 10, 3, size)


SIZES = {"mobilenetv2": (4_383_139, 61), "resnet18": (12_333_923, 29), "resnet50": (26_682_211, 62)}  # for 19 classes


@pytest.mark.parametrize("encoder", SIZES)
def test_deeplab_gives_scores_per_pixel(encoder: str) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    model = made(DEEPLAB + encoder, classes=19, size=64)
    for height, width in ((64, 64), (48, 80)):
        assert model(torch.empty(2, 3, height, width, device="meta")).shape == (2, 19, height, width)
    assert (found(model)[0], len(batch_norms(model))) == SIZES[encoder]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_converts_deeplab(name: str) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    model = build("deeplab", classes=4, channels=1, image_size=32, seed=0, maker=maker_of(f"{DEEPLAB}resnet18", "auto"))
    converted = convert(model, METHODS[name]())
    assert list(roles(converted)) == list(converted.state_dict())
    if name != "in":  # the pyramid's pooled branch has one value per image and channel
        assert converted.train()(torch.rand(2, 1, 32, 32)).isfinite().all()


@pytest.mark.parametrize(("encoder", "size"), [("vgg", 32)])
def test_images_and_encoders_that_deeplab_cannot_take(encoder: str, size: int) -> None:
    with pytest.raises(ValueError, match=DEEPLAB + encoder):
        made(DEEPLAB + encoder, size=size)
