"""Networks by name: shapes, seeds, and names that lead nowhere."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.networks import without_dropout
from fl_bn.models import MODELS, build
from tests.networks import seeded_network
from tests.refusals import naming


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("channels", "image_size"), [(3, 32), (1, 28), (3, 20)])
def test_ours_fit_the_images_and_learn(name: str, channels: int, image_size: int) -> None:
    model = build(name, classes=7, channels=channels, image_size=image_size, seed=0)
    scores = model(torch.rand(5, channels, image_size, image_size))
    assert scores.shape == (5, 7)
    scores.logsumexp(1).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    layers = [layer for layer in model.modules() if not list(layer.children())]
    norms = [(before, after) for before, after in pairwise(layers) if isinstance(after, nn.modules.batchnorm._BatchNorm)]
    assert norms
    assert all(getattr(before, "bias", None) is None for before, _ in norms), "the BatchNorm's shift would make it redundant"


def test_sizes() -> None:
    def parameters(name: str, image_size: int) -> int:
        return sum(p.numel() for p in build(name, classes=10, image_size=image_size).parameters())

    # convolutions 9*(3*16 + 16*32 + 32*64), BN 2*(16 + 32 + 64), linear layers with bias
    assert parameters("simple-cnn", 32) == 23_472 + 224 + (1024 * 128 + 128) + (128 * 10 + 10)
    assert parameters("resnet20", 32) == parameters("resnet20", 8) == 269_722  # of the paper; 19 layers of BatchNorm add 1,376 statistics
    assert parameters("digits-cnn-small", 20) == 23_472 + 224 + (256 * 64 + 128) + (64 * 10 + 10) == 40_858


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
    with pytest.raises(ValueError, match=r"resnet18 takes 3 channels, but these data have 1"):
        build("resnet18", classes=10, channels=1)


@pytest.mark.parametrize("name", ["resnet21", "fasterrcnn_resnet50_fpn", ""])
def test_unknown_names_list_the_known_ones(name: str) -> None:
    message = rf"one of simple-cnn, digits-cnn-small, mlp, .*resnet18.*package\.module:function, but got '{name}'"
    with pytest.raises(ValueError, match=message):
        build(name, classes=10)


@pytest.mark.parametrize(("name", "image_size"), [("simple-cnn", 7), ("digits-cnn-small", 7), ("mlp", 0), ("resnet20", 3)])
def test_images_too_small(name: str, image_size: int) -> None:
    with pytest.raises(ValueError, match=f"image_size={image_size}"):
        build(name, classes=10, image_size=image_size)


def test_dropout_layers_can_be_switched_off() -> None:
    x = torch.randn(4, 3, 8, 8)
    plain, cut = (seeded_network("cnn").train() for _ in range(2))
    assert torch.equal(without_dropout(cut)(x), seeded_network("plain").train()(x))
    assert not torch.equal(plain(x), seeded_network("plain").train()(x))  # control: with dropout
    assert cut.state_dict().keys() == plain.state_dict().keys()
    with pytest.raises(ValueError, match="Sequential has none"):
        without_dropout(nn.Sequential(nn.Linear(2, 2)))


def test_a_network_without_an_output_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 class"):
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
    ("name", "error", "word"),
    [
        ("own_networks:absent", ValueError, "'absent'"),
        ("own_networks:number", ValueError, "'number'"),
        ("own_networks:wrong_signature", ValueError, "own_networks:wrong_signature"),
        ("own_networks:wrong_result", TypeError, "str"),
        ("own_networks:broken", TypeError, "from inside"),
        ("no_such_module:network", ValueError, "'no_such_module'"),
        ("own_networks.deeper:network", ValueError, "'own_networks.deeper'"),
        ("own_needy:network", ModuleNotFoundError, "a_package_nobody_has"),
        ("own_networks:", ValueError, "'own_networks:'"),
        (":network", ValueError, "':network'"),
        ("own_networks:network:again", ValueError, "own_networks:network:again"),
    ],
)
@pytest.mark.usefixtures("own")
def test_what_can_be_wrong_with_ones_own(name: str, error: type[Exception], word: str) -> None:
    with naming(word, error):
        build(name, classes=4)
