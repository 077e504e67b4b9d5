"""Make networks by name: ours, torchvision's, DeepLabv3+, or a function of your own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fl_bn.models.papers import abide_mlp, alexnet_bn, digits_cnn, fbn_cnn, fbn_cnn_small, lenet_cnn, lenet_cnn_bn, mnist_mlp
from fl_bn.models.resnet20 import resnet20
from fl_bn.models.segmentation import ENCODERS, PREFIX, deeplabv3plus, is_segmentation
from fl_bn.models.small import alexnet_bn_small, digits_cnn_small, mlp, simple_cnn, table_mlp
from fl_bn.models.stems import STEMS, small_stem
from fl_bn.models.weights import load_weights
from fl_bn.support.extras import need
from fl_bn.support.names import check_name, expected
from fl_bn.support.user_code import Modules, function

MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "simple-cnn": simple_cnn,
    "digits-cnn-small": digits_cnn_small,
    "mlp": mlp,
    "table-mlp": table_mlp,
    "resnet20": resnet20,
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

# Without these arguments, the two networks return several outputs in training, and warn about their initialisation.
_TORCHVISION_OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}


def build(
    name: str,
    *,
    classes: int,
    channels: int = 3,
    image_size: int = 32,
    seed: int | None = None,
    stem: str = "auto",
    weights: str = "",
    modules: Modules | None = None,
) -> nn.Module:
    """Make a freshly initialised network for images.

    Args:
        name: one of ``MODELS``, a classification model of torchvision ("resnet18", "vgg11_bn"), or
            "deeplabv3plus-" and an encoder (classes per pixel). Or a function of your own as
            "package.module:function", which is called with ``classes``, ``channels`` and ``image_size`` by name.
        classes: the number of outputs: classes, values or labels.
        channels: the number of channels of an image.
        image_size: the pixels along each side of an image.
        seed: the seed of the initial weights. Torch's global generator is not changed. None: weights are
            drawn from that generator.
        stem: the first layers of a torchvision model. "imagenet" keeps its own, "small" is for images of
            about 32 pixels (see ``stems``), "auto" is "imagenet".
        weights: a file of initial weights (see ``weights``). Empty: none.
        modules: the modules that may hold a function of your own. None: any.

    Raises:
        ValueError: the name is unknown, a function is missing or takes other arguments, the network cannot
            take such images, or the weights are another network's.
        TypeError: a function of your own returned no ``nn.Module``.
    """
    if min(classes, channels, image_size) < 1:
        raise ValueError(
            "a model needs at least 1 output (class), 1 channel and 1 pixel, "
            f"but got classes={classes}, channels={channels}, image_size={image_size}"
        )
    check_name("stem", stem, STEMS)
    if seed is None:
        model = _build(name, classes, channels, image_size, stem, modules)
    else:
        # Layers are initialised on the CPU. torch.manual_seed would also change the generators of the accelerators.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = _build(name, classes, channels, image_size, stem, modules)
    if weights:
        load_weights(model, weights)
    return model


def is_torchvision(name: str) -> bool:
    """Return whether ``name`` must be a model of torchvision: it is no model of fl-bn, no user's function and no DeepLabv3+."""
    return name not in MODELS and ":" not in name and not is_segmentation(name)


def _build(name: str, classes: int, channels: int, image_size: int, stem: str, modules: Modules | None) -> nn.Module:
    if is_torchvision(name):
        return _torchvision(name, classes, channels, image_size, stem)
    if stem == "small":
        raise ValueError(f"stem='small' is for torchvision's ResNets, MobileNetV2 and VGGs, but the model is {name!r}: use stem='auto'")
    if name in MODELS:
        return MODELS[name](classes, channels, image_size)
    if is_segmentation(name):
        return deeplabv3plus(name, classes, channels, image_size)
    return _own(name, classes, channels, image_size, modules)


def _torchvision(name: str, classes: int, channels: int, image_size: int, stem: str) -> nn.Module:
    need(f"the model {name!r}, which is none of fl-bn's own ({', '.join(MODELS)}),", "torchvision")
    from torchvision import models  # imported here because it takes a second, and our own networks do not need it

    if name not in (there := models.list_models(module=models)):
        others = (
            ", a classification model of torchvision by its name there (such as resnet18), "
            f"{PREFIX} and one of {', '.join(ENCODERS)}, or your own function as package.module:function"
        )
        raise ValueError(expected("model", name, MODELS, others, [*there, *(PREFIX + encoder for encoder in ENCODERS)]))
    if stem == "small":
        return small_stem(name, classes, channels, image_size)
    if channels != 3:
        raise ValueError(
            f"torchvision's {name} takes images of 3 channels, but these have {channels}: repeat the channel in the "
            f"data, or use stem='small' (ResNets, MobileNetV2 and VGGs), or one of {', '.join(MODELS)}"
        )
    model: nn.Module = models.get_model(name, weights=None, num_classes=classes, **_TORCHVISION_OPTIONS.get(name, {}))
    return model


def _own(name: str, classes: int, channels: int, image_size: int, modules: Modules | None) -> nn.Module:
    made = function("your own model", name, modules)
    arguments = {"classes": classes, "channels": channels, "image_size": image_size}
    try:
        inspect.signature(made).bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"model {name!r} must be callable as function(classes=..., channels=..., image_size=...), but its signature differs: {error}"
        ) from error
    model = made(**arguments)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model {name!r} must return a torch.nn.Module, but returned {type(model).__name__}")
    return model
