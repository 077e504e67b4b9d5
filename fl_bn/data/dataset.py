"""Load a data set by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from fl_bn.data import arrays, csv_files, digits, folder
from fl_bn.data.batches import to_input
from fl_bn.data.columns import FILE as COLUMNS
from fl_bn.data.record import DataNotFound, Dataset, paths
from fl_bn.support.names import expected, short
from fl_bn.support.user_code import Modules

__all__ = ["DATASETS", "DataNotFound", "Dataset", "load", "to_input"]

DATASETS: dict[str, Callable[[str, int], Dataset]] = {
    "digits": digits.load_digits,
    "digits-plain": digits.load_digits_plain,
    "npz": arrays.load_npz,
    "folder": folder.load_folder,
    "csv": csv_files.load_csv,
}
PER_SITE: dict[str, Callable[[str], list[Path]]] = {"npz": paths, "folder": paths, "csv": csv_files.listed}
"""Functions that list the sites' files or folders in a path, by data set."""


def named(text: str) -> tuple[str, str]:
    """Return the data set and the path that a text names."""
    kind, colon, path = text.partition(":")
    if colon and kind in DATASETS:
        return kind, path
    files = [] if colon else paths(text)
    if missing := [file for file in files if len(file.parts) > 1 and not file.exists()]:
        raise DataNotFound(f"there is no file or folder {short(str(missing[0]))}")
    kinds = {"csv" if (file / COLUMNS).is_file() else "folder" if file.is_dir() else file.suffix[1:] for file in files}
    return (kinds.pop(), text) if len(kinds) == 1 and kinds <= DATASETS.keys() else (text, "")


def load(name: str, path: str = "", image_size: int = 0, modules: Modules | None = None) -> Dataset:
    """Load a data set by name. A process keeps the last four, and does not read a file again that changed.

    Args:
        name: one of ``DATASETS``, or your own function as
            "package.module:function".
        path: files or folders separated by commas (``npz``, ``folder``, ``csv``),
            or your function's argument.
        image_size: pixels along each side of the resized images. 0: the native
            size.
        modules: those that may hold your own function. None: any.

    Raises:
        ValueError: the name is unknown, or the data have another form.
        DataNotFound: files are missing.
    """
    return _load(name, path, image_size, modules)


# The cache is not on load(), where it would hold one entry per way of writing the arguments (by position or by name). A few sets
# suffice, as one process rarely works on more.
@lru_cache(maxsize=4)
def _load(name: str, path: str, image_size: int, modules: Modules | None) -> Dataset:
    if name not in DATASETS and ":" not in name:
        others = ", or your own function as package.module:function ('npz', 'folder' and 'csv' read your own files)"
        raise ValueError(expected("dataset", name, DATASETS, others))
    kind, _, files = name.partition(":")
    if kind in DATASETS and files:
        raise ValueError(f"dataset={short(name)} has a path: give dataset={kind!r} and data-path={short(files)}")
    if ":" in name:
        return arrays.load_function(name, path, image_size, modules)
    return DATASETS[name](path, image_size)
