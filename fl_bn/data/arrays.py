"""Load your own arrays: from numpy archives, or from a function.

Legend: N samples, C channels, H height.
"""

from __future__ import annotations

import inspect
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_bn.data.images import images_to_tensor, resize
from fl_bn.data.record import DataError, DataNotFound, Dataset, domains_of, expect, paths, same_form
from fl_bn.support.user_code import Modules, function
from fl_bn.task import IGNORE, LABELS, MASKS, kind_of

KEYS = ("x_train", "y_train", "x_test", "y_test")

Array = NDArray[np.generic]


def load_npz(path: str, image_size: int) -> Dataset:
    """Load the data set ``npz`` from archives. Each is a domain with the file's name.

    An archive has ``x_train``, ``y_train``, ``x_test`` and ``y_test``. Images are
    uint8 (N, H, H, C) or (N, H, H). Labels are integers (N,) from 0; the largest,
    plus one, is the number of classes. For other tasks, targets are floats (N,) or
    (N, D) (regression), 0 or 1 (N, K) (multi-label), or masks (N, H, W). Grey
    images get three equal channels if others are in colour. Pickled objects are
    never loaded.

    Args:
        path: the archives, separated by commas.
        image_size: pixels along each side. 0: the largest image's.

    Raises:
        DataNotFound: there is no such file.
        DataError: there is no path, two files have one name, or an archive has
            another form.
    """
    files = paths(path)
    expect(bool(files), "npz", "data-path", "one .npz file, or several separated by commas", "none")
    return joined("npz", files, [_dataset(str(file), _read(file), floats=False) for file in files], image_size)


def joined(name: str, sites: Sequence[Path], sets: Sequence[Dataset], image_size: int) -> Dataset:
    """Join the data of several files or folders, each a domain."""
    channels, size = max(one.channels for one in sets), image_size or max(one.image_size for one in sets)
    tensors: dict[str, Any] = {}
    for key in KEYS:
        parts = [getattr(one, key) for one in sets]
        if key[0] == "x":
            parts = [resize(x.expand(-1, channels, -1, -1) if x.shape[1] == 1 else x, size).contiguous() for x in parts]
        same_form(name, key, parts)
        tensors[key] = torch.cat(parts)
    domains = domains_of(sites, [len(one.y_train) for one in sets], [len(one.y_test) for one in sets])
    return Dataset(name, **tensors, classes=max(one.classes for one in sets), counted=sets[0].counted, **domains)


def load_function(name: str, path: str, image_size: int, modules: Modules | None = None) -> Dataset:
    """Load the data that a function of your own returns: ``function(path)``.

    The function may have a parameter ``image_size``. It returns ``x_train, y_train,
    x_test, y_test`` as arrays or tensors, with targets as in ``load_npz``. Samples
    are

    * floats (N, ...) of any shape, which the network receives as float32, neither
      scaled nor resized: ``image_size`` must be 0 or their size (1 for a table); or
    * square uint8 images (N, H, H) or (N, H, H, C) with 1 or 3 channels, which are
      resized.

    It runs on the machine that holds the data, with all rights of the process.

    Args:
        name: "package.module:function".
        path: the function's argument.
        image_size: pixels along each side. 0: the size of the data.
        modules: modules that may hold the function. None: any.

    Raises:
        DataNotFound: the function raised FileNotFoundError.
        ValueError: there is no such function, it failed, or its data have another
            form.
    """
    returned = _called(name, path, image_size, modules)
    four = isinstance(returned, tuple | list) and len(returned) == len(KEYS)
    expect(four, name, "", ", ".join(KEYS), f"{type(returned).__name__} of {len(returned)}" if hasattr(returned, "__len__") else returned)
    data = _dataset(name, {key: _array_of(name, key, value) for key, value in zip(KEYS, returned, strict=True)}, floats=True)
    if data.x_train.dtype == torch.uint8:
        return replace(data, x_train=resize(data.x_train, image_size), x_test=resize(data.x_test, image_size))
    fits = image_size in (0, data.image_size)
    expect(fits, name, "", f"image-size=0 or {data.image_size}, as floats are never resized", f"image-size={image_size}")
    return data


def _dataset(name: str, arrays: Mapping[str, Array], *, floats: bool) -> Dataset:
    """Convert four arrays, and count the classes. ``name`` is the source in errors."""
    tensors: dict[str, Any] = {
        key: _samples(name, key, arrays[key], floats) if key[0] == "x" else _targets(name, key, arrays[key]) for key in KEYS
    }
    targets = [tensors["y_train"], tensors["y_test"]]
    same_form(name, "y_train and y_test", targets)
    kind, outputs = kind_of(targets[0]), 1 if targets[0].ndim == 1 else targets[0].shape[1]
    labels = [y[y != IGNORE] if kind == MASKS else y for y in targets if kind in (LABELS, MASKS)]
    classes = 1 + max((int(y.max()) for y in labels if len(y)), default=0) if labels else outputs
    return Dataset(name, **tensors, classes=classes, counted=bool(labels))


def _samples(source: object, key: str, x: Array, floats: bool) -> Tensor:
    """Convert floats to float32, and images to uint8 (N, C, H, H)."""
    if floats and np.issubdtype(x.dtype, np.floating):
        return _float32(x)
    wanted = "images of uint8 (0..255), (N, H, H) or (N, H, H, C)" + (", or floats" if floats else ": scale other values, and round them")
    nan = " with NaN" if np.issubdtype(x.dtype, np.floating) and np.isnan(x).any() else ""
    expect(x.dtype == np.uint8 and x.ndim in (3, 4), source, key, wanted, f"{x.dtype}{nan} {x.shape}")
    return images_to_tensor(x.astype(np.uint8, copy=False))


def _targets(source: object, key: str, y: Array) -> Tensor:
    """Convert targets: whole numbers and truth values to int64, (N, 1) as (N,), and others to float32."""
    expect(y.dtype.kind in "biuf", source, key, "labels (N,), 0 or 1 (N, K), or floats for regression", f"{y.dtype} {y.shape}")
    if y.dtype.kind == "f":
        return _float32(y)
    return torch.from_numpy(y.astype(np.int64)[:, 0] if y.shape[1:] == (1,) else y.astype(np.int64))


def _float32(x: Array) -> Tensor:
    with np.errstate(over="ignore"):  # infinities are refused by ``Dataset``
        return torch.from_numpy(x.astype(np.float32))


def _read(file: Path) -> dict[str, Array]:
    """Read the four arrays of an archive."""
    if not file.is_file():
        raise DataNotFound(f"dataset 'npz': there is no file {str(file)!r} in {Path.cwd()}")
    key, arrays = "", dict[str, Array]()
    try:
        archive = np.load(file, allow_pickle=False)
        expect(isinstance(archive, np.lib.npyio.NpzFile), file, "", "an archive of several arrays, as np.savez writes it", "one array")
        with archive:
            for key in KEYS:
                expect(key in archive.files, file, key, "this array", ", ".join(archive.files) or "no array")
                arrays[key] = archive[key]
            return arrays
    except DataError:
        raise
    except (ValueError, EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(file, f"expected arrays of numbers, as np.savez writes them, but could not read them: {error}", key) from error


def _called(name: str, path: str, image_size: int, modules: Modules | None) -> Any:
    """Import a data function, call it, and return what it returns."""
    try:
        loaded: Callable[..., Any] = function("a data function", name, modules)
        parameters = inspect.signature(loaded).parameters
        return loaded(path, **({"image_size": image_size} if "image_size" in parameters else {}))
    except Exception as error:  # a user's module may raise anything
        raise DataError(name, f"expected data for path {path!r}, but got {type(error).__name__}: {error}") from error


def _array_of(name: str, key: str, value: Any) -> Array:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()  # numpy knows no bfloat16
    expect(isinstance(value, np.ndarray) and value.ndim > 0, name, key, "an array or a tensor of samples", type(value).__name__)
    array: Array = value
    return array
