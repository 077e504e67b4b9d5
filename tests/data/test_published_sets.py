"""Published sets: made-up copies of each layout are read as they were written, and as their folders and lists say."""

from __future__ import annotations

import bz2
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from urllib.error import URLError

import numpy as np
import pytest
import scipy.io
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Picture

from experiments import papers
from experiments.data import image_folders as folders
from experiments.data.cityscapes import Segmentation, load_cityscapes
from experiments.data.connectomes import SITES, WINDOW, connectome, windows
from experiments.data.listing import Image, split
from fl_bn.data.dataset import DATASETS, DataNotFound, Dataset, load
from fl_bn.task import IGNORE
from tests.listed import listed
from tests.refusals import naming

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise URLError("no network in tests")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    for place in ("svhn", "utils"):  # made-up files have other hashes
        monkeypatch.setattr(f"torchvision.datasets.{place}.check_integrity", lambda *_: True)


def read(name: str, path: Path, image_size: int = 0) -> Dataset:
    return (DATASETS | papers.DATASETS)[name](str(path), image_size)


def draw(file: Path, pixels: Array) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Picture.fromarray(pixels).save(file)
    return file


def flat(*colour: int, height: int = 8, width: int = 12) -> Array:
    """Make the pixels of an image of one colour."""
    return np.full((height, width, 3), colour, dtype=np.uint8)


# A split's images (N, H, H) or (N, H, H, 3) and labels (N,), as the published files have them


def mnist(root: Path, part: str, x: Array, y: Array) -> None:
    """LeCun's format: two zeros, the type (8: uint8), the number of axes, their lengths, the bytes."""
    (root / "MNIST/raw").mkdir(parents=True, exist_ok=True)
    for kind, array in (("images-idx3", x), ("labels-idx1", y)):
        header = bytes([0, 0, 8, array.ndim]) + b"".join(length.to_bytes(4, "big") for length in array.shape)
        file = root / f"MNIST/raw/{'train' if part == 'train' else 't10k'}-{kind}-ubyte"
        file.write_bytes(header + array.astype(np.uint8).tobytes())


def usps(root: Path, part: str, x: Array, y: Array) -> None:
    lines = [
        f"{label + 1} " + " ".join(f"{i}:{pixel / 127.5 - 1:.0f}" for i, pixel in enumerate(image.flat, 1))
        for image, label in zip(x, y, strict=True)
    ]
    (root / ("usps.bz2" if part == "train" else "usps.t.bz2")).write_bytes(bz2.compress("\n".join(lines).encode()))


def mat(root: Path, file: str, x: Array, y: Array) -> None:
    root.mkdir(parents=True, exist_ok=True)
    scipy.io.savemat(root / file, {"X": x.transpose(1, 2, 3, 0), "y": y[:, None]})


def svhn(root: Path, part: str, x: Array, y: Array) -> None:
    mat(root, f"{part}_32x32.mat", x, np.where(y == 0, 10, y))  # the files call zero ten


def synth(root: Path, part: str, x: Array, y: Array) -> None:
    mat(root, f"synth_{part}_32x32.mat", x, y)


def synth_from_one(root: Path, part: str, x: Array, y: Array) -> None:
    synth(root, part, x, np.where(y == 0, 10, y))


def mnist_m(root: Path, part: str, x: Array, y: Array) -> None:
    lines = []
    for number, (image, digit) in enumerate(zip(x, y, strict=True)):
        file = draw(root / f"mnist_m_{part}" / f"{number:08}.png", image)
        lines.append(f"{file.name} {digit}\n")
    (root / f"mnist_m_{part}_labels.txt").write_text("".join(lines))


def tiny_imagenet(root: Path, part: str, x: Array, y: Array) -> None:
    """Class 0 is n01, whatever the order of wnids.txt; test images are labelled by their annotations."""
    root, lines = root / "tiny-imagenet-200", []
    for number, (image, label) in enumerate(zip(x, y, strict=True)):
        name = f"{part}_{number}.png"
        draw(root / (f"train/n0{label + 1}/images" if part == "train" else "val/images") / name, image)
        lines.append(f"{name}\tn0{label + 1}\t0\t0\t62\t62\n")
    (root / "wnids.txt").write_text("n02\nn01\n")
    if part == "test":
        (root / "val/val_annotations.txt").write_text("".join(lines))


WRITERS: dict[str, tuple[str, Callable[..., None], tuple[int, ...], int]] = {  # the set, and its images' shape and number of classes
    "mnist": ("mnist", mnist, (28, 28), 10),
    "usps": ("usps", usps, (16, 16), 10),
    "svhn": ("svhn", svhn, (32, 32, 3), 10),
    "synth-digits": ("synth-digits", synth, (32, 32, 3), 10),
    "synth-digits, zero as ten": ("synth-digits", synth_from_one, (32, 32, 3), 10),
    "mnist-m": ("mnist-m", mnist_m, (32, 32, 3), 10),
    "tiny-imagenet": ("tiny-imagenet", tiny_imagenet, (64, 64, 3), 2),
}


@pytest.mark.parametrize("case", WRITERS)
def test_published_files_are_read_as_they_were_written(case: str, tmp_path: Path) -> None:
    (name, write, shape, classes), rng = WRITERS[case], np.random.default_rng(0)
    written = {}
    for part, labels in (("train", [0, 0, 1]), ("test", [1, 0])):
        x = 255 * rng.integers(0, 2, (len(labels), *shape), dtype=np.uint8)
        write(tmp_path, part, x, np.array(labels))
        written[part] = torch.from_numpy(x).view(len(labels), *shape[:2], -1).permute(0, 3, 1, 2), labels
    data = read(name, tmp_path)
    for part, (images, labels) in written.items():
        assert torch.equal(getattr(data, f"x_{part}"), images)
        assert getattr(data, f"y_{part}").tolist() == labels
    assert (data.name, data.classes, data.domains) == (name, classes, ())
    assert read(name, tmp_path, 20).x_test.shape[2:] == (20, 20)


@listed("name", ["cifar10", "cifar100", "mnist", "svhn", "usps", "synth-digits", "mnist-m", "tiny-imagenet", "pacs", "cityscapes", "abide"])
def test_missing_files_are_named_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    with naming(str(tmp_path), DataNotFound):
        read(name, tmp_path)
    assert not [path for path in tmp_path.rglob("*.*") if path.is_file()]


def test_every_set_is_on_the_page_and_is_loaded_once() -> None:
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    assert [name for name in DATASETS if f"`{name}`" not in text and name not in ("npz", "folder", "csv")] == []
    assert load("digits") is load(name="digits", path="", image_size=0)
    assert load("digits") is not load("digits", image_size=24)


@pytest.mark.slow
def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = "import sys, fl_bn.data.dataset, fl_bn.data.partition, fl_bn.models.build; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "fl_bn.data.dataset" in modules
    assert not {"torchvision", "sklearn", "pandas", "flwr", "matplotlib"} & set(modules)


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


@pytest.mark.parametrize(
    ("name", "lists"),
    [("domainnet", ("{}_train.txt", "{}_test.txt")), ("pacs", ("splits/{}_train_kfold.txt", "splits/{}_crossval_kfold.txt"))],
)
def test_published_lists_decide_the_split(name: str, lists: tuple[str, str], tmp_path: Path) -> None:
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
    first, image = tmp_path / lists[1].format(domains[0]), f"{domains[0]}/{classes[0]}"
    for line, error, word in ((f"{image}/gone.png 0", DataNotFound, "gone.png"), (f"../{image}/0.png 1", ValueError, "line 1")):
        first.write_text(line)
        with naming(word, error):
            read(name, tmp_path, 8)
    first.unlink()
    with naming(first.name, DataNotFound):
        read(name, tmp_path, 8)


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_split_is_stratified_disjoint_and_complete(sizes: list[int]) -> None:
    images = [Image(Path(f"{label}/{i}"), label) for label, size in enumerate(sizes) for i in range(size)]
    train, test = split(images)
    assert sorted(train + test) == sorted(images)
    for label, size in enumerate(sizes):
        tested = sum(image.label == label for image in test)
        assert tested == (0 if size == 1 else min(max(1, round(0.2 * size)), size - 1))
    elsewhere = split([image._replace(file=Path("elsewhere") / image.file) for image in images])
    assert [image.file.name for image in elsewhere[1]] == [image.file.name for image in test]


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


def test_the_real_sets_are_taken_before_stand_ins(five: Path) -> None:
    x = np.zeros((3, 32, 32, 3), dtype=np.uint8)
    for part in ("train", "test"):
        synth(five / "SynthDigits", part, x, np.array([1, 2, 3]))
        svhn(five / "SVHN", part, x, np.array([4, 5, 6]))
        mnist_m(five / "MNIST-M", part, x, np.array([7, 3, 5]))
    data = read("digits-five", five)
    assert data.domains == ("SVHN", "USPS", "SynthDigits", "MNIST-M", "MNIST")
    assert [data.y_train[data.domain_train == d].tolist() for d in (0, 2, 3)] == [[4, 5, 6], [1, 2, 3], [7, 3, 5]]


# Connectomes

REGIONS = 5


def series(seed: int, length: int = WINDOW + 3, regions: int = REGIONS) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng(seed).normal(size=(length, regions))


@given(seed=st.integers(0, 999), length=st.integers(3, 40), regions=st.integers(2, 8), scale=st.sampled_from([1e-3, 1.0, 1e4]))
def test_connectome_is_the_upper_triangle_of_numpys_correlations(seed: int, length: int, regions: int, scale: float) -> None:
    x = series(seed, length, regions) * scale + scale
    expected = np.corrcoef(x.T)[np.triu_indices(regions, 1)]
    np.testing.assert_allclose(connectome(x), expected, atol=1e-5)


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
    first = torch.from_numpy(connectome(windows(series(0))[0]))  # of NYU's first subject, whose DX_GROUP is 1
    x, y = torch.cat([data.x_train, data.x_test]), torch.cat([data.y_train, data.y_test])
    assert y[(x == first).all(1)].tolist() == [1]


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


# Cityscapes


def scene(root: Path, part: str, city: str, number: int, ids: Array, colour: int) -> None:
    name = f"{city}/{city}_{number:06}_000019"
    draw(root / "leftImg8bit" / part / f"{name}_leftImg8bit.png", flat(*[colour] * 3, height=ids.shape[0], width=ids.shape[1]))
    draw(root / "gtFine" / part / f"{name}_gtFine_labelIds.png", ids)


@pytest.fixture
def cityscapes(tmp_path: Path) -> Path:
    """Two cities to train on, one to validate on; 8 x 16 pixels, road at the left and sky at the right, a border of nothing."""
    ids = np.zeros((8, 16), dtype=np.uint8)
    ids[2:6, 2:8], ids[2:6, 8:14] = 7, 23
    for number, (city, colour) in enumerate([("aachen", 10), ("aachen", 20), ("bochum", 30)]):
        scene(tmp_path, "train", city, number, ids, colour)
    scene(tmp_path, "val", "lindau", 0, np.full((8, 16), 33, dtype=np.uint8), 40)
    return tmp_path


def test_cityscapes(cityscapes: Path) -> None:
    data = load_cityscapes(str(cityscapes), 0)
    assert isinstance(data, Segmentation)
    assert (data.domains, data.classes, data.image_size) == (("aachen", "bochum", "lindau"), 19, 8)
    assert data.domain_train.tolist() == [0, 0, 1]
    assert data.x_train[:, 0, 0, 0].tolist() == [10, 20, 30]
    expected = torch.full((8, 16), IGNORE)
    expected[2:6, 2:8], expected[2:6, 8:14] = 0, 10
    assert torch.equal(data.y_train[0], expected)
    assert data.y_test.unique().tolist() == [18]
    smaller, larger = (load_cityscapes(str(cityscapes), size).y_train for size in (4, 16))
    assert smaller.shape == (3, 4, 8)
    assert smaller.unique().tolist() == [0, 10, IGNORE]  # the nearest pixel: an average of road and sky would be another class
    assert torch.equal(larger[:, ::2, ::2], data.y_train)


MASK, IMAGE = "gtFine/train/bochum/bochum_000002_000019_gtFine_labelIds.png", "leftImg8bit/val/lindau/lindau_000000_000019_leftImg8bit.png"


@pytest.mark.parametrize(("file", "content"), [(MASK, flat(1)), (MASK, flat(1)[..., 0]), (MASK, None), (IMAGE, None)])
def test_wrong_files_of_cityscapes_are_named(file: str, content: Any, cityscapes: Path) -> None:
    path = cityscapes / file
    path.unlink()
    if content is not None:
        draw(path, content)  # in colour, or of another form than 1 to 2
    with naming(str(path.parents[1]), DataNotFound if content is None else ValueError):
        load_cityscapes(str(cityscapes), 0)
