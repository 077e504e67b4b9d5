"""Make torchvision's classifiers for small images, with the usual first layers (stems) for CIFAR and Tiny-ImageNet.

torchvision's own stems are for large images: such a network reduces CIFAR-10's 32 x 32 pixels to one. HBN and FixBN
train ResNet-18, MobileNetV2 and VGG on such small images.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fl_bn.models.small import check_size
from fl_bn.support.extras import need

STEMS = ("auto", "imagenet", "small")

# columns t, c, n, s of table 2 of MobileNetV2 (Sandler et al., CVPR 2018), with stride 1 in the second row
_MOBILENET = [[1, 16, 1, 1], [6, 24, 2, 1], [6, 32, 3, 2], [6, 64, 4, 2], [6, 96, 3, 1], [6, 160, 3, 2], [6, 320, 1, 1]]


def small_stem(name: str, classes: int, channels: int, image_size: int) -> nn.Module:
    """Make torchvision's ``name``, freshly initialised, for small images of any number of channels.

    ResNets: the first convolution is 3x3 with stride 1, and no pooling follows. MobileNetV2: the first
    convolution and the second stage have stride 1. VGG: the last 512 features are averaged over the image,
    and one linear layer replaces three.

    Raises:
        ValueError: ``name`` is no ResNet, MobileNetV2 or VGG, or images are too small for VGG's five poolings.
    """
    need(f"model {name!r}", "torchvision")
    from torchvision import models

    options: dict[str, Any] = {"inverted_residual_setting": _MOBILENET} if name == "mobilenet_v2" else {}
    model: Any = models.get_model(name, weights=None, num_classes=classes, **options)
    if isinstance(model, models.ResNet):
        model.conv1 = _first(channels, model.conv1.out_channels)
        model.maxpool = nn.Identity()
    elif isinstance(model, models.MobileNetV2):
        model.features[0][0] = _first(channels, model.features[0][0].out_channels)
    elif isinstance(model, models.VGG):
        check_size(name, image_size, 32)
        first = model.features[0]
        model.features[0] = _first(channels, first.out_channels, bias=True)
        model.avgpool = nn.AdaptiveAvgPool2d(1)
        model.classifier = nn.Linear(512, classes)
        nn.init.normal_(model.classifier.weight, 0, 0.01)  # as torchvision initialises its own
        nn.init.zeros_(model.classifier.bias)
    else:
        raise ValueError(f"stem='small' is for torchvision's ResNets, MobileNetV2 and VGGs, but the model is {name!r}: use stem='imagenet'")
    return model  # type: ignore[no-any-return]


def _first(channels: int, width: int, bias: bool = False) -> nn.Conv2d:
    convolution = nn.Conv2d(channels, width, 3, 1, 1, bias=bias)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")  # as torchvision initialises all three families
    if convolution.bias is not None:
        nn.init.zeros_(convolution.bias)
    return convolution
