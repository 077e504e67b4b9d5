"""Data of the experiments: made-up copies of published sets are read as they were written, and shifts change what they should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Picture
from torch import Tensor

from experiments import papers
from experiments.data import image_folders as folders
from experiments.data.cityscapes import load_cityscapes
from experiments.data.connectomes import SITES, WINDOW
from experiments.data.shift import Limit, limited, shifted
from fl_bn.data.csv_files import TableData
from fl_bn.data.dataset import DATASETS, DataNotFound, Dataset
from fl_bn.task import IGNORE
from tests.listed import listed
from tests.refusals import naming

Array = np.ndarray[Any, np.dtype[Any]]


def read(name: str, path: Path, image_size: int = 0) -> Dataset:
    return (DATASETS | papers.DATASETS)[name](str(path), image_size)


def draw(file: Path, pixels: Array) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Picture.fromarray(pixels).save(file)
    return file


def flat(*colour: int, width: int = 12) -> Array:
    """Make the pixels of an image of one colour."""
    return np.full((8, width, 3), colour, dtype=np.uint8)


# A split's images (N, H, H) or (N, H, H, 3) and labels (N,), as the published files have them


def mnist(root: Path, part: str, x: Array, y: Array) -> None:
    """LeCun's format: two zeros, the type (8: uint8), the number of axes, their lengths, the bytes."""
    (root / "MNIST/raw").mkdir(parents=True, exist_ok=True)
    for kind, array in (("images-idx3", x), ("labels-idx1", y)):
        header = bytes([0, 0, 8, array.ndim]) + b"".join(length.to_bytes(4, "big") for length in array.shape)
        file = root / f"MNIST/raw/{'train' if part == 'train' else 't10k'}-{kind}-ubyte"
        file.write_bytes(header + array.astype(np.uint8).tobytes())


def synth(root: Path, part: str, x: Array, y: Array) -> None:
    labels = np.where(y == 0, 10, y)  # some files call zero ten
    scipy.io.savemat(root / f"synth_{part}_32x32.mat", {"X": x.transpose(1, 2, 3, 0), "y": labels[:, None]})


def mnist_m(root: Path, part: str, x: Array, y: Array) -> None:
    lines = []
    for number, (image, digit) in enumerate(zip(x, y, strict=True)):
        file = draw(root / f"mnist_m_{part}" / f"{number:08}.png", image)
        lines.append(f"{file.name} {digit}\n")
    (root / f"mnist_m_{part}_labels.txt").write_text("".join(lines))


WRITERS: dict[str, tuple[Callable[..., None], tuple[int, ...]]] = {  # and the images' shape
    "mnist": (mnist, (28, 28)),
    "synth-digits": (synth, (32, 32, 3)),
    "mnist-m": (mnist_m, (32, 32, 3)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_published_files_are_read_as_they_were_written(name: str, tmp_path: Path) -> None:
    (write, shape), rng = WRITERS[name], np.random.default_rng(0)
    written = {}
    for part, labels in (("train", [0, 0, 1]), ("test", [1, 0])):
        x = 255 * rng.integers(0, 2, (len(labels), *shape), dtype=np.uint8)
        write(tmp_path, part, x, np.array(labels))
        written[part] = torch.from_numpy(x).view(len(labels), *shape[:2], -1).permute(0, 3, 1, 2), labels
    data = read(name, tmp_path)
    for part, (images, labels) in written.items():
        assert torch.equal(getattr(data, f"x_{part}"), images)
        assert getattr(data, f"y_{part}").tolist() == labels
    assert (data.name, data.classes, data.domains) == (name, 10, ())
    assert read(name, tmp_path, 20).x_test.shape[2:] == (20, 20)


@listed("name", ["synth-digits", "mnist-m", "tiny-imagenet", "pacs", "cityscapes", "abide"])
def test_missing_files_are_named_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    with naming(str(tmp_path), DataNotFound):
        read(name, tmp_path)
    assert not [path for path in tmp_path.rglob("*.*") if path.is_file()]


# Domains and classes as folders

DOMAINS = {
    "office-caltech10": (folders.OFFICE_DOMAINS, folders.OFFICE_CLASSES, "office_caltech_10"),
    "domainnet": (folders.DOMAINNET_DOMAINS, folders.DOMAINNET_CLASSES, "DomainNet"),
    "pacs": (folders.PACS_DOMAINS, folders.PACS_CLASSES, "PACS"),
}


def domain_folders(root: Path, name: str) -> None:
    """Draw two images of each class of each domain. Red counts domains, green classes, blue images."""
    domains, classes, _ = DOMAINS[name]
    for d, domain in enumerate(domains):
        for c, label in enumerate(classes):
            for i in range(2):
                draw(root / domain / label / f"{i}.png", flat(d, c, i))


@pytest.mark.parametrize("name", list(DOMAINS))
def test_domains_and_classes_are_what_the_folders_say(name: str, tmp_path: Path) -> None:
    domains, classes, top = DOMAINS[name]
    domain_folders(tmp_path / top, name)
    data = read(name, tmp_path, 8)
    assert (data.name, data.domains, data.classes) == (name, domains, len(classes))
    assert data.x_train.shape == (len(domains) * len(classes), 3, 8, 8)
    for x, y, domain in ((data.x_train, data.y_train, data.domain_train), (data.x_test, data.y_test, data.domain_test)):
        assert torch.equal(x[:, 0, 0, 0].long(), domain)
        assert torch.equal(x[:, 1, 0, 0].long(), y)
    assert torch.equal(read(name, tmp_path / top, 8).x_train, data.x_train)


def test_published_lists_decide_the_split(tmp_path: Path) -> None:
    name, lists = "pacs", ("splits/{}_train_kfold.txt", "splits/{}_crossval_kfold.txt")
    domains, classes, _ = DOMAINS[name]
    domain_folders(tmp_path, name)
    (tmp_path / "splits").mkdir()
    for domain in domains:
        for i, file in enumerate(lists):
            lines = [f"{domain}/{label}/{i}.png {number + 1}" for number, label in enumerate(classes)]
            (tmp_path / file.format(domain)).write_text("\n".join([*lines, f"{domain}/another/x.png 99"]))
    data = read(name, tmp_path, 8)
    assert data.x_train[:, 2, 0, 0].unique().tolist() == [0]  # blue counts images: only the listed ones
    assert data.x_test[:, 2, 0, 0].unique().tolist() == [1]
    assert torch.equal(data.x_test[:, 1, 0, 0].long(), data.y_test)  # numbers from 1 are not taken for labels
    first = tmp_path / lists[1].format(domains[0])
    first.write_text(f"../{domains[0]}/{classes[0]}/0.png 1")
    with naming("line 1"):
        read(name, tmp_path, 8)


# Five kinds of digits

STAND_INS = ("digits_chars74k_street", "digits_usps", "digits_chars74k_font", "digits_mnist_m", "digits_mnist")


@pytest.fixture
def five(tmp_path: Path) -> Path:
    """Archives of three training and two test images; those of the i-th domain have the brightness 10 i."""
    for i, name in enumerate(STAND_INS):
        x = np.full((3, 8, 8, 3), 10 * i, dtype=np.uint8)
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=np.array([0, 9, 1]), x_test=x[:2], y_test=np.array([2, 9]))
    return tmp_path


def test_pooled_domains_are_divided_anew_four_to_one(five: Path) -> None:
    """Every sample is in one part, and of its own domain. Control: the published splits are other ones."""
    plain, pooled = (read(name, five) for name in ("digits-five", "digits-five-pooled"))
    assert plain.domain_train.bincount().tolist() == [3] * 5
    assert pooled.domain_train.bincount().tolist() == [4] * 5
    assert torch.equal(pooled.x_train[:, 0, 0, 0].long(), 10 * pooled.domain_train)
    assert pooled.domains == plain.domains
    whole = [torch.cat([one.y_train, one.y_test]).bincount(minlength=10) for one in (plain, pooled)]
    assert torch.equal(whole[0], whole[1])


REGIONS = 5


def series(seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng(seed).normal(size=(WINDOW + 3, REGIONS))


def test_published_scans_are_those_of_four_sites_and_autism_is_label_1(tmp_path: Path) -> None:
    """Ten subjects in each of FedBN's sites and in one other; UM in two parts, as published; region #3455 is empty."""
    rows = ["SUB_ID,FILE_ID,SITE_ID,DX_GROUP", "999,no_filename,NYU,1"]
    (tmp_path / "cpac").mkdir()
    for s, site in enumerate((*SITES, "PITT")):
        for i in range(10):
            part = f"_{1 + i % 2}" if site in ("UM", "UCLA") else ""
            name = f"{site}{part}_{s}{i:04}"
            rows.append(f"{s}{i},{name},{site}{part},{1 + i % 2}")
            x = np.insert(series(100 * s + i), 2, 0.0, axis=1)
            np.savetxt(tmp_path / "cpac" / f"{name}_rois_ho.1D", x, header="#1\t#2\t#3455\t#4\t#5\t#6", comments="")
    (tmp_path / "Phenotypic_V1_0b_preprocessed1.csv").write_text("\n".join(rows) + "\n")
    data = read("abide", tmp_path)
    assert (data.domains, data.classes, data.channels, data.image_size) == (SITES, 2, REGIONS * (REGIONS - 1) // 2, 1)
    assert data.domain_train.bincount().tolist() == [8 * 4] * 4  # 8 subjects of 4 windows; two are tested on
    first = torch.from_numpy(np.corrcoef(series(0)[:WINDOW].T)[np.triu_indices(REGIONS, 1)])  # of NYU's first subject, whose DX_GROUP is 1
    x, y = torch.cat([data.x_train, data.x_test]), torch.cat([data.y_train, data.y_test])
    assert y[((x - first).abs() < 1e-5).all(1)].tolist() == [1]


@pytest.mark.parametrize("known", [True, False])
def test_two_scans_of_one_person_are_on_one_side(known: bool, tmp_path: Path) -> None:
    """No window that is tested on has a near-twin in training. Control: without ``subject`` many have one."""
    scans = np.stack([series(i // 2) + 1e-6 * series(100 + i) for i in range(40)])
    subject = {"subject": np.repeat(np.arange(20), 2)} if known else {}
    np.savez(tmp_path / "here.npz", series=scans, y=np.repeat(np.arange(20) % 2, 2), **subject)
    data = read("abide", tmp_path)
    assert (len(data.x_train), len(data.x_test)) == (16 * 2 * 4, 4 * 2 * 4)
    nearest = float(torch.cdist(data.x_test, data.x_train).min())
    assert nearest > 0.02 if known else nearest < 0.002


def test_cityscapes(tmp_path: Path) -> None:
    """Two cities to train on, one to validate on; 8 x 16 pixels, road at the left and sky at the right, a border of nothing."""
    ids = np.zeros((8, 16), dtype=np.uint8)
    ids[2:6, 2:8], ids[2:6, 8:14] = 7, 23
    for number, (part, city) in enumerate([("train", "aachen"), ("train", "aachen"), ("train", "bochum"), ("val", "lindau")]):
        name = f"{part}/{city}/{city}_{number:06}_000019"
        draw(tmp_path / f"leftImg8bit/{name}_leftImg8bit.png", flat(*[number] * 3, width=16))
        draw(tmp_path / f"gtFine/{name}_gtFine_labelIds.png", ids)
    data, smaller = (load_cityscapes(str(tmp_path), size) for size in (0, 4))
    assert (data.domains, data.classes, data.image_size) == (("aachen", "bochum", "lindau"), 19, 8)
    assert data.domain_train.tolist() == [0, 0, 1]
    assert data.x_train[:, 0, 0, 0].tolist() == [0, 1, 2]
    expected = torch.full((8, 16), IGNORE)
    expected[2:6, 2:8], expected[2:6, 8:14] = 0, 10
    assert torch.equal(data.y_train[0], expected)
    assert smaller.y_train.unique().tolist() == [0, 10, IGNORE]  # the nearest pixel: an average would be another class


# Domains made by shifts, and the limit per domain


def made_up(train: int = 20, test: int = 6, channels: int = 3, size: int = 8) -> Dataset:
    """Images whose first pixel counts them."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (train + test, channels, size, size), generator=rng, dtype=torch.uint8)
    x[:, 0, 0, 0] = torch.arange(train + test)
    y = torch.arange(train + test) % 3
    return Dataset("made-up", x[:train], y[:train], x[train:], y[train:], classes=3)


@given(train=st.integers(4, 40), seed=st.integers(0, 99))
def test_training_samples_are_divided_equally_and_test_samples_repeated(train: int, seed: int) -> None:
    data = made_up(train)
    found = shifted(data, ["none", "invert"], seed)
    sizes, first = found.domain_train.bincount(), found.x_train[:, 0, 0, 0].long()
    assert sizes.max() - sizes.min() <= 1
    numbers = torch.where(found.domain_train == 1, 255 - first, first)
    assert sorted(numbers.tolist()) == list(range(train))  # disjoint, and all of them
    assert torch.equal(found.y_train, numbers % 3)
    assert torch.equal(found.x_test, torch.cat([data.x_test, 255 - data.x_test]))


def only(name: str, x: Tensor) -> Tensor:
    data = Dataset("x", x, torch.zeros(len(x), dtype=torch.int64), x, torch.zeros(len(x), dtype=torch.int64), classes=1)
    return shifted(data, [name], 0).x_test


def test_what_each_shift_does() -> None:
    x = made_up(16).x_train
    assert torch.equal(only("invert", x), 255 - x)
    assert torch.equal(only("dark", x), x // 4)
    assert abs(float((only("noise", torch.full_like(x, 128)).float() - 128).std()) - 40) < 1.5
    flat = torch.full((2, 3, 9, 9), 77, dtype=torch.uint8)
    assert torch.equal(only("blur", flat), flat)
    coarse = only("pixels", x)
    assert torch.equal(coarse[..., ::2, ::2], coarse[..., 1::2, 1::2])
    stroke = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    stroke[:, :, 4:24, 12:18] = 255
    thin, broken, swollen, thick = (only(name, stroke).sum() for name in ("thin", "fracture", "swelling", "thick"))
    assert thin < broken < stroke.sum() < swollen < thick
    assert only("background", torch.zeros_like(x)).float().std() > 20  # a black image is all photograph


TABLE = TableData("t", torch.rand(4, 3), torch.zeros(4, dtype=torch.int64), torch.rand(2, 3), torch.zeros(2, dtype=torch.int64), 1)


def test_wrong_shifts_are_refused() -> None:
    for data, names, word in ((made_up(), ["sepia"], "shifts"), (TABLE, ["blur"], "x_train")):
        with naming(word):
            shifted(data, names, 0)


def test_a_share_of_each_domain_is_kept_whatever_its_size() -> None:
    domains = torch.tensor([0] * 20 + [1] * 10)
    uneven = replace(made_up(30), domains=("a", "b"), domain_train=domains, domain_test=torch.zeros(6, dtype=torch.int64))
    for limit, sizes in ((Limit(share=0.3), [6, 3]), (Limit(5), [5, 5]), (Limit(5, share=0.3), [5, 3])):
        assert limited(uneven, limit, 0).domain_train.bincount().tolist() == sizes
    assert [Limit(share=0.1).of(n) for n in (79431, 7438, 391162, 56000)] == [7943, 743, 39116, 5600]  # FedBN, Table 15
    assert Limit(share=0.29).of(100) == 29  # in floating point 28.999...
