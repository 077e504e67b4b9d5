"""Load published sets of image folders: Office-Caltech10, DomainNet, PACS, Tiny-ImageNet and ImageNet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from experiments.data.listing import Fit, Image, Listing, class_images, find_root, lines_of, listed_images, read_listing, split
from fl_bn.data.folder import visible
from fl_bn.data.record import DataNotFound, Dataset

OFFICE_DOMAINS = ("amazon", "caltech", "dslr", "webcam")
OFFICE_CLASSES = (
    "back_pack",
    "bike",
    "calculator",
    "headphones",
    "keyboard",
    "laptop_computer",
    "monitor",
    "mouse",
    "mug",
    "projector",
)
DOMAINNET_DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
DOMAINNET_CLASSES = ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra")
PACS_DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


@dataclass(frozen=True)
class FolderLayout:
    """Describe the layout of a data set on the disk.

    Attributes:
        files: ``files(path)`` returns the list of the set's image files.
        size: pixels per side of the images if image_size is 0.
        how: how images of other sizes are resized: "crop" or "stretch", as in ``read_listing``.
    """

    files: Callable[[str], Listing]
    size: int
    how: Fit = "crop"


def load_images(name: str, path: str, image_size: int) -> Dataset:
    """Load a data set of ``LAYOUTS`` from the folder ``path``; ``data`` if empty. The whole set is in memory, as uint8.

    Raises:
        DataNotFound: files are missing; they are not downloaded.
        ValueError: a list or an image cannot be read.
    """
    layout = LAYOUTS[name]
    return read_listing(layout.files(path), image_size or layout.size, layout.how)


def domain_folders(
    name: str, path: str, domains: tuple[str, ...], classes: tuple[str, ...], lists: tuple[str, str] | None, tops: tuple[str, ...]
) -> Listing:
    """List the images ``DOMAIN/CLASS/*`` of a data set.

    The published lists of each domain decide the split if they are there. Otherwise the split is random (``split``).

    Args:
        name: name of the set.
        path: folder of the set.
        domains: names of the domains.
        classes: names of the classes.
        lists: names of a domain's two list files, for training and for test, with ``{}`` for the domain. The files
            are in the set's folder or in a folder in it. None: there are no lists.
        tops: possible names of a folder below ``path`` that holds the set.

    Raises:
        DataNotFound: a folder or a listed file is missing. Or some lists are missing, so two ways to split would be mixed.
        ValueError: a line of a list has another form, or a split has no images.
    """
    root = find_root(name, path, domains, tops)
    names = [file.format(domain) for domain in domains for file in lists or ()]
    matches = {file: next(iter(sorted([*root.glob(file), *root.glob(f"*/{file}")])), None) for file in names}
    if any(matches.values()):
        if absent := [file for file, place in matches.items() if place is None]:
            raise DataNotFound(f"dataset {name!r}: the split lists {', '.join(absent)} are missing below {root}")
        places = [place for place in matches.values() if place is not None]
        train, test = (
            [image for i, file in enumerate(places[half::2]) for image in listed_images(name, root, file, classes, i)] for half in (0, 1)
        )
    else:
        train, test = split([image for i, domain in enumerate(domains) for image in class_images(name, root / domain, classes, i)])
    return Listing(name, train, test, classes, domains)


def tiny_imagenet(path: str) -> Listing:
    """List the images of Tiny-ImageNet. Labels number the WordNet ids (WNIDs) of wnids.txt in sorted order.

    The training split is ``train/WNID/images/*``. The test split is ``val/images/*``, with the classes in
    ``val/val_annotations.txt``.

    Raises:
        DataNotFound: a file or folder is missing.
        ValueError: a line of ``val_annotations.txt`` has another form.
    """
    name = "tiny-imagenet"
    root = find_root(name, path, ("wnids.txt", "train", "val/images", "val/val_annotations.txt"), ("tiny-imagenet-200",))
    classes = tuple(sorted(lines_of(root / "wnids.txt")))
    labels = {wnid: label for label, wnid in enumerate(classes)}
    train = []
    for label, wnid in enumerate(classes):
        train += [Image(image.file, label) for image in class_images(name, root / "train" / wnid, ["images"])]
    test, annotations = [], root / "val" / "val_annotations.txt"
    for number, line in enumerate(lines_of(annotations), start=1):
        parts = line.split()
        if len(parts) < 2 or parts[1] not in labels or "/" in parts[0]:
            raise ValueError(f"{annotations}, line {number}: expected 'FILE WNID ...' with a WNID of wnids.txt, but got {line!r}")
        file = root / "val" / "images" / parts[0]
        if not file.is_file():
            raise DataNotFound(f"dataset {name!r}: {annotations.name}, line {number} names {file}, which is not there")
        test.append(Image(file, labels[parts[1]]))
    return Listing(name, train, test, classes)


def imagenet(path: str) -> Listing:
    """List the images of ImageNet: ``train/WNID/*`` and, as the test split, ``val/WNID/*``.

    Classes are the folders of train, in the order of their names, which are WordNet ids (WNIDs).

    Raises:
        DataNotFound: a folder is missing, or ``val`` has no folder for each class.
    """
    name = "imagenet"
    root = find_root(name, path, ("train", "val"), ("imagenet", "ILSVRC2012"))
    classes = tuple(folder.name for folder in visible(root / "train") if folder.is_dir())
    if not any(entry.is_dir() for entry in visible(root / "val")):
        raise DataNotFound(f"dataset {name!r}: sort the images of {root / 'val'} into val/WNID first, as torchvision does")
    train, test = (class_images(name, root / part, classes) for part in ("train", "val"))
    return Listing(name, train, test, classes)


def _folders(
    name: str, domains: tuple[str, ...], classes: tuple[str, ...], lists: tuple[str, str] | None, top: str
) -> Callable[[str], Listing]:
    return partial(domain_folders, name, domains=domains, classes=classes, lists=lists, tops=(top,))


# FedBN resizes Office-Caltech10 and DomainNet to 256 x 256 whatever their proportions: hence "stretch".
LAYOUTS: dict[str, FolderLayout] = {
    "office-caltech10": FolderLayout(
        _folders("office-caltech10", OFFICE_DOMAINS, OFFICE_CLASSES, None, "office_caltech_10"), size=256, how="stretch"
    ),
    "domainnet": FolderLayout(
        _folders("domainnet", DOMAINNET_DOMAINS, DOMAINNET_CLASSES, ("{}_train.txt", "{}_test.txt"), "DomainNet"), size=256, how="stretch"
    ),
    "pacs": FolderLayout(_folders("pacs", PACS_DOMAINS, PACS_CLASSES, ("{}_train_kfold.txt", "{}_crossval_kfold.txt"), "PACS"), size=227),
    "tiny-imagenet": FolderLayout(tiny_imagenet, size=64),
    "imagenet": FolderLayout(imagenet, size=224),
}
