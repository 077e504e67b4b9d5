"""Make networks by name: ours, torchvision's, or a function of your own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fl_bn.models.networks import digits_cnn_small, mlp, resnet20, simple_cnn, table_mlp
from fl_bn.models.weights import load_weights
from fl_bn.support.extras import need
from fl_bn.support.names import expected
from fl_bn.support.user_code import Modules, function

Maker = Callable[[int, int, int], nn.Module]
MODELS: dict[str, Maker] = {
    "simple-cnn": simple_cnn,
    "digits-cnn-small": digits_cnn_small,
    "mlp": mlp,
    "table-mlp": table_mlp,
    "resnet20": resnet20,
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
    weights: str = "",
    modules: Modules | None = None,
    maker: Maker | None = None,
) -> nn.Module:
    """Make a freshly initialised network for images.

    Args:
        name: one of ``MODELS``, a classification model of torchvision ("resnet18"),
            or your own function as "package.module:function", which is called with
            ``classes``, ``channels`` and ``image_size`` by name.
        classes: the number of outputs.
        channels: of an image.
        image_size: pixels along each side.
        seed: gives the initial weights, without torch's global generator. None:
            that generator does.
        weights: a file of initial weights (``load_weights``). Empty: none.
        modules: those that may hold your own function. None: any.
        maker: makes the network from classes, channels and image size. None:
            ``name`` decides.

    Raises:
        ValueError: the name is unknown, a function is missing, takes other arguments
            or returns no network, such images do not fit, or weights do not.
    """
    if min(classes, channels, image_size) < 1:
        raise ValueError(f"a model needs at least 1 class, channel and pixel, but got {classes=}, {channels=}, {image_size=}")
    maker = maker or _maker(name, modules)
    if seed is None:
        model = maker(classes, channels, image_size)
    else:
        # Layers are initialised on the CPU. torch.manual_seed would also change the generators of the accelerators.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = maker(classes, channels, image_size)
    if weights:
        load_weights(model, weights)
    return model


def _maker(name: str, modules: Modules | None) -> Maker:
    if name in MODELS:
        return MODELS[name]
    return partial(_own, name, modules) if ":" in name else partial(_torchvision, name)


def _torchvision(name: str, classes: int, channels: int, image_size: int) -> nn.Module:
    need(f"the model {name!r}, which is none of fl-bn's own ({', '.join(MODELS)}),", "torchvision")
    from torchvision import models  # imported here because it takes a second, and our own networks do not need it

    if name not in (there := models.list_models(module=models)):
        others = ", torchvision's name of a classification model (such as resnet18), or your own function as package.module:function"
        raise ValueError(expected("model", name, MODELS, others, there))
    if channels != 3:
        raise ValueError(f"torchvision's {name} takes 3 channels, but these data have {channels}: take one of {', '.join(MODELS)}")
    model: nn.Module = models.get_model(name, weights=None, num_classes=classes, **_TORCHVISION_OPTIONS.get(name, {}))
    return model


def _own(name: str, modules: Modules | None, classes: int, channels: int, image_size: int) -> nn.Module:
    made = function("your own model", name, modules)
    arguments = {"classes": classes, "channels": channels, "image_size": image_size}
    try:
        inspect.signature(made).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"model {name!r} must take classes=, channels= and image_size=, but: {error}") from error
    model = made(**arguments)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {name!r} must return a torch.nn.Module, but returned {type(model).__name__}")
    return model
