"""Load data of your own by a function of your own: images or measurements of any shape."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_bn.data.record import DataNotFound, Dataset, images_to_tensor, outputs, resize, targets
from fl_bn.support.user_code import Modules, function

KEYS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True, eq=False)
class Measurements(Dataset):
    """Hold a labelled set whose samples are floats of any shape. The network receives them unchanged.

    ``x_train`` and ``x_test`` are finite float32 (N, ...); the other attributes are those of ``Dataset``. A
    table (N, features) counts as images of ``features`` channels and one pixel, which fits the model ``mlp``.
    """

    @property
    def image_size(self) -> int:
        """Return the length of a sample's second axis; 1 if a sample has only one axis."""
        return self.x_train.shape[2] if self.x_train.ndim > 2 else 1

    def _check_split(self, split: str, x: Tensor, y: Tensor, domain: Tensor | None) -> None:
        if x.dtype != torch.float32 or x.ndim < 2 or x.shape[0] == 0:
            raise ValueError(
                f"dataset {self.name!r}: x_{split} must be float32 of shape (N, ...), with at least one sample and two axes, but got "
                f"{x.dtype} of shape {tuple(x.shape)}"
            )
        if not bool(x.isfinite().all()):
            row = int((~x.isfinite().flatten(1).all(1)).nonzero()[0])
            raise ValueError(
                f"dataset {self.name!r}: x_{split} must be finite, as one NaN or infinity makes every weight NaN, but sample {row} is not: "
                "fill missing values, or drop the sample"
            )
        self._check_targets(f"y_{split}", y, x.shape[0])
        self._check_domain(split, domain, x.shape[0])


def load_function(name: str, path: str, image_size: int, modules: Modules | None = None) -> Dataset:
    """Load the data that a function of your own returns. The function is called as ``function(path)``.

    If the function has a parameter ``image_size``, the image size is passed by name (0: the size of the data). The function
    returns ``x_train, y_train, x_test, y_test`` as arrays or tensors. Labels are integers (N,) that count from 0. The
    number of classes is the largest label, plus one. For other tasks the targets are floats (N,) or (N, D)
    (regression), or 0 or 1 (N, K) (multi-label). Samples are either

    * floats (N, ...) of any shape, which the network receives as float32: the function must scale them. They are
      never resized, so ``image_size`` must be 0 or the size that they have (1 for a table); or
    * square uint8 images (N, H, W) or (N, H, W, C) with 1 or 3 channels. They are resized to ``image_size`` unless
      it is 0.

    The function runs on the machine that holds the data, with all rights of the process.

    Args:
        name: "package.module:function".
        path: the function's argument.
        image_size: pixels along each side. 0: the size of the data.
        modules: modules that may hold the function. None: any.

    Raises:
        DataNotFound: the function raised FileNotFoundError.
        ValueError: there is no such function, it raised another error, or it returned data in another form.
    """
    arrays = _checked_arrays(name, _called(name, _imported(name, modules), path, image_size))
    where = f"data function {name!r}"
    labels = {f"y_{split}": targets(where, f"y_{split}", arrays[f"y_{split}"], len(arrays[f"x_{split}"])) for split in ("train", "test")}
    samples = {key: _samples(name, key, arrays[key], image_size) for key in ("x_train", "x_test")}
    floats = {key: x.is_floating_point() for key, x in samples.items()}
    if len(set(floats.values())) > 1:
        given = "x_train are floats and x_test are images" if floats["x_train"] else "x_train are images and x_test are floats"
        raise ValueError(f"data function {name!r}: x_train and x_test must be both floats or both uint8 images, but {given}")
    classes = outputs(where, *labels.values())
    kind = Measurements if floats["x_train"] else Dataset
    data = kind(name, samples["x_train"], labels["y_train"], samples["x_test"], labels["y_test"], classes=classes)
    if image_size not in (0, data.image_size):
        raise ValueError(
            f"data function {name!r}: floats are not resized, so image-size must be 0 or {data.image_size}, their size, but is "
            f"{image_size}: let the function take image_size and resize them itself"
        )
    return data


def _imported(name: str, modules: Modules | None) -> Callable[..., Any]:
    try:
        return function("a data function", name, modules)
    except ValueError:
        raise
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"data function {name!r}: importing {name.partition(':')[0]} failed: {type(error).__name__}: {error}") from error


def _called(name: str, loaded: Callable[..., Any], path: str, image_size: int) -> Any:
    signature = inspect.signature(loaded)
    arguments = {"image_size": image_size} if "image_size" in signature.parameters else {}
    try:
        signature.bind(path, **arguments)
    except TypeError as error:
        raise ValueError(
            f"data function {name!r} must be callable as function(path) or function(path, image_size=...), but {error}"
        ) from error
    try:
        return loaded(path, **arguments)
    except FileNotFoundError as error:
        raise DataNotFound(f"data function {name!r} found no file for path {path!r}: {error}") from error
    except Exception as error:  # a user's function may raise anything
        raise ValueError(f"data function {name!r} raised {type(error).__name__} for path {path!r}: {error}") from error


def _checked_arrays(name: str, returned: Any) -> dict[str, np.ndarray[Any, Any]]:
    if not isinstance(returned, tuple | list) or len(returned) != len(KEYS):
        kind = f"{type(returned).__name__} of {len(returned)}" if isinstance(returned, tuple | list) else type(returned).__name__
        raise ValueError(f"data function {name!r} must return {', '.join(KEYS)}, but returned {kind}")
    arrays = {}
    for key, value in zip(KEYS, returned, strict=True):
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            value = (value.float() if value.is_floating_point() else value).numpy()  # numpy knows no bfloat16
        if not isinstance(value, np.ndarray):
            raise ValueError(f"data function {name!r}: {key} must be a numpy array or a torch tensor, but is {type(value).__name__}")
        arrays[key] = value
    for split in ("train", "test"):
        x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
        if x.ndim == 0 or y.shape[:1] != x.shape[:1]:
            raise ValueError(
                f"data function {name!r}: y_{split} needs a label for each sample of x_{split}, but the shapes are {y.shape} and {x.shape}"
            )
    return arrays


def _samples(name: str, key: str, x: np.ndarray[Any, Any], image_size: int) -> Tensor:
    """Convert floats to float32, and images to uint8 (N, C, H, H)."""
    if np.issubdtype(x.dtype, np.floating):
        with np.errstate(over="ignore"):  # infinities are refused later
            return torch.from_numpy(x.astype(np.float32))
    if x.dtype != np.uint8:
        raise ValueError(f"data function {name!r}: {key} must be floats, or images of uint8 (0..255), but is {x.dtype}")
    if x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] not in (1, 3)) or x.shape[1] != x.shape[2] or len(x) == 0:
        raise ValueError(
            f"data function {name!r}: {key} of uint8 must be at least one square image, (N, H, H) or (N, H, H, C) with 1 or 3 channels C "
            f"last, but is {x.shape}"
        )
    return resize(images_to_tensor(x), image_size)
