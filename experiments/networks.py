"""Make the networks of the papers: ``setup = "experiments.papers:Papers"`` gives them to a run by name.

FedBN (Li et al., ICLR 2021, appendix D and the authors' nets/models.py): ``digits-cnn``, ``alexnet-bn``, ``abide-mlp``.
FBN (Guerraoui et al.): ``fbn-cnn``. FixBN (Zhong, Chen, Chao): ``lenet-cnn``, DeepLabv3+. FedTAN (Wang, Shi, Chang):
``mnist-mlp``. HBN and FixBN train torchvision's networks on small images (``small_stem``).

Unlike in ``fl_bn.models``, layers before a BatchNorm have a bias, because the papers' numbers of parameters include it.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from fl_bn.models.head import head_of
from fl_bn.models.networks import check_size
from fl_bn.support.extras import need
from fl_bn.support.names import expected

Maker = Callable[[int, int, int], nn.Module]
STEMS = ("auto", "imagenet", "small")
DEEPLAB = "deeplabv3plus-"
ENCODERS = {"mobilenetv2": "mobilenet_v2", **{name: name for name in ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")}}
PACKAGE = "segmentation_models_pytorch"  # an optional extra

# columns t, c, n, s of table 2 of MobileNetV2 (Sandler et al., CVPR 2018), with stride 1 in the second row
_MOBILENET = [[1, 16, 1, 1], [6, 24, 2, 1], [6, 32, 3, 2], [6, 64, 4, 2], [6, 96, 3, 1], [6, 160, 3, 2], [6, 320, 1, 1]]


def maker_of(name: str, stem: str) -> Maker | None:
    """Return the function that makes the network ``name`` with this stem; None: ``fl_bn.models`` makes it.

    Args:
        name: the run-config key ``model``.
        stem: the first layers of torchvision's networks. "small" is for images of about 32 pixels.
    """
    if name.startswith(DEEPLAB):
        return partial(deeplabv3plus, name)
    return NETWORKS.get(name) or (partial(small_stem, name) if stem == "small" else None)


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


def alexnet_bn_small(classes: int, channels: int, image_size: int) -> nn.Module:
    """Make a small version of the FedBN paper's AlexNet, for images of some 64 pixels.

    It has five convolutions with 32, 64, 128, 96 and 96 channels (kernels 5, 5, 3, 3, 3). The first has stride 2, and
    pooling follows the first, second and last. Two hidden layers of 256 units follow. BatchNorm follows each of these
    seven layers. There are 612,010 parameters for 10 classes at 64 pixels of RGB.
    """
    check_size("alexnet-bn-small", image_size, 32)
    side = (image_size + 1) // 2
    for _ in range(3):
        side = (side - 3) // 2 + 1
    convolution = partial(_convolution, bias=False)
    return nn.Sequential(
        OrderedDict(
            block1=convolution(channels, 32, 5, stride=2, padding=2, pool=nn.MaxPool2d(3, 2)),
            block2=convolution(32, 64, 5, padding=2, pool=nn.MaxPool2d(3, 2)),
            block3=convolution(64, 128, 3, padding=1),
            block4=convolution(128, 96, 3, padding=1),
            block5=convolution(96, 96, 3, padding=1, pool=nn.MaxPool2d(3, 2)),
            flatten=nn.Flatten(),
            block6=_linear(96 * side**2, 256, bias=False),
            block7=_linear(256, 256, bias=False),
            head=nn.Linear(256, classes),
        )
    )


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


def deeplabv3plus(name: str, classes: int, channels: int, image_size: int) -> nn.Module:
    """Make a freshly initialised DeepLabv3+.

    It maps images (N, channels, H, W) to scores (N, classes, H, W). H and W are multiples of 16. Training needs
    batches of at least two images: one BatchNorm layer, in the pooled branch of the pyramid, sees one value per
    image and channel.

    Args:
        name: "deeplabv3plus-" and an encoder.
        classes: number of classes.
        channels: number of channels of an image.
        image_size: the height of an image, which is not used.

    Raises:
        ValueError: the encoder is unknown, or segmentation-models-pytorch is not installed.
    """
    encoder = ENCODERS.get(name.removeprefix(DEEPLAB))
    if encoder is None:
        raise ValueError(expected("model", name, [DEEPLAB + known for known in ENCODERS]))
    need(f"model {name!r}", PACKAGE)
    smp = importlib.import_module(PACKAGE)
    model: nn.Module = smp.DeepLabV3Plus(encoder_name=encoder, encoder_weights=None, in_channels=channels, classes=classes)
    return model


def with_projection(model: nn.Module, features: int) -> nn.Module:
    """Replace the head of ``model``, in place, by a projection and a new head, as in MOON (section 3.2 of its paper).

    The projection has two linear layers with a ReLU between them. The new head is a linear layer with the outputs of the
    old one. All three layers are newly initialised.

    Args:
        model: the network, whose head must be a linear layer.
        features: number of outputs of the projection, which are the inputs of the new head.

    Returns:
        ``model``.

    Raises:
        ValueError: the head is no linear layer, or is the whole model.
    """
    name, layer = head_of(model) or ("", None)
    if not name or not isinstance(layer, nn.Linear):
        raise ValueError(f"moon-projection needs a network of several layers whose head is linear, but its head is {layer}")
    d, owner, key = layer.in_features, *name.rpartition(".")[::2]
    layers = nn.Linear(d, d), nn.ReLU(), nn.Linear(d, features), nn.Linear(features, layer.out_features, layer.bias is not None)
    setattr(model.get_submodule(owner), key, nn.Sequential(*layers).to(layer.weight))
    return model


def _convolution(before: int, after: int, kernel: int, *, pool: nn.Module | None = None, norm: bool = True, **of: Any) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv=nn.Conv2d(before, after, kernel, **of))
    if norm:
        layers["norm"] = nn.BatchNorm2d(after)
    layers["relu"] = nn.ReLU()
    if pool is not None:
        layers["pool"] = pool
    return nn.Sequential(layers)


def _linear(before: int, after: int, *, norm: bool = True, bias: bool = True) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(linear=nn.Linear(before, after, bias=bias))
    if norm:
        layers["norm"] = nn.BatchNorm1d(after)
    return nn.Sequential(layers | {"relu": nn.ReLU()})


NETWORKS: dict[str, Maker] = {
    "digits-cnn": digits_cnn,
    "alexnet-bn": alexnet_bn,
    "alexnet-bn-small": alexnet_bn_small,
    "fbn-cnn": fbn_cnn,
    "fbn-cnn-small": fbn_cnn_small,
    "lenet-cnn": lenet_cnn,
    "lenet-cnn-bn": lenet_cnn_bn,
    "mnist-mlp": mnist_mlp,
    "abide-mlp": abide_mlp,
}


def without_dropout(model: nn.Module) -> nn.Module:
    """Switch off the dropout layers of ``model``, in place, as papers do that fine-tune a network without it.

    Returns:
        ``model``.

    Raises:
        ValueError: ``model`` has no dropout layer. Calls of ``torch.nn.functional.dropout`` in ``forward`` are not found.
    """
    layers = [module for module in model.modules() if isinstance(module, _DropoutNd)]
    if not layers:
        raise ValueError(f"dropout=false is for networks with dropout layers, but {type(model).__name__} has none: leave dropout out")
    for layer in layers:
        layer.p = 0.0
    return model
