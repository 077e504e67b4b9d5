"""DeepLabv3+ by name: a score per class and pixel."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from fl_bn.bn.conversion import convert
from fl_bn.bn.roles import batch_norms, roles
from fl_bn.methods import METHODS
from fl_bn.models import build

SIZES = {"mobilenetv2": (4_383_139, 61), "resnet18": (12_333_923, 29), "resnet50": (26_682_211, 62)}  # for 19 classes


@pytest.mark.parametrize("encoder", SIZES)
def test_scores_per_pixel(encoder: str) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    with torch.device("meta"):
        model = build(f"deeplabv3plus-{encoder}", classes=19, image_size=64)
        for height, width in ((64, 64), (48, 80)):
            assert model(torch.empty(2, 3, height, width)).shape == (2, 19, height, width)
        with pytest.raises(RuntimeError, match="divisible by 16"):  # control
            model(torch.empty(2, 3, 64, 40))
    assert (sum(p.numel() for p in model.parameters()), len(batch_norms(model))) == SIZES[encoder]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_converts_it(name: str) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    model = build("deeplabv3plus-resnet18", classes=4, channels=1, image_size=32, seed=0)
    converted = convert(model, METHODS[name]())
    assert list(roles(converted)) == list(converted.state_dict())
    if name != "in":  # the pyramid's pooled branch has one value per image and channel
        assert converted.train()(torch.rand(2, 1, 32, 32)).isfinite().all()
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def test_images_of_other_sides_and_unknown_encoders() -> None:
    with pytest.raises(ValueError, match="sides are multiples of 16 pixels, but got image_size=28"):
        build("deeplabv3plus-resnet18", classes=4, image_size=28)
    with pytest.raises(ValueError, match="one of deeplabv3plus-mobilenetv2, .*, but got 'deeplabv3plus-vgg'"):
        build("deeplabv3plus-vgg", classes=4, image_size=32)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    with pytest.raises(ValueError, match=r"needs segmentation-models-pytorch, which is not installed: pip install 'fl-bn\[segmentation\]'"):
        build("deeplabv3plus-resnet18", classes=4, image_size=32)
