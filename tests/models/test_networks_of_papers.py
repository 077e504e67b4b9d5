"""The papers' networks have the papers' numbers of parameters and layers: each derived here from the table's line."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from experiments.networks import DEEPLAB, NETWORKS, deeplabv3plus, maker_of, small_stem, without_dropout
from experiments.standardise import STANDARDS, standardised
from fl_bn.bn.conversion import convert
from fl_bn.bn.roles import batch_norms
from fl_bn.data.dataset import to_input
from fl_bn.methods import METHODS
from fl_bn.models import build
from tests.listed import listed
from tests.networks import seeded_network
from tests.refusals import naming

Net = tuple[int, int, int]  # parameters, statistics, BatchNorm layers


def derived(table: str, classes: int, channels: int, size: int) -> Net:
    """Count what a paper's table says, layer by layer.

    cN.K: a convolution to N channels with kernel K, padded; v: not padded; k: padded, without bias. fN: a linear layer to N units, f: to
    the classes; g: without bias. b: BatchNorm. p: pooling to half of the side. =N: N features. r, d: ReLU, dropout.
    """
    parameters = statistics = norms = 0
    for layer in table.split():
        kind, numbers = layer[0], layer[1:]
        if kind in "cvk":
            after, kernel = (int(number) for number in numbers.split("."))
            parameters += channels * after * kernel**2 + (kind != "k") * after
            channels, size = after, size - (kind == "v") * (kernel - 1)
        elif kind in "fg":
            after = int(numbers or classes)
            parameters += channels * size**2 * after + (kind == "f") * after
            channels, size = after, 1
        elif kind == "b":
            parameters, statistics, norms = parameters + 2 * channels, statistics + 2 * channels, norms + 1
        elif kind == "p":
            size //= 2
        elif kind == "=":
            channels, size = int(numbers), 1
    return parameters, statistics, norms


def found(model: nn.Module) -> Net:
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return sum(p.numel() for p in model.parameters()), sum(2 * norm.num_features for norm in norms), len(norms)


def order(model: nn.Module) -> str:
    short = {"Conv2d": "c", "Linear": "f", "BatchNorm2d": "b", "BatchNorm1d": "b", "ReLU": "r", "MaxPool2d": "p", "Dropout": "d"}
    return "".join(short.get(type(module).__name__, "") for module in model.modules() if not list(module.children()))


def made(name: str, classes: int = 10, channels: int = 3, size: int = 32, stem: str = "auto") -> nn.Module:
    """The network without memory for its tensors."""
    with torch.device("meta"):
        return build(name, classes=classes, channels=channels, image_size=size, maker=maker_of(name, stem))


SMALL = "k16.3 b r p  k32.3 b r p  k64.3 b r p  "
PAPERS = {  # the table; classes, channels, image size; the number of parameters
    "digits-cnn": ("c64.5 b r p  c64.5 b r p  c128.5 b r  f2048 b r  f512 b r  f", (10, 3, 28), 14_219_210),
    "alexnet-bn": (
        "c64.11 b r p  c192.5 b r p  c384.3 b r  c256.3 b r  c256.3 b r p  =9216 f4096 b r  f4096 b r  f", (10, 3, 256), 57_063_498
    ),
    "alexnet-bn-small": (
        "k32.5 b r p  k64.5 b r p  k128.3 b r  k96.3 b r  k96.3 b r p  =864 g256 b r  g256 b r  f", (10, 3, 64), 612_010
    ),
    "fbn-cnn": ("c64.3 r b  c64.3 r b p d  c128.3 r b  c128.3 r b p d  f128 r f", (10, 3, 32), 1_310_922),
    "fbn-cnn-small": ("c16.3 r b  c16.3 r b p d  c32.3 r b  c32.3 r b p d  f32 r f", (10, 3, 16), 33_594),
    "lenet-cnn": ("v6.5 r p  v16.5 r p  f120 r  f84 r  f", (10, 3, 32), 62_006),
    "lenet-cnn-bn": ("v6.5 b r p  v16.5 b r p  f120 b r  f84 b r  f", (10, 3, 32), 62_458),
    "mnist-mlp": ("f30 b r f", (10, 1, 28), 23_920),
    "abide-mlp": ("f16 b r f16 b r f", (2, 5995, 1), 96_306),
    "simple-cnn": (SMALL + "f128 r f", (10, 3, 32), 156_186),
    "digits-cnn-small": (SMALL + "g64 b r f", (10, 3, 20), 40_858),
}  # fmt: skip


@pytest.mark.parametrize("name", PAPERS)
def test_sizes_and_order_of_layers_are_those_of_the_table(name: str) -> None:
    table, (classes, channels, size), number = PAPERS[name]
    model = made(name, classes, channels, size)
    assert found(model) == derived(table, classes, channels, size)
    assert found(model)[0] == number
    assert found(made(name, classes + 1, channels, size)) == derived(table, classes + 1, channels, size) != found(model)  # control
    assert found(made(name, classes, channels, size + 8)) == derived(table, classes, channels, size + 8)
    assert order(model) == re.sub("[0-9.= ]", "", table).translate(str.maketrans("vkg", "ccf"))


def test_dropout_can_be_switched_off() -> None:
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(without_dropout(seeded_network("cnn"))(x), seeded_network("plain")(x))
    assert not torch.equal(seeded_network("cnn")(x), seeded_network("plain")(x))  # control


def test_resnet20_has_the_floats_of_fedtan() -> None:
    """271,098 floats, statistics among them; 269,722 with GN; 19 layers (FedTAN, Table 3)."""
    model = build("resnet20", classes=10)
    parameters, statistics, norms = found(model)
    assert (parameters + statistics, statistics, norms) == (271_098, 1_376, 19)
    group_normalised = convert(model, METHODS["gn"]())
    assert sum(t.numel() for t in group_normalised.state_dict().values()) == 269_722 == parameters


@pytest.mark.parametrize(
    ("name", "least"),
    [("digits-cnn", 4), ("alexnet-bn", 63), ("alexnet-bn-small", 32), ("fbn-cnn", 4), ("fbn-cnn-small", 4), ("lenet-cnn-bn", 16)],
)
def test_networks_take_images_down_to_the_size_that_they_name(name: str, least: int) -> None:
    assert made(name, size=least)(torch.empty(2, 3, least, least, device="meta")).shape == (2, 10)
    with naming(f"image_size={least - 1}"):
        made(name, size=least - 1)


def test_the_fbn_network_ends_in_log_probabilities_on_which_cross_entropy_is_the_negative_log_likelihood() -> None:
    model = build("fbn-cnn", classes=10, image_size=8, seed=0, maker=NETWORKS["fbn-cnn"]).double()
    x, y = torch.rand(6, 3, 8, 8, dtype=torch.float64), torch.arange(6)
    out = model.eval()(x)
    assert torch.allclose(out.exp().sum(1), torch.ones(6, dtype=torch.float64))
    assert torch.allclose(F.cross_entropy(out, y), F.nll_loss(out, y), rtol=0, atol=1e-14)
    scores = model[:-1](x)
    assert not torch.allclose(F.nll_loss(scores, y), F.nll_loss(out, y))  # control: of the scores themselves it is another loss


def test_stems_for_small_images() -> None:
    """The numbers of parameters are those usual for CIFAR-10."""
    for name in ("resnet18", "mobilenet_v2", "vgg11_bn"):
        assert str(made(name)) == str(made(name, stem="imagenet")) != str(made(name, stem="small"))
        assert made(name, 7, 1, stem="small")(torch.empty(2, 1, 32, 32, device="meta")).shape == (2, 7)
    assert [found(made("resnet18", stem=stem))[0] for stem in ("small", "imagenet")] == [11_173_962, 11_173_962 + 64 * 3 * (49 - 9)]
    assert found(made("vgg19_bn", stem="small"))[0] == 20_040_522


SIZES = {"mobilenetv2": (4_383_139, 61), "resnet18": (12_333_923, 29), "resnet50": (26_682_211, 62)}  # for 19 classes


@pytest.mark.slow
@pytest.mark.parametrize("encoder", SIZES)
def test_deeplab_gives_scores_per_pixel(encoder: str) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    model = made(DEEPLAB + encoder, classes=19, size=64)
    for height, width in ((64, 64), (48, 80)):
        assert model(torch.empty(2, 3, height, width, device="meta")).shape == (2, 19, height, width)
    assert (found(model)[0], len(batch_norms(model))) == SIZES[encoder]


@pytest.mark.slow
def test_every_method_converts_deeplab() -> None:
    pytest.importorskip("segmentation_models_pytorch")
    model = build("deeplab", classes=4, channels=1, image_size=32, seed=0, maker=maker_of(f"{DEEPLAB}resnet18", "auto"))
    for name, make in METHODS.items():
        converted = convert(model, make())
        if name != "in":  # the pyramid's pooled branch has one value per image and channel
            assert converted.train()(torch.rand(2, 1, 32, 32)).isfinite().all()


def test_what_has_no_small_stem_or_no_encoder_is_refused() -> None:
    for name, make in (("densenet121", small_stem), ("simple-cnn", small_stem), (f"{DEEPLAB}vgg", deeplabv3plus)):
        with naming(name):
            make(name, 10, 3, 28)


@listed("method", ["fedavg", "hbn", "gn"])
def test_standardised_inputs_are_those_of_torchvision_s_transform(method: str) -> None:
    images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    plain = seeded_network("plain").eval()
    model = standardised(seeded_network("plain"), "cifar10", 3).eval()
    assert model.state_dict().keys() == plain.state_dict().keys()
    normalise = torchvision.transforms.Normalize(*STANDARDS["cifar10"])
    convert_, again = (lambda m: convert(m, METHODS[method]()).eval()), pickle.loads(pickle.dumps(copy.deepcopy(model)))
    want = convert_(plain)(normalise(images.float() / 255))
    for network in (convert_(model), convert_(again)):
        assert torch.allclose(network(to_input(images)), want, atol=1e-4)
    assert not torch.allclose(convert_(plain)(to_input(images)), want, atol=1e-2)  # control
    with naming("standardise='mnist' has constants for 1 channels, but the images have 3"):
        standardised(seeded_network("plain"), "mnist", 3)
