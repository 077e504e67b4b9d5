"""Networks by name: shapes, seeds, and names that lead nowhere."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from fl_bn.models import MODELS, build
from tests.listed import listed

OWN_DESIGNS = ("simple-cnn", "digits-cnn-small", "alexnet-bn-small", "mlp", "resnet20")  # the papers' are in test_papers


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("alexnet-bn")])  # for large images
@pytest.mark.parametrize(("channels", "image_size"), [(3, 32), (1, 28), (3, 20)])
def test_ours_fit_the_images_and_learn(name: str, channels: int, image_size: int) -> None:
    model = build(name, classes=7, channels=channels, image_size=image_size, seed=0)
    x = torch.rand(5, channels, image_size, image_size)
    scores = model(x)
    assert scores.shape == (5, 7)
    scores.logsumexp(1).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules()) == (name != "lenet-cnn")


@pytest.mark.parametrize("name", OWN_DESIGNS)
def test_every_layer_before_a_batch_norm_is_without_bias(name: str) -> None:
    layers = [layer for layer in build(name, classes=10).modules() if not list(layer.children())]
    for before, after in pairwise(layers):
        if isinstance(after, nn.modules.batchnorm._BatchNorm):
            assert isinstance(before, nn.Conv2d | nn.Linear)
            assert before.bias is None


def test_sizes() -> None:
    def parameters(name: str, image_size: int) -> int:
        return sum(p.numel() for p in build(name, classes=10, image_size=image_size).parameters())

    # convolutions 9*(3*16 + 16*32 + 32*64), BN 2*(16 + 32 + 64), linear layers with bias
    assert parameters("simple-cnn", 32) == 23_472 + 224 + (1024 * 128 + 128) + (128 * 10 + 10)
    assert parameters("resnet20", 32) == parameters("resnet20", 8) == 269_722  # of the paper; 19 layers of BatchNorm add 1,376 statistics
    assert parameters("digits-cnn-small", 20) == 23_472 + 224 + (256 * 64 + 128) + (64 * 10 + 10) == 40_858
    convolutions = 25 * (3 * 32 + 32 * 64) + 9 * (64 * 128 + 128 * 96 + 96 * 96)
    linear = 9 * 96 * 256 + 256 * 256 + 256 * 10 + 10
    assert parameters("alexnet-bn-small", 64) == convolutions + linear + 2 * (32 + 64 + 128 + 96 + 96 + 256 + 256) == 612_010


def test_a_table_s_network_brings_its_columns_to_one_scale() -> None:
    model = build("table-mlp", classes=10, channels=10, image_size=1, seed=0)
    assert sum(p.numel() for p in model.parameters()) == 20 + 640 + 128 + 4096 + 128 + 650 == 5_662
    x = torch.rand(30, 10)
    scores = model.train()(x)
    torch.testing.assert_close(model(x * 1e4 + 7), scores, rtol=1e-2, atol=1e-2)
    plain = build("mlp", classes=10, channels=10, image_size=1, seed=0).train()
    assert not torch.allclose(plain(x * torch.arange(1, 11)), plain(x), atol=0.1)  # control
    torch.testing.assert_close(model(x * torch.arange(1, 11)), scores, rtol=1e-2, atol=1e-2)


def test_seed_fixes_the_weights_and_spares_the_global_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (build("digits-cnn-small", classes=10, image_size=20, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    name = "block1.conv.weight"
    assert torch.equal(first.get_parameter(name), again.get_parameter(name))
    assert not torch.equal(first.get_parameter(name), other.get_parameter(name))


def test_without_a_seed_the_global_generator_decides() -> None:
    torch.manual_seed(5)
    first = build("mlp", classes=10).get_parameter("head.weight")
    second = build("mlp", classes=10).get_parameter("head.weight")
    torch.manual_seed(5)
    assert torch.equal(build("mlp", classes=10).get_parameter("head.weight"), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "googlenet"])
def test_torchvisions_by_name(name: str) -> None:
    model = build(name, classes=4, seed=0).train()
    assert model(torch.rand(2, 3, 64, 64)).shape == (2, 4)


def test_torchvisions_take_colour_only() -> None:
    with pytest.raises(ValueError, match=r"resnet18 takes images of 3 channels, but these have 1"):
        build("resnet18", classes=10, channels=1)


@pytest.mark.parametrize("name", ["resnet21", "fasterrcnn_resnet50_fpn", ""])
def test_unknown_names_list_the_known_ones(name: str) -> None:
    message = rf"one of simple-cnn, digits-cnn-small, mlp, .*resnet18.*package\.module:function, but got '{name}'"
    with pytest.raises(ValueError, match=message):
        build(name, classes=10)


@listed(
    ("name", "image_size"),
    [
        ("simple-cnn", 7),
        ("digits-cnn-small", 7),
        ("mlp", 0),
        ("digits-cnn", 3),
        ("alexnet-bn", 62),
        ("alexnet-bn-small", 31),
        ("fbn-cnn", 3),
        ("fbn-cnn-small", 3),
        ("lenet-cnn", 15),
        ("lenet-cnn-bn", 15),
    ],
)
def test_images_too_small(name: str, image_size: int) -> None:
    with pytest.raises(ValueError, match=f"image_size={image_size}"):
        build(name, classes=10, image_size=image_size)


def test_a_network_without_an_output_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 output"):
        build("mlp", classes=0)
    assert build("mlp", classes=1)(torch.zeros(2, 3, 32, 32)).shape == (2, 1)  # of a regression


OWN = """
from torch import nn

def network(classes, channels, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, classes))

def wrong_signature(width): ...

def wrong_result(classes, channels, image_size):
    return "a network"

def broken(classes, channels, image_size):
    raise TypeError("from inside")

number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of an importable module with functions that build networks."""
    (tmp_path / "own_networks.py").write_text(OWN)
    (tmp_path / "own_needy.py").write_text("import a_package_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("own_networks", "own_needy"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return "own_networks"


def test_ones_own_function(own: str) -> None:
    model = build(f"{own}:network", classes=4, channels=1, image_size=6, seed=1)
    assert model(torch.rand(2, 1, 6, 6)).shape == (2, 4)
    again = build(f"{own}:network", classes=4, channels=1, image_size=6, seed=1)
    assert torch.equal(model.get_parameter("1.weight"), again.get_parameter("1.weight"))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (
            "own_networks:absent",
            ValueError,
            "expected a function 'absent' in own_networks, which has network, wrong_signature",
        ),
        ("own_networks:number", ValueError, "expected a function 'number'"),
        ("own_networks:wrong_signature", ValueError, r"callable as function\(classes=..., channels=..., image_size"),
        ("own_networks:wrong_result", TypeError, "must return a torch.nn.Module, but returned str"),
        ("own_networks:broken", TypeError, "^from inside$"),
        ("no_such_module:network", ValueError, "no module 'no_such_module'; install"),
        ("own_networks.deeper:network", ValueError, "no module 'own_networks.deeper'; install"),
        ("own_needy:network", ModuleNotFoundError, "a_package_nobody_has"),
        ("own_networks:", ValueError, "must be named as package.module:function, but got 'own_networks:'"),
        (":network", ValueError, "must be named as"),
        ("own_networks:network:again", ValueError, "must be named as"),
    ],
)
@pytest.mark.usefixtures("own")
def test_what_can_be_wrong_with_ones_own(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(name, classes=4)
