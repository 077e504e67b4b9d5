"""Make DeepLabv3+ for semantic segmentation, from segmentation-models-pytorch: the FixBN paper's network for Cityscapes.

Encoder-Decoder with Atrous Separable Convolution for Semantic Image Segmentation, Chen et al., ECCV 2018.
"""

from __future__ import annotations

import importlib

from torch import nn

from fl_bn.support.extras import need
from fl_bn.support.names import expected

PREFIX = "deeplabv3plus-"
ENCODERS = {"mobilenetv2": "mobilenet_v2", **{name: name for name in ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")}}
PACKAGE = "segmentation_models_pytorch"  # an optional extra
MULTIPLE = 16  # the sides of an image are multiples of it: the encoder's output stride


def is_segmentation(name: str) -> bool:
    """Return whether ``name`` is the name of a DeepLabv3+ (``deeplabv3plus-`` and an encoder)."""
    return name.startswith(PREFIX)


def deeplabv3plus(name: str, classes: int, channels: int, image_size: int) -> nn.Module:
    """Make a freshly initialised DeepLabv3+.

    It maps images (N, channels, H, W) to scores (N, classes, H, W). H and W are multiples of 16. Training needs
    batches of at least two images: one BatchNorm layer, in the pooled branch of the pyramid, sees one value per
    image and channel.

    Args:
        name: "deeplabv3plus-" and an encoder.
        classes: number of classes.
        channels: number of channels of an image.
        image_size: the pixels along each side of an image, which must be a multiple of 16. 0: images need not be square,
            and their sides are not checked.

    Raises:
        ValueError: the encoder is unknown, ``image_size`` is no multiple of 16, or segmentation-models-pytorch is not
            installed.
    """
    encoder = ENCODERS.get(name.removeprefix(PREFIX))
    if encoder is None:
        raise ValueError(expected("model", name, [PREFIX + known for known in ENCODERS]))
    if image_size % MULTIPLE:
        raise ValueError(f"model {name!r} needs images whose sides are multiples of {MULTIPLE} pixels, but got image_size={image_size}")
    need(f"model {name!r}", PACKAGE)
    smp = importlib.import_module(PACKAGE)
    model: nn.Module = smp.DeepLabV3Plus(encoder_name=encoder, encoder_weights=None, in_channels=channels, classes=classes)
    return model
