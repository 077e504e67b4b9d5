"""Make the small networks of the papers, as their tables and published code describe them.

FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, Li et al., ICLR 2021,
appendix D and the authors' code (nets/models.py): ``digits-cnn``, ``alexnet-bn``, ``abide-mlp``. FBN,
Guerraoui et al.: ``fbn-cnn``. FixBN, Zhong, Chen, Chao: ``lenet-cnn``. FedTAN, Wang, Shi, Chang: ``mnist-mlp``.

Unlike in ``small``, layers before a BatchNorm have a bias, because the papers' numbers of parameters include
it.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from fl_bn.models.small import check_size


def digits_cnn(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make FedBN's network for the five digits data sets (its table of the digits model).

    It has 14,219,210 parameters for 10 classes at 28 pixels of RGB. There are three 5x5 convolutions with 64, 64 and 128
    channels, and hidden layers of 2,048 and 512 units. BatchNorm and ReLU follow each of these five layers. Pooling follows
    the first two convolutions. The first linear layer depends on the image size: it has 6,272 inputs at the paper's 28
    pixels.
    """
    check_size("digits-cnn", image_size, 4)
    return nn.Sequential(
        OrderedDict(
            block1=_convolution(channels, 64, 5, padding=2, pool=nn.MaxPool2d(2)),
            block2=_convolution(64, 64, 5, padding=2, pool=nn.MaxPool2d(2)),
            block3=_convolution(64, 128, 5, padding=2),
            flatten=nn.Flatten(),
            block4=_linear(128 * (image_size // 4) ** 2, 2048),
            block5=_linear(2048, 512),
            head=nn.Linear(512, classes),
        )
    )


def alexnet_bn(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make FedBN's AlexNet for Office-Caltech10 and DomainNet, with BatchNorm after every layer but the last.

    It has 57,063,498 parameters for 10 classes of RGB images. It is made for 256 pixels. Any image of at least 63 pixels
    fits, because the last features are averaged to 6 x 6.
    """
    check_size("alexnet-bn", image_size, 63)
    return nn.Sequential(
        OrderedDict(
            block1=_convolution(channels, 64, 11, stride=4, padding=2, pool=nn.MaxPool2d(3, 2)),
            block2=_convolution(64, 192, 5, padding=2, pool=nn.MaxPool2d(3, 2)),
            block3=_convolution(192, 384, 3, padding=1),
            block4=_convolution(384, 256, 3, padding=1),
            block5=_convolution(256, 256, 3, padding=1, pool=nn.MaxPool2d(3, 2)),
            pool=nn.AdaptiveAvgPool2d(6),
            flatten=nn.Flatten(),
            block6=_linear(256 * 6 * 6, 4096),
            block7=_linear(4096, 4096),
            head=nn.Linear(4096, classes),
        )
    )


def fbn_cnn(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make the FBN paper's network for CIFAR-10 (its table of models): ReLU, then BatchNorm.

    It has 1,310,922 parameters for 10 classes at 32 pixels of RGB. It ends in LogSoftmax, as the paper trains with the
    negative log-likelihood. Cross-entropy is the same loss here, because log_softmax does not change
    log-probabilities.
    """
    return _fbn("fbn-cnn", classes, channels, image_size, width=64)


def fbn_cnn_small(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make ``fbn-cnn`` with a quarter of its channels and hidden units.

    It has 33,594 parameters for 10 classes at 16 pixels of RGB.
    """
    return _fbn("fbn-cnn-small", classes, channels, image_size, width=16)


def _fbn(name: str, classes: int, channels: int, image_size: int, width: int) -> nn.Module:
    check_size(name, image_size, 4)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (before, after) in enumerate([(channels, width), (width, width), (width, 2 * width), (2 * width, 2 * width)], 1):
        layers[f"conv{number}"] = nn.Conv2d(before, after, 3, padding=1)
        layers[f"relu{number}"] = nn.ReLU()
        layers[f"norm{number}"] = nn.BatchNorm2d(after)
        if number % 2 == 0:
            layers |= {f"pool{number}": nn.MaxPool2d(2), f"drop{number}": nn.Dropout(0.25)}
    features = 2 * width * (image_size // 4) ** 2
    layers |= {"flatten": nn.Flatten(), "hidden": nn.Linear(features, 2 * width), "relu": nn.ReLU()}
    return nn.Sequential(layers | {"head": nn.Linear(2 * width, classes), "log_probabilities": nn.LogSoftmax(1)})


def lenet_cnn(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make LeNet-CNN of the FixBN paper, without BatchNorm: LeNet-5 with ReLU and max pooling.

    It has 62,006 parameters for 10 classes at 32 pixels of RGB. The paper gives no table of it. These are the usual sizes:
    two 5x5 convolutions with 6 and 16 channels, each with pooling, and hidden layers of 120 and 84 units.
    """
    return _lenet("lenet-cnn", classes, channels, image_size, norm=False)


def lenet_cnn_bn(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make ``lenet-cnn`` with BatchNorm after every layer but the last."""
    return _lenet("lenet-cnn-bn", classes, channels, image_size, norm=True)


def _lenet(name: str, classes: int, channels: int, image_size: int, norm: bool) -> nn.Module:
    check_size(name, image_size, 16)
    side = ((image_size - 4) // 2 - 4) // 2
    return nn.Sequential(
        OrderedDict(
            block1=_convolution(channels, 6, 5, pool=nn.MaxPool2d(2), norm=norm),
            block2=_convolution(6, 16, 5, pool=nn.MaxPool2d(2), norm=norm),
            flatten=nn.Flatten(),
            block3=_linear(16 * side**2, 120, norm=norm),
            block4=_linear(120, 84, norm=norm),
            head=nn.Linear(84, classes),
        )
    )


def mnist_mlp(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make the FedTAN paper's network for MNIST: one hidden layer of 30 units with BatchNorm.

    It has 23,920 parameters for 10 classes at 28 pixels of one channel. The paper names no activation; here it is ReLU.
    """
    return nn.Sequential(
        OrderedDict(flatten=nn.Flatten(), block1=_linear(channels * image_size**2, 30), head=nn.Linear(30, classes)),
    )


def abide_mlp(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make FedBN's network for ABIDE I: two hidden layers of 16 units with BatchNorm.

    It has 96,306 parameters for 2 classes and the 5,995 connectivities of a brain. It is for tables, whose features are the
    channels of an image of one pixel.
    """
    return nn.Sequential(
        OrderedDict(flatten=nn.Flatten(), block1=_linear(channels * image_size**2, 16), block2=_linear(16, 16), head=nn.Linear(16, classes))
    )


def _convolution(
    before: int, after: int, kernel: int, *, stride: int = 1, padding: int = 0, pool: nn.Module | None = None, norm: bool = True
) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv=nn.Conv2d(before, after, kernel, stride, padding))
    if norm:
        layers["norm"] = nn.BatchNorm2d(after)
    layers["relu"] = nn.ReLU()
    if pool is not None:
        layers["pool"] = pool
    return nn.Sequential(layers)


def _linear(before: int, after: int, *, norm: bool = True) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(linear=nn.Linear(before, after))
    if norm:
        layers["norm"] = nn.BatchNorm1d(after)
    return nn.Sequential(layers | {"relu": nn.ReLU()})
