"""Make small networks with BatchNorm, which train quickly on a CPU, and ResNet-20.

Layers before a BatchNorm have no bias: its shift would make it redundant.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTHS = (16, 32, 64)  # of ResNet-20
BLOCKS = 3  # blocks of each width


def simple_cnn(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make Simple-CNN of the HBN paper.

    Three 3x3 convolutions with 16, 32 and 64 channels have BatchNorm and pooling,
    which halves the image. A hidden layer of 128 units without BatchNorm follows.
    Its size depends on the image: 1,024 inputs at the paper's 32 pixels.
    """
    check_size("simple-cnn", image_size, 8)
    blocks, hidden = _blocks(channels), nn.Linear(64 * (image_size // 8) ** 2, 128)
    return nn.Sequential(OrderedDict(**blocks, hidden=hidden, relu=nn.ReLU(), head=nn.Linear(128, classes)))


def digits_cnn_small(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make a small version of the FedBN paper's digits network.

    Three 3x3 convolutions with 16, 32 and 64 channels, each followed by pooling,
    and a hidden layer of 64 units all have BatchNorm. There are 40,858 parameters
    for 10 classes at 16 pixels of RGB. The last BatchNorm sees one value per image
    and channel, so label skew affects it most.
    """
    check_size("digits-cnn-small", image_size, 8)
    blocks, hidden = _blocks(channels), _linear(64 * (image_size // 8) ** 2, 64)
    return nn.Sequential(OrderedDict(**blocks, hidden=hidden, head=nn.Linear(64, classes)))


def mlp(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make a network of two hidden layers of 64 units with BatchNorm and ReLU."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            block1=_linear(channels * image_size**2, 64),
            block2=_linear(64, 64),
            head=nn.Linear(64, classes),
        )
    )


def table_mlp(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make ``mlp`` after a BatchNorm, which brings a table's columns to the same scale.

    Its running statistics are the mean and variance of every column.
    """
    flatten, *layers = mlp(classes, channels, image_size).named_children()
    norm = nn.BatchNorm1d(channels * image_size**2)
    return nn.Sequential(OrderedDict([flatten, ("norm", norm), *layers]))


class BasicBlock(nn.Module):
    """Compute two 3x3 convolutions with BatchNorm, and add a shortcut (option A).

    It has no parameters: it skips pixels and pads channels with zeros.
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
    """Make ResNet-20: 19 convolutions with BatchNorm, and a linear head.

    For 10 classes of RGB images it has 269,722 parameters and 1,376 statistics.

    Raises:
        ValueError: images have fewer than 4 pixels along each side.
    """
    check_size("resnet20", image_size, 4)
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


def _blocks(channels: int) -> dict[str, nn.Module]:
    """Make three convolutions with BatchNorm, ReLU and pooling, and flatten the result."""
    blocks: dict[str, nn.Module] = {}
    for number, (before, after) in enumerate(((channels, 16), (16, 32), (32, 64)), 1):
        conv = nn.Conv2d(before, after, kernel_size=3, padding=1, bias=False)
        blocks[f"block{number}"] = nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(after), relu=nn.ReLU(), pool=nn.MaxPool2d(2)))
    return {**blocks, "flatten": nn.Flatten()}


def _linear(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict(linear=nn.Linear(before, after, bias=False), norm=nn.BatchNorm1d(after), relu=nn.ReLU()))


def check_size(name: str, image_size: int, least: int) -> None:
    """Check that images have at least ``least`` pixels along each side.

    Args:
        name: of the model, for the message.
        image_size: pixels along each side.
        least: the smallest possible ``image_size``.
    """
    if image_size < least:
        tables = ": for a table, choose model='mlp' or 'table-mlp'" if image_size == 1 else ""
        raise ValueError(f"model {name!r} needs images of at least {least} x {least} pixels, but got image_size={image_size}{tables}")
