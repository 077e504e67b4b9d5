"""torchvision's networks for small images, and what "auto" means."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fl_bn.models import build


def convolutions(model: nn.Module) -> list[nn.Conv2d]:
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "vgg11_bn"])
def test_auto_is_torchvisions_own(name: str) -> None:
    from torchvision import models

    with torch.device("meta"):
        auto, imagenet, own = build(name, classes=4), build(name, classes=4, stem="imagenet"), models.get_model(name, num_classes=4)
        small = build(name, classes=4, stem="small")
    assert str(auto) == str(imagenet) == str(own)
    assert str(small) != str(own)  # control


def test_a_resnet_for_small_images() -> None:
    with torch.device("meta"):
        small, own = (build("resnet18", classes=10, stem=stem) for stem in ("small", "imagenet"))
    assert (small.conv1.kernel_size, small.conv1.stride, small.conv1.padding) == ((3, 3), (1, 1), (1, 1))
    assert isinstance(small.maxpool, nn.Identity)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (small, own)]
    assert sizes == [11_173_962, 11_173_962 + 64 * 3 * (49 - 9)]  # the number usual for ResNet-18 on CIFAR-10
    x = torch.empty(2, 3, 32, 32, device="meta")
    seen: list[tuple[int, ...]] = []
    for model in (small, own):
        handle = model.layer4.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape[2:])))
        model(x)
        handle.remove()
    assert seen == [(4, 4), (1, 1)]


@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2", "vgg11_bn"])
@pytest.mark.parametrize("channels", [1, 3])
def test_others_for_small_images_of_any_channels(name: str, channels: int) -> None:
    with torch.device("meta"):
        model = build(name, classes=7, channels=channels, stem="small")
        assert model(torch.empty(2, channels, 32, 32)).shape == (2, 7)
    assert convolutions(model)[0].in_channels == channels


def test_mobilenet_halves_the_image_three_times_instead_of_five() -> None:
    with torch.device("meta"):
        strides = [
            sum(c.stride == (2, 2) for c in convolutions(build("mobilenet_v2", classes=10, stem=stem))) for stem in ("small", "imagenet")
        ]
    assert strides == [3, 5]


def test_vgg_has_one_linear_layer_and_says_what_it_cannot_take() -> None:
    with torch.device("meta"):
        model = build("vgg19_bn", classes=10, stem="small")
        assert sum(p.numel() for p in model.parameters()) == 20_040_522  # usual for VGG-19 with BatchNorm on CIFAR-10
        with pytest.raises(ValueError, match="'vgg11_bn' needs images of at least 32 x 32 pixels, but got image_size=28"):
            build("vgg11_bn", classes=10, image_size=28, stem="small")


def test_small_stems_are_seeded_and_train() -> None:
    first, again, other = (build("resnet18", classes=10, channels=1, stem="small", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.conv1.weight, again.conv1.weight)
    assert not torch.equal(first.conv1.weight, other.conv1.weight)
    first(torch.rand(2, 1, 16, 16)).logsumexp(1).sum().backward()
    assert all(p.grad is not None for p in first.parameters())


@pytest.mark.parametrize("name", ["densenet121", "simple-cnn", "tests.integration.runs:images"])
def test_stems_of_other_networks(name: str) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=f"stem='small' is for .* but the model is '{name}': use stem="):
        build(name, classes=10, stem="small")


def test_unknown_stems() -> None:
    with pytest.raises(ValueError, match="stem must be one of auto, imagenet, small, but got 'tiny'"):
        build("resnet18", classes=10, stem="tiny")
