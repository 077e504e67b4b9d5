"""Check a data set's files before a run: the files must exist, be well formed, and be complete. Nothing is downloaded or written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fl_bn.data.catalogue import CATALOGUE
from fl_bn.data.csv_files import TableError, csv_files, load_csv, read_rows
from fl_bn.data.dataset import DATASETS
from fl_bn.data.function import load_function
from fl_bn.data.public import CLASSES, ROOT, files_of
from fl_bn.data.record import DataNotFound, Dataset, describe, without_class_0
from fl_bn.support.extras import need
from fl_bn.support.finding import Finding
from fl_bn.support.names import expected


def check_files(name: str, path: str = "") -> list[Finding]:
    """Check the files of data set ``name`` below ``path``.

    Args:
        name: name of the data set.
        path: the run-config key ``data-path``; ``data`` if empty.

    Returns:
        The findings, at least one. Each has a status (ok, warn or fail), a text, and advice for the user.

    Raises:
        ValueError: there is no such data set.
    """
    if name not in DATASETS and ":" not in name:
        raise ValueError(expected("dataset", name, DATASETS, ", or your own function as package.module:function"))
    findings: list[Finding] = []
    try:
        findings.extend(_check_of(name)(name, path))
    except DataNotFound as error:
        findings.append(Finding("fail", "files", str(error), _where(name, path)))
    except TableError as error:
        findings.append(Finding("fail", error.file.name, str(error), "correct this file, or columns.toml"))
    except (ValueError, OSError) as error:
        findings.append(Finding("fail", "form", str(error), "replace that file by the published one, or repair it"))
    return findings


def _where(name: str, path: str) -> str:
    if name not in CATALOGUE:
        return "correct data-path, or put the files there"
    return f"put into {path or ROOT}: {CATALOGUE[name].files} ({CATALOGUE[name].source})"


def _check_of(name: str) -> Callable[[str, str], Iterator[Finding]]:
    if name.upper() in CLASSES:
        return _public
    return _csv if name == "csv" else _whole


def _whole(name: str, path: str) -> Iterator[Finding]:
    """Load a whole data set, which must fit into memory, and yield the findings on its samples."""
    data = load_function(name, path, 0) if ":" in name else DATASETS[name](path, 0)
    yield Finding("ok", "files", _contents(data))
    if problem := without_class_0(data):
        yield Finding("fail", "labels", problem, "correct the labels: a run refuses them")


def _contents(data: Dataset) -> str:
    domains = f", domains {', '.join(data.domains)}" if data.domains else ""
    shape = tuple(data.x_train.shape[1:])
    return f"{len(data.x_train):,} + {len(data.x_test):,} samples {shape} of {describe(data.y_train, data.classes)}{domains}"


def _public(name: str, path: str) -> Iterator[Finding]:
    need(f"data set {name!r}", "torchvision")
    from torchvision import datasets  # imported here because it takes a second, and other data sets do not need it

    kind: Any = getattr(datasets, name.upper())
    root = Path(path or ROOT)
    arguments: list[dict[str, Any]] = [{"split": s} for s in ("train", "test")] if name == "svhn" else [{"train": t} for t in (True, False)]
    try:
        splits = [kind(root, download=False, **argument) for argument in arguments]
    except (OSError, RuntimeError) as error:  # the files are missing, or are packed archives
        missing = [str(file) for file in files_of(kind, root) if not file.is_file()]
        if missing:
            raise DataNotFound(f"there is no {' and no '.join(missing)} (with internet access, a run downloads it)") from error
        if not name.startswith(("cifar", "mnist")):
            raise ValueError(f"{root}: torchvision cannot read the files of {name}: {error}") from error
        yield Finding("warn", "files", f"the archives in {root} are not unpacked", "nothing to do: the first run unpacks and checks them")
        return
    sizes = [len(split.data) for split in splits]
    yield Finding("ok", "files", f"{sizes[0]:,} + {sizes[1]:,} samples {tuple(splits[0].data[0].shape)} of {CLASSES[name.upper()]} classes")
    if tuple(sizes) != CATALOGUE[name].samples:
        published = " + ".join(f"{count:,}" for count in CATALOGUE[name].samples)
        yield Finding("warn", "number", f"the published set has {published} samples", "results are then not those of the whole set")


def _csv(name: str, path: str) -> Iterator[Finding]:
    """Read all CSV files, and yield the findings.

    The last finding has the run-config keys for a run in which every site has such a file (``dataset="sites"``).
    """
    data = load_csv(path, 0)
    for file in csv_files(path):
        rows = read_rows(file, data.columns)
        text = f"{len(rows.y)} rows"
        if classes := data.columns.classes:
            text += f": {', '.join(f'{label} {int((rows.y == index).sum())}' for index, label in enumerate(classes))}"
        yield Finding("ok", file.name, text)
        if rows.note:
            yield Finding("warn", file.name, rows.note, "nothing to do, if columns.toml drops rows or fills cells on purpose")
    yield Finding("ok", "files", _contents(data))
    keys = f"classes={data.classes} channels={data.channels} image-size=1 columns-digest='{data.columns.digest}'"
    yield Finding("ok", "sites", f"a run of sites with such files has dataset='sites' {keys}")
