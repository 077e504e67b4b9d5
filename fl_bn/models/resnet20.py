"""Make ResNet-20 with shortcuts of option A: the network of the FixBN and FedTAN papers for CIFAR-10.

Deep Residual Learning for Image Recognition, He, Zhang, Ren, Sun, CVPR 2016, section 4.2.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTHS = (16, 32, 64)
BLOCKS = 3  # blocks of each width


class BasicBlock(nn.Module):
    """Compute two 3x3 convolutions with BatchNorm, and add a shortcut without parameters (option A).

    The shortcut skips pixels and pads channels with zeros.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.stride, self.padding = stride, after - before
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block for ``x`` (B, C, H, W)."""
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.padding:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, self.padding // 2, self.padding - self.padding // 2))
        return torch.relu(self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))) + shortcut)


def resnet20(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make ResNet-20: 19 convolutions with 19 BatchNorm layers, and a linear head.

    For 10 classes of RGB images it has 269,722 parameters and 1,376 statistics.

    Raises:
        ValueError: images have fewer than 4 pixels along each side.
    """
    if image_size < 4:
        raise ValueError(f"model 'resnet20' needs images of at least 4 x 4 pixels, but got image_size={image_size}")
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=nn.Conv2d(channels, WIDTHS[0], 3, 1, 1, bias=False), norm=nn.BatchNorm2d(WIDTHS[0]), relu=nn.ReLU()
    )
    before = WIDTHS[0]
    for stage, width in enumerate(WIDTHS, 1):
        for block in range(BLOCKS):
            layers[f"stage{stage}_block{block + 1}"] = BasicBlock(before, width, 2 if block == 0 and stage > 1 else 1)
            before = width
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "head": nn.Linear(before, classes)}
    model = nn.Sequential(layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model
