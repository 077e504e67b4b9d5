"""Make small networks with BatchNorm, which train quickly on a CPU.

Layers before a BatchNorm have no bias, as the BatchNorm's shift would make it redundant.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def simple_cnn(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make Simple-CNN of the HBN paper.

    It has three 3x3 convolutions with 16, 32 and 64 channels. BatchNorm follows each of them, and pooling then halves the
    image. A hidden layer of 128 units without BatchNorm follows. The first linear layer depends on the image size: it has
    1,024 inputs at the paper's 32 pixels.
    """
    check_size("simple-cnn", image_size, 8)
    return nn.Sequential(
        OrderedDict(
            block1=_convolution(channels, 16, pool=True),
            block2=_convolution(16, 32, pool=True),
            block3=_convolution(32, 64, pool=True),
            flatten=nn.Flatten(),
            hidden=nn.Linear(64 * (image_size // 8) ** 2, 128),
            relu=nn.ReLU(),
            head=nn.Linear(128, classes),
        )
    )


def digits_cnn_small(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make a small version of the FedBN paper's digits network.

    It has three 3x3 convolutions with 16, 32 and 64 channels. Pooling halves the image after each of them. A hidden layer of
    64 units follows. BatchNorm follows each of these four layers. There are 40,858 parameters for 10 classes at 16 pixels of
    RGB. The BatchNorm after the linear layer sees one value per image and channel, so label skew affects it most.
    """
    check_size("digits-cnn-small", image_size, 8)
    return nn.Sequential(
        OrderedDict(
            block1=_convolution(channels, 16, pool=True),
            block2=_convolution(16, 32, pool=True),
            block3=_convolution(32, 64, pool=True),
            flatten=nn.Flatten(),
            hidden=_linear(64 * (image_size // 8) ** 2, 64),
            head=nn.Linear(64, classes),
        )
    )


def alexnet_bn_small(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make a small version of the FedBN paper's AlexNet, for images of some 64 pixels.

    It has five convolutions with 32, 64, 128, 96 and 96 channels (kernels 5, 5, 3, 3, 3). The first has stride 2, and
    pooling follows the first, second and last. Two hidden layers of 256 units follow. BatchNorm follows each of these
    seven layers. There are 612,010 parameters for 10 classes at 64 pixels of RGB.
    """
    check_size("alexnet-bn-small", image_size, 32)
    side = image_size
    for after in (lambda n: (n + 1) // 2, _pooled, _pooled, _pooled):
        side = after(side)
    return nn.Sequential(
        OrderedDict(
            block1=_alexnet(channels, 32, 5, stride=2, pool=True),
            block2=_alexnet(32, 64, 5, pool=True),
            block3=_alexnet(64, 128, 3),
            block4=_alexnet(128, 96, 3),
            block5=_alexnet(96, 96, 3, pool=True),
            flatten=nn.Flatten(),
            block6=_linear(96 * side**2, 256),
            block7=_linear(256, 256),
            head=nn.Linear(256, classes),
        )
    )


def mlp(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make a network with two hidden layers of 64 units, each with BatchNorm and ReLU."""
    check_size("mlp", image_size, 1)
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            block1=_linear(channels * image_size**2, 64),
            block2=_linear(64, 64),
            head=nn.Linear(64, classes),
        )
    )


def table_mlp(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make ``mlp`` with a BatchNorm before its first layer, which brings every column of a table to the same scale.

    The running statistics of that layer are the mean and variance of every column.
    """
    check_size("table-mlp", image_size, 1)
    inputs = channels * image_size**2
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            norm=nn.BatchNorm1d(inputs),
            block1=_linear(inputs, 64),
            block2=_linear(64, 64),
            head=nn.Linear(64, classes),
        )
    )


def _pooled(size: int) -> int:
    return (size - 3) // 2 + 1


def _alexnet(before: int, after: int, kernel: int, *, stride: int = 1, pool: bool = False) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv=convolution, norm=nn.BatchNorm2d(after), relu=nn.ReLU())
    return nn.Sequential(layers | ({"pool": nn.MaxPool2d(3, 2)} if pool else {}))


def _convolution(before: int, after: int, *, pool: bool) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=nn.Conv2d(before, after, kernel_size=3, padding=1, bias=False), norm=nn.BatchNorm2d(after), relu=nn.ReLU()
    )
    if pool:
        layers["pool"] = nn.MaxPool2d(2)
    return nn.Sequential(layers)


def _linear(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict(linear=nn.Linear(before, after, bias=False), norm=nn.BatchNorm1d(after), relu=nn.ReLU()))


def check_size(name: str, image_size: int, least: int) -> None:
    """Check that images have at least ``least`` pixels along each side.

    Args:
        name: the model's name, for the message.
        image_size: the pixels along each side of an image.
        least: the smallest ``image_size`` that the model can take.

    Raises:
        ValueError: the images are smaller.
    """
    if image_size < least:
        tables = ": for a table, choose model='mlp' or 'table-mlp'" if image_size == 1 else ""
        raise ValueError(f"model {name!r} needs images of at least {least} x {least} pixels, but got image_size={image_size}{tables}")
