"""Check a data set's files before a run: the files must exist, be well formed, and be complete.

Nothing is downloaded or written. For large sets, all files are listed, but only one sample of each split is read. For
sets of image folders, one sample of each split and domain is read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fl_bn.data.catalogue import CATALOGUE, CatalogueEntry
from fl_bn.data.connectomes import read_sites
from fl_bn.data.csv_files import TableError, csv_files, load_csv, read_rows
from fl_bn.data.dataset import DATASETS
from fl_bn.data.digits_five import SIZE, sources
from fl_bn.data.folder import read_picture
from fl_bn.data.function import load_function
from fl_bn.data.image_folders import LAYOUTS
from fl_bn.data.listing import LARGE, LargeData
from fl_bn.data.public import CLASSES, ROOT, files_of
from fl_bn.data.record import DataNotFound, Dataset, describe, without_class_0
from fl_bn.data.segmentation import cityscapes_files, read_mask
from fl_bn.support.extras import need
from fl_bn.support.finding import Finding
from fl_bn.support.names import expected

FEATURES = 5995  # correlations between ABIDE's 110 regions


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LargeData)  # a finding tells the size, or the data are not loaded
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
    entry = CATALOGUE.get(name)
    if entry is None or not entry.tree:
        return "correct data-path, or put the files there"
    return f"put into {path or ROOT}: {'; '.join(' '.join(line.split()) for line in entry.tree.splitlines())} ({entry.source})"


def _check_of(name: str) -> Callable[[str, str], Iterator[Finding]]:
    if name.upper() in CLASSES:
        return _public
    if name in LAYOUTS:
        return _images
    if name.startswith("digits-five"):
        return _digits_five
    return {"cityscapes": _cityscapes, "abide": _abide, "csv": _csv}.get(name, _whole)


def _whole(name: str, path: str) -> Iterator[Finding]:
    """Load a whole data set, which must fit into memory, and yield the findings on its samples."""
    data = load_function(name, path, 0) if ":" in name else DATASETS[name](path, 0)
    yield Finding("ok", "files", _contents(data))
    yield from _counts(name, len(data.x_train) + len(data.x_test))
    if problem := without_class_0(data):
        yield Finding("fail", "labels", problem, "correct the labels: a run refuses them")


def _contents(data: Dataset) -> str:
    domains = f", domains {', '.join(data.domains)}" if data.domains else ""
    shape = tuple(data.x_train.shape[1:])
    return f"{len(data.x_train):,} + {len(data.x_test):,} samples {shape} of {describe(data.y_train, data.classes)}{domains}"


def _counts(name: str, samples: int) -> Iterator[Finding]:
    entry = CATALOGUE.get(name, CatalogueEntry("", "", "", "by hand"))
    if entry.samples and samples not in entry.samples:
        expected = " or ".join(f"{count:,}" for count in entry.samples)
        yield Finding(
            "warn",
            "number",
            f"{samples:,} samples, but the published set has {expected}",
            "fetch the missing samples, or go on: results are then not those of the whole set",
        )


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
    yield from _counts(name, sum(sizes))


def _images(name: str, path: str) -> Iterator[Finding]:
    layout = LAYOUTS[name]
    listing = layout.files(path)
    domains = f", domains {', '.join(listing.domains)}" if listing.domains else ""
    total = len(listing.train) + len(listing.test)
    yield Finding("ok", "files", f"{len(listing.train):,} + {len(listing.test):,} images of {len(listing.classes)} classes{domains}")
    yield from _counts(name, total)
    for part, images in (("train", listing.train), ("test", listing.test)):
        for domain in sorted({image.domain for image in images}):
            first = next(image for image in images if image.domain == domain)
            picture = read_picture(first.file)
            yield Finding(
                "ok", "sample", f"{part} {first.file.name}: {picture.shape[0]} x {picture.shape[1]}, {listing.classes[first.label]}"
            )
    yield _memory(total * 3 * layout.size**2, f"at image-size {layout.size}, the default")


def _memory(size: int, when: str) -> Finding:
    text = f"{size / 2**30:.1f} GiB in every process {when}"
    large = size / 2**30 >= LARGE
    return (
        Finding("warn", "memory", text, "make sure that the machine has this much memory, or choose a smaller image-size")
        if large
        else Finding("ok", "memory", text)
    )


def _cityscapes(name: str, path: str) -> Iterator[Finding]:
    train, test, cities = cityscapes_files(path)
    yield Finding("ok", "files", f"{len(train):,} + {len(test):,} images with masks, domains {', '.join(cities)}")
    yield from _counts(name, len(train) + len(test))
    height = 0
    for part, pairs in (("train", train), ("val", test)):
        height, width = read_picture(pairs[0].image).shape[:2]
        labelled = float((read_mask(pairs[0].mask, height) != 255).float().mean())
        yield Finding("ok", "sample", f"{part} {pairs[0].image.name}: {height} x {width}, {labelled:.0%} of the pixels labelled")
    yield _memory((len(train) + len(test)) * 2 * height**2 * (3 + 8), f"at image-size {height}, the default")


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


def _abide(name: str, path: str) -> Iterator[Finding]:
    sites = read_sites(Path(path or ROOT))
    for site, subjects in sites.items():
        length = subjects[0].features
        autism = sum(subject.label for subject in subjects)
        text = f"{site}: {len(subjects)} subjects, {autism} with autism, vectors of {length:,} numbers"
        if length == FEATURES:
            yield Finding("ok", "files", text)
        else:
            yield Finding("warn", "files", text, f"expected {FEATURES:,} numbers, of 110 regions; go on if all sites have this length")


def _digits_five(name: str, path: str) -> Iterator[Finding]:
    folder = Path(path or ROOT)
    for source in sources(folder):
        if not source.found(folder):
            yield Finding("warn", source.domain, "is not there", "nothing to do where there is internet: the first run downloads it")
            continue
        text = _contents(source.load(folder, SIZE))
        if "-for-" in source.domain:
            stands_for = source.domain.rpartition("-for-")[2]
            yield Finding("warn", source.domain, text, f"add the files of {stands_for} for the paper's domain; this set stands in for it")
        else:
            yield Finding("ok", source.domain, text)
