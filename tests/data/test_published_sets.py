"""Published sets: made-up copies of each layout are read as their folders and lists say."""

from __future__ import annotations

import urllib.request
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

from experiments.papers import DATASETS
from tests.data.inner import (
    DOMAINNET_CLASSES,
    DOMAINNET_DOMAINS,
    OFFICE_CLASSES,
    OFFICE_DOMAINS,
    PACS_CLASSES,
    PACS_DOMAINS,
    SITES,
    WINDOW,
    DataNotFound,
    Dataset,
    Image,
    connectome,
    split,
    windows,
)
from tests.refusals import naming


def load(name: str, path: str, image_size: int = 0) -> Dataset:
    return DATASETS[name](path, image_size)


DOMAINS = {
    "office-caltech10": (OFFICE_DOMAINS, OFFICE_CLASSES, "office_caltech_10"),
    "domainnet": (DOMAINNET_DOMAINS, DOMAINNET_CLASSES, "DomainNet"),
    "pacs": (PACS_DOMAINS, PACS_CLASSES, "PACS"),
}


def draw(file: Path, colour: tuple[int, int, int] = (10, 20, 30), size: tuple[int, int] = (12, 8)) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Picture.new("RGB", size, colour).save(file)
    return file


def domain_folders(root: Path, name: str, images: int = 2) -> Path:
    """Red counts domains, green classes, blue images."""
    domains, classes, _ = DOMAINS[name]
    for d, domain in enumerate(domains):
        for c, label in enumerate(classes):
            for i in range(images):
                draw(root / domain / label / f"{i}.png", (d, c, i))
    return root


@pytest.mark.parametrize("name", list(DOMAINS))
def test_domains_and_classes_are_what_the_folders_say(name: str, tmp_path: Path) -> None:
    domains, classes, top = DOMAINS[name]
    domain_folders(tmp_path / top, name)
    data = load(name, str(tmp_path), 8)
    assert (data.name, data.domains, data.classes) == (name, domains, len(classes))
    assert data.x_train.shape == (len(domains) * len(classes), 3, 8, 8)
    for x, y, domain in ((data.x_train, data.y_train, data.domain_train), (data.x_test, data.y_test, data.domain_test)):
        assert torch.equal(x[:, 0, 0, 0].long(), domain)
        assert torch.equal(x[:, 1, 0, 0].long(), y)
    inside = load(name, str(tmp_path / top), 8)
    assert torch.equal(inside.x_train, data.x_train)


@pytest.mark.parametrize(("name", "lists"), [("domainnet", ("train", "test")), ("pacs", ("train_kfold", "crossval_kfold"))])
def test_published_lists_decide_the_split(name: str, lists: tuple[str, str], tmp_path: Path) -> None:
    domains, classes, _ = DOMAINS[name]
    domain_folders(tmp_path, name)
    below = "splits" if name == "pacs" else ""
    (tmp_path / below).mkdir(exist_ok=True)
    for domain in domains:
        for i, kind in enumerate(lists):
            lines = [f"{domain}/{label}/{i}.png {number + 1}" for number, label in enumerate(classes)]
            (tmp_path / below / f"{domain}_{kind}.txt").write_text("\n".join([*lines, f"{domain}/another/x.png 99"]))
    data = load(name, str(tmp_path), 8)
    assert data.x_train[:, 2, 0, 0].unique().tolist() == [0]  # blue counts images: only the listed ones
    assert data.x_test[:, 2, 0, 0].unique().tolist() == [1]
    assert torch.equal(data.x_test[:, 1, 0, 0].long(), data.y_test)  # numbers from 1 are not taken for labels

    first = tmp_path / below / f"{domains[0]}_{lists[1]}.txt"
    text = first.read_text()
    for line, error, word in (
        (f"{domains[0]}/{classes[0]}/gone.png 0", DataNotFound, "gone.png"),
        (f"{domains[0]}/{classes[0]}/0.png", ValueError, "line 1"),
        (f"../{domains[0]}/{classes[0]}/0.png 1", ValueError, "line 1"),
    ):
        first.write_text(line)
        with naming(word, error):
            load(name, f"{tmp_path}/", 8)
    first.write_text(text)
    first.rename(tmp_path / "away")
    with naming(first.name, DataNotFound):
        load(name, f"{tmp_path}/", 8)


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


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    root = tmp_path / "tiny-imagenet-200"
    for i, wnid in enumerate(("n02", "n01")):
        for n in range(2):
            draw(root / "train" / wnid / "images" / f"{wnid}_{n}.png", (i, n, 0), (64, 64))
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text("beside the images")
        draw(root / "val" / "images" / f"val_{i}.png", (i, 9, 0), (64, 64))
    (root / "wnids.txt").write_text("n02\nn01\n")
    (root / "val" / "val_annotations.txt").write_text("val_0.png\tn02\t0\t0\t62\t62\nval_1.png\tn01\t0\t0\t62\t62\n")
    return tmp_path


def test_tiny_imagenet(tiny: Path) -> None:
    data = load("tiny-imagenet", str(tiny))
    assert (data.classes, data.image_size, data.domains) == (2, 64, ())
    assert data.x_train[:, 0, 0, 0].tolist() == [1, 1, 0, 0]  # n01 is class 0
    assert data.y_train.tolist() == [0, 0, 1, 1]
    assert data.y_test.tolist() == [1, 0]  # by the annotations, not by the place in the folder
    assert data.x_test[:, 0, 0, 0].tolist() == [0, 1]


STAND_INS = ("digits_chars74k_street", "digits_usps", "digits_chars74k_font", "digits_mnist_m", "digits_mnist")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise URLError("no network in tests")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def archive(file: Path, brightness: int, size: int = 8, channels: tuple[int, ...] = (3,)) -> None:
    x = np.full((3, size, size, *channels), brightness, dtype=np.uint8)
    np.savez(file, x_train=x, y_train=np.array([0, 9, 1]), x_test=x[:2], y_test=np.array([2, 9]))


def mat(file: Path, y: list[int], /, **changes: Any) -> None:
    x = np.random.default_rng(0).integers(0, 256, (32, 32, 3, len(y)), dtype=np.uint8)
    scipy.io.savemat(file, {"X": x, "y": np.array(y)[:, None]} | changes)


def mnist_m(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for part, digits in (("train", (7, 3, 5)), ("test", (1, 2))):
        (root / f"mnist_m_{part}").mkdir()
        lines = []
        for i, digit in enumerate(digits):
            Picture.new("RGB", (32, 32), (digit, i, 0)).save(root / f"mnist_m_{part}" / f"{i:08}.png")
            lines.append(f"{i:08}.png {digit}")
        (root / f"mnist_m_{part}_labels.txt").write_text("\n".join(lines) + "\n")
    return root


def test_mnist_m_as_published(tmp_path: Path) -> None:
    mnist_m(tmp_path / "mnist_m")
    data = load("mnist-m", str(tmp_path))
    assert (data.name, data.classes, data.x_train.shape) == ("mnist-m", 10, (3, 3, 32, 32))
    assert data.y_train.tolist() == data.x_train[:, 0, 0, 0].tolist() == [7, 3, 5]
    assert load("mnist-m", str(tmp_path), 28).x_test.shape == (2, 3, 28, 28)


@pytest.mark.parametrize(("y", "expected"), [([0, 9, 4], [0, 9, 4]), ([10, 9, 4], [0, 9, 4])])
def test_synth_digits_in_either_numbering(y: list[int], expected: list[int], tmp_path: Path) -> None:
    for part in ("train", "test"):
        mat(tmp_path / f"synth_{part}_32x32.mat", y)
    data = load("synth-digits", str(tmp_path))
    x = scipy.io.loadmat(tmp_path / "synth_train_32x32.mat")["X"]
    assert torch.equal(data.x_train[1], torch.from_numpy(x[..., 1].transpose(2, 0, 1).copy()))
    assert data.y_train.tolist() == expected


def test_pooled_domains_are_divided_anew_four_to_one(tmp_path: Path) -> None:
    """Every sample is in one part, and of its own domain. Control: the published splits are other ones."""
    for i, name in enumerate(STAND_INS):
        archive(tmp_path / f"{name}.npz", 10 * i)
    plain, data = (load(name, str(tmp_path)) for name in ("digits-five", "digits-five-pooled"))
    parts = {}
    for name, one in (("published", plain), ("pooled", data)):
        assert one.domain_train is not None
        assert one.domain_test is not None
        parts[name] = (one.domain_train.bincount().tolist(), one.domain_test.bincount().tolist())
    published, pooled = ([a + b for a, b in zip(*sizes, strict=True)] for sizes in parts.values())
    assert published == pooled
    assert parts["pooled"][0] == [4 * size // 5 for size in published] != parts["published"][0]
    assert data.domain_train is not None
    assert torch.equal(data.x_train[:, 0, 0, 0].long(), 10 * data.domain_train)
    assert data.domains == plain.domains
    whole = [torch.cat([one.y_train, one.y_test]).bincount(minlength=10) for one in (plain, data)]
    assert torch.equal(whole[0], whole[1])


def test_the_real_sets_are_taken_before_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in STAND_INS:
        archive(tmp_path / f"{name}.npz", 10)
    (tmp_path / "SynthDigits").mkdir()
    (tmp_path / "SVHN").mkdir()
    monkeypatch.setattr("torchvision.datasets.svhn.check_integrity", lambda *_: True)
    monkeypatch.setattr("torchvision.datasets.utils.check_integrity", lambda *_: True)
    for part in ("train", "test"):
        mat(tmp_path / "SynthDigits" / f"synth_{part}_32x32.mat", [10, 1])
        mat(tmp_path / "SVHN" / f"{part}_32x32.mat", [10, 1])
    mnist_m(tmp_path / "MNIST-M")
    data = load("digits-five", str(tmp_path))
    assert data.domains == ("SVHN", "USPS", "SynthDigits", "MNIST-M", "MNIST")
    assert data.domain_train is not None
    assert data.y_train[data.domain_train == 3].tolist() == [7, 3, 5]  # of the published folders, not of the archive
    assert data.y_train[data.domain_train == 0].tolist() == [0, 1]


REGIONS = 5


def series(seed: int, length: int = WINDOW + 3, regions: int = REGIONS) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng(seed).normal(size=(length, regions))


@given(seed=st.integers(0, 999), length=st.integers(3, 40), regions=st.integers(2, 8), scale=st.sampled_from([1e-3, 1.0, 1e4]))
def test_connectome_is_the_upper_triangle_of_numpys_correlations(seed: int, length: int, regions: int, scale: float) -> None:
    x = series(seed, length, regions) * scale + scale
    matrix = np.corrcoef(x.T)
    expected = [matrix[i, j] for i in range(regions) for j in range(i + 1, regions)]
    np.testing.assert_allclose(connectome(x), expected, atol=1e-5)
    assert connectome(x).dtype == np.float32


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Ten subjects in each of FedBN's sites and in one other; UM in two parts, as published; region #3455 is empty."""
    rows = ["SUB_ID,FILE_ID,SITE_ID,DX_GROUP"]
    (tmp_path / "cpac" / "filt_global").mkdir(parents=True)
    for s, site in enumerate((*SITES, "PITT")):
        for i in range(10):
            part = f"_{1 + i % 2}" if site in ("UM", "UCLA") else ""
            name = f"{site}{part}_{s}{i:04}"
            rows.append(f"{s}{i},{name},{site}{part},{1 + i % 2}")
            x = np.insert(series(100 * s + i), 2, 0.0, axis=1)
            header = "#1\t#2\t#3455\t#4\t#5\t#6"
            np.savetxt(tmp_path / "cpac" / "filt_global" / f"{name}_rois_ho.1D", x, header=header, comments="")
    rows.append("999,no_filename,NYU,1")
    (tmp_path / "Phenotypic_V1_0b_preprocessed1.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


def test_published_files(published: Path) -> None:
    data = load("abide", str(published))
    assert (data.domains, data.classes, data.channels, data.image_size) == (SITES, 2, REGIONS * (REGIONS - 1) // 2, 1)
    assert data.domain_train is not None
    assert data.domain_train.bincount().tolist() == [8 * 4] * 4  # 8 subjects of 4 windows; two are tested on
    assert data.y_train.bincount().tolist() == data.y_train.bincount().flip(0).tolist()
    rows = {tuple(row) for row in data.x_train.tolist()}
    autism = connectome(windows(series(0))[0])  # the first subject of NYU has DX_GROUP 1
    place = (data.x_train if tuple(autism.tolist()) in rows else data.x_test) == torch.from_numpy(autism)
    labels = data.y_train if tuple(autism.tolist()) in rows else data.y_test
    assert labels[place.all(1)].tolist() == [1]


Y = np.arange(10) % 2


def site(folder: Path, name: str, **arrays: Any) -> None:
    np.savez(folder / f"{name}.npz", **arrays)


def test_two_scans_of_one_person_are_on_one_side(tmp_path: Path) -> None:
    """No window that is tested on has a near-twin in training. Control: without ``subject`` many have one."""
    scans = np.stack([series(i // 2) + 1e-6 * series(100 + i) for i in range(40)])
    arrays = {"series": scans, "y": np.repeat(np.arange(20) % 2, 2), "subject": np.repeat(np.arange(20), 2)}
    site(tmp_path, "here", **arrays)
    data = load("abide", str(tmp_path))
    assert (len(data.x_train), len(data.x_test)) == (16 * 2 * 4, 4 * 2 * 4)
    assert float(torch.cdist(data.x_test.flatten(1), data.x_train.flatten(1)).min()) > 0.02
    assert data.y_test.bincount().tolist() == [16, 16]
    del arrays["subject"]
    (tmp_path / "control").mkdir()
    site(tmp_path / "control", "here", **arrays)
    data = load("abide", str(tmp_path / "control"))
    assert float(torch.cdist(data.x_test.flatten(1), data.x_train.flatten(1)).min()) < 0.002
