"""Load digits of five kinds: SVHN, USPS, SynthDigits, MNIST-M and MNIST, the five-domain task of FedBN.

``digits-five`` has the published splits. ``digits-five-pooled`` pools both splits of each set and divides them
again into 80 % training and 20 % test samples, as FedBN does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.data.listing import find_root, lines_of, read_all
from experiments.data.public import ROOT, load_public
from fl_bn.data.arrays import load_npz
from fl_bn.data.folder import read_picture
from fl_bn.data.images import images_to_tensor, resize
from fl_bn.data.record import DataNotFound, Dataset, expect

SIZE = 28  # pixels of digits-five if image_size is 0, as in FedBN
SPLITS = ("train", "test")
TRAINING = (4, 5)  # share that FedBN trains on: for USPS 7,438 of 9,298 samples (its published split has 7,291)
_STREAM = 0xD161  # sets this draw apart from others that start from the same seed
MNIST_M = ("mnist_m_train", "mnist_m_train_labels.txt", "mnist_m_test", "mnist_m_test_labels.txt")
SYNTH = ("synth_train_32x32.mat", "synth_test_32x32.mat")
MNIST_M_NPZ = ("mnist_m.npz", "digits_mnist_m.npz")


def load_mnist_m(path: str, image_size: int) -> Dataset:
    """Load ``mnist-m`` (3, 32, 32).

    ``path`` is an ``.npz`` file, a folder with such a file, or a folder with the published folders of images and
    their lists of labels.

    Raises:
        DataNotFound: ``path`` has none of these.
        ValueError: a file has another form.
    """
    name, base = "mnist-m", Path(path or ROOT)
    archives = [base] if base.suffix == ".npz" else [base / file for file in MNIST_M_NPZ if (base / file).is_file()]
    if archives:
        data = load_npz(str(archives[0]), image_size)
        return _digits(name, data.x_train, data.y_train, data.x_test, data.y_test)
    root = find_root(name, path, MNIST_M, ("mnist_m", "MNIST-M"))
    splits = [_numbered_images(name, root / f"mnist_m_{split}", root / f"mnist_m_{split}_labels.txt", image_size) for split in SPLITS]
    return _digits(name, *splits[0], *splits[1])


def _numbered_images(name: str, folder: Path, listing: Path, image_size: int) -> tuple[Tensor, Tensor]:
    """Read the images (N, 3, H, H) and labels (N,) that ``listing`` names, one "FILE DIGIT" per line."""
    files, labels = [], []
    for number, line in enumerate(lines_of(listing), start=1):
        parts = line.split()
        if len(parts) != 2 or parts[1] not in set("0123456789") or "/" in parts[0]:
            raise ValueError(f"{listing}, line {number}: expected 'FILE DIGIT', but got {line!r}")
        files.append(folder / parts[0])
        labels.append(int(parts[1]))
        if not files[-1].is_file():
            raise DataNotFound(f"dataset {name!r}: {listing.name}, line {number} names {files[-1]}, which is not there")
    expect(bool(files), listing, "", "one 'FILE DIGIT' per line", "an empty file")
    shape = images_to_tensor(read_picture(files[0])[None]).shape[-2:]

    def read(file: Path) -> Tensor:
        image = images_to_tensor(read_picture(file)[None])
        expect(image.shape[-2:] == shape, file, "", f"the size of the other images, {tuple(shape)}", tuple(image.shape[-2:]))
        return image.expand(-1, 3, -1, -1)[0]

    return resize(read_all(files, (3, *shape), torch.uint8, read), image_size), torch.tensor(labels)


def load_synth_digits(path: str, image_size: int) -> Dataset:
    """Load ``synth-digits``: 479,400 training and 9,553 test rendered digits (3, 32, 32), from two published MATLAB files.

    Raises:
        DataNotFound: the files are not below ``path``.
        ValueError: a file has another form.
    """
    name = "synth-digits"
    root = find_root(name, path, SYNTH, ("SynthDigits",))
    splits = [read_mat(root / file, image_size) for file in SYNTH]
    return _digits(name, *splits[0], *splits[1])


def read_mat(file: Path, image_size: int) -> tuple[Tensor, Tensor]:
    """Read the images (N, 3, H, H) and labels (N,) of a MATLAB file in the format of SVHN.

    The file holds ``X`` (H, H, 3, N) and ``y`` (N, 1), in which the digit 0 may have the label 10.

    Raises:
        ValueError: the file cannot be read, or has another form.
    """
    from scipy.io import loadmat  # type: ignore[import-untyped]  # imported here because other data sets do not need it
    from scipy.io.matlab import MatReadError  # type: ignore[import-untyped]

    try:
        arrays = loadmat(file, variable_names=["X", "y"])
    except (ValueError, TypeError, OSError, EOFError, NotImplementedError, MatReadError) as error:
        raise ValueError(f"{file}: expected a MATLAB file (version 5 to 7), but could not read it: {error}") from error
    expect({"X", "y"} <= arrays.keys(), file, "", "the variables X and y", ", ".join(arrays) or "nothing")
    x: NDArray[np.uint8] = arrays["X"]
    y = np.asarray(arrays["y"]).reshape(-1)
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[2] != 3 or x.shape[0] != x.shape[1] or y.shape != x.shape[3:] or len(y) == 0:
        raise ValueError(f"{file}: expected X as uint8 (H, H, 3, N) and y as (N, 1), but got {x.dtype} {x.shape} and {arrays['y'].shape}")
    labels = y.astype(np.int64)
    if labels.min() < 0 or labels.max() > 10 or (labels.max() == 10 and labels.min() == 0):
        raise ValueError(f"{file}: y must be 0..9, or 1..10 with 10 for zero, but spans {labels.min()}..{labels.max()}")
    return resize(images_to_tensor(x.transpose(3, 0, 1, 2)), image_size), torch.from_numpy(labels % 10)


@dataclass(frozen=True)
class Source:
    """Describe a possible source of one domain.

    Attributes:
        domain: name of the domain.
        found: ``found(folder)`` returns whether the files are in ``folder``.
        load: ``load(folder, image_size)`` reads the files.
    """

    domain: str
    found: Callable[[Path], bool]
    load: Callable[[Path, int], Dataset]


def _archive(domain: str, file: str) -> Source:
    return Source(domain, lambda folder: (folder / file).is_file(), lambda folder, size: load_npz(str(folder / file), size))


def _published(domain: str, kind: str, subfolder: str, files: tuple[str, ...]) -> Source:
    """Make a source that torchvision reads. Its files are downloaded only if the domain has no other source."""
    return Source(
        domain,
        lambda folder: all((folder / subfolder / file).exists() for file in files),
        lambda folder, size: load_public(kind, str(folder / subfolder), size),
    )


def _find(load: Callable[[str, int], Dataset], domain: str, subfolder: str, needs: tuple[str, ...]) -> Source:
    def root(folder: Path) -> Path:
        return next((place for place in (folder / subfolder, folder) if all((place / file).exists() for file in needs)), folder)

    return Source(domain, lambda folder: (root(folder) / needs[0]).exists(), lambda folder, size: load(str(root(folder)), size))


# For each domain, the first source whose files exist is used. The domain's name tells whether another data set stands in.
SVHN = _published("SVHN", "SVHN", "SVHN", ("train_32x32.mat", "test_32x32.mat"))
USPS = _published("USPS", "USPS", "USPS", ("usps.bz2", "usps.t.bz2"))
MNIST = _published("MNIST", "MNIST", "", ("MNIST/raw",))
FIVE: tuple[tuple[Source, ...], ...] = (
    (SVHN, _archive("SVHN", "svhn.npz"), _archive("chars74k-street-for-SVHN", "digits_chars74k_street.npz")),
    (USPS, _archive("USPS", "usps.npz"), _archive("USPS", "digits_usps.npz")),
    (
        _find(load_synth_digits, "SynthDigits", "SynthDigits", SYNTH),
        _archive("SynthDigits", "synth_digits.npz"),
        _archive("chars74k-font-for-SynthDigits", "digits_chars74k_font.npz"),
    ),
    (
        _find(load_mnist_m, "MNIST-M", "MNIST-M", MNIST_M),
        *(_archive("MNIST-M", file) for file in MNIST_M_NPZ),
    ),
    (MNIST, _archive("MNIST", "mnist.npz"), _archive("MNIST", "digits_mnist.npz")),
)
DOWNLOADED = (SVHN, USPS, MNIST)


def sources(folder: Path) -> list[Source]:
    """Choose the source of each of the five domains: SVHN, USPS, SynthDigits, MNIST-M and MNIST.

    For each domain, this is the first source whose files are in ``folder``. If SVHN, USPS or MNIST has no such source, its
    source is torchvision, which downloads the domain when it is loaded.

    Raises:
        DataNotFound: a domain has no files in ``folder``, and torchvision cannot download it.
    """
    chosen = []
    for candidates in FIVE:
        source = next((source for source in candidates if source.found(folder)), None)
        if source is None and candidates[0] not in DOWNLOADED:
            raise DataNotFound(f"dataset 'digits-five': {str(folder)!r} has no files of {candidates[0].domain} (experiments/data.md)")
        chosen.append(source or candidates[0])
    return chosen


def load_digits_five(path: str, image_size: int) -> Dataset:
    """Load ``digits-five``: the domains SVHN, USPS, SynthDigits, MNIST-M and MNIST in colour.

    The files are found by their names in the folder ``path`` (experiments/data.md). If Chars74K's street or font
    digits replace SVHN or SynthDigits, the domain is called after both: ``chars74k-street-for-SVHN``. Images
    have 28 x 28 pixels if ``image_size`` is 0.

    Raises:
        DataNotFound: a domain has no files, and cannot be downloaded.
        ValueError: a file has another form.
    """
    folder = Path(path or ROOT)
    chosen = sources(folder)
    sets = [source.load(folder, image_size or SIZE) for source in chosen]
    colour = [[x.expand(-1, 3, -1, -1) for x in (data.x_train, data.x_test)] for data in sets]
    domains = [
        torch.repeat_interleave(torch.arange(len(sets)), torch.tensor(sizes))
        for sizes in ([len(data.y_train) for data in sets], [len(data.y_test) for data in sets])
    ]
    return Dataset(
        "digits-five",
        torch.cat([train for train, _ in colour]),
        torch.cat([data.y_train for data in sets]),
        torch.cat([test for _, test in colour]),
        torch.cat([data.y_test for data in sets]),
        classes=10,
        domain_train=domains[0],
        domain_test=domains[1],
        domains=tuple(source.domain for source in chosen),
    )


def load_digits_five_pooled(path: str, image_size: int) -> Dataset:
    """Load ``digits-five-pooled``: ``digits-five``, but with 80 % of each domain's samples as training samples.

    The published splits are pooled. The division is random, but the same in every run. The FedBN paper says: "testing samples
    are held out and kept the same for all the experiments".

    Raises:
        DataNotFound: a domain has no files, and cannot be downloaded.
        ValueError: a file has another form.

    References:
        FedBN (Li et al., ICLR 2021), section 5.1, and its authors' code.
    """
    data = load_digits_five(path, image_size)
    assert data.domain_train is not None
    assert data.domain_test is not None
    x, y = torch.cat([data.x_train, data.x_test]), torch.cat([data.y_train, data.y_test])
    domain = torch.cat([data.domain_train, data.domain_test])
    train, test = list[Tensor](), list[Tensor]()
    for index in range(len(data.domains)):
        own = (domain == index).nonzero()[:, 0].numpy()
        order = np.random.default_rng(np.random.SeedSequence([_STREAM, index])).permutation(own)
        cut = TRAINING[0] * len(own) // TRAINING[1]
        train.append(torch.from_numpy(np.sort(order[:cut])))
        test.append(torch.from_numpy(np.sort(order[cut:])))
    to_train, to_test = torch.cat(train), torch.cat(test)
    return replace(
        data,
        name="digits-five-pooled",
        x_train=x[to_train],
        y_train=y[to_train],
        x_test=x[to_test],
        y_test=y[to_test],
        domain_train=domain[to_train],
        domain_test=domain[to_test],
    )


_digits = partial(Dataset, classes=10)
