"""MNIST-M, SynthDigits and the five domains: made-up files of each form, stand-ins called so, wrong files named."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any, NoReturn
from urllib.error import URLError

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image

from fl_bn.data.dataset import DataNotFound, load

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
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
            Image.new("RGB", (32, 32), (digit, i, 0)).save(root / f"mnist_m_{part}" / f"{i:08}.png")
            lines.append(f"{i:08}.png {digit}")
        (root / f"mnist_m_{part}_labels.txt").write_text("\n".join(lines) + "\n")
    return root


def test_mnist_m_as_published(tmp_path: Path) -> None:
    mnist_m(tmp_path / "mnist_m")
    data = load("mnist-m", str(tmp_path))
    assert (data.name, data.classes, data.x_train.shape) == ("mnist-m", 10, (3, 3, 32, 32))
    assert data.y_train.tolist() == data.x_train[:, 0, 0, 0].tolist() == [7, 3, 5]
    assert load("mnist-m", str(tmp_path), 28).x_test.shape == (2, 3, 28, 28)


def test_mnist_m_as_an_archive(tmp_path: Path) -> None:
    archive(tmp_path / "mnist_m.npz", 50)
    by_folder, by_file = load("mnist-m", str(tmp_path)), load("mnist-m", str(tmp_path / "mnist_m.npz"))
    assert by_folder.name == by_file.name == "mnist-m"
    assert torch.equal(by_folder.x_train, by_file.x_train)


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("00000000.png 12", ValueError, "line 1: expected 'FILE DIGIT', but got '00000000.png 12'"),
        ("00000000.png", ValueError, "line 1: expected"),
        ("../a.png 1", ValueError, "line 1: expected"),
        ("gone.png 1", DataNotFound, r"line 1 names .*gone\.png"),
        ("", ValueError, "the file is empty"),
    ],
)
def test_mnist_m_wrong_lists(line: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    root = mnist_m(tmp_path)
    (root / "mnist_m_train_labels.txt").write_text(line)
    with pytest.raises(error, match=message):
        load("mnist-m", str(root))


def test_mnist_m_missing_and_mixed(tmp_path: Path) -> None:
    with pytest.raises(DataNotFound, match="lacks mnist_m_train"):
        load("mnist-m", str(tmp_path))
    root = mnist_m(tmp_path)
    Image.new("RGB", (30, 30)).save(root / "mnist_m_train" / "00000001.png")
    with pytest.raises(ValueError, match=r"00000001\.png: images must share one size, \(32, 32\), but this one is \(30, 30\)"):
        load("mnist-m", str(root))


@pytest.mark.parametrize(("y", "expected"), [([0, 9, 4], [0, 9, 4]), ([10, 9, 4], [0, 9, 4])])
def test_synth_digits_in_either_numbering(y: list[int], expected: list[int], tmp_path: Path) -> None:
    for part in ("train", "test"):
        mat(tmp_path / f"synth_{part}_32x32.mat", y)
    data = load("synth-digits", str(tmp_path))
    x = scipy.io.loadmat(tmp_path / "synth_train_32x32.mat")["X"]
    assert torch.equal(data.x_train[1], torch.from_numpy(x[..., 1].transpose(2, 0, 1).copy()))
    assert data.y_train.tolist() == expected


@pytest.mark.parametrize(
    ("y", "changes", "message"),
    [
        ([0, 10], {}, r"y must be 0\.\.9, or 1\.\.10 with 10 for zero, but spans 0\.\.10"),
        ([1, 12], {}, r"spans 1\.\.12"),
        ([1, 2], {"y": np.array([[1]])}, r"expected X as uint8 \(H, H, 3, N\)"),
        ([1, 2], {"X": np.zeros((32, 32, 3, 2))}, "but got float64"),
        ([1, 2], {"X": np.zeros((2, 32, 32, 3), dtype=np.uint8)}, r"but got uint8 \(2, 32, 32, 3\)"),
    ],
)
def test_synth_digits_wrong_files(y: list[int], changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    for part in ("train", "test"):
        mat(tmp_path / f"synth_{part}_32x32.mat", y, **changes)
    with pytest.raises(ValueError, match=message):
        load("synth-digits", str(tmp_path))


def test_synth_digits_no_matlab_files(tmp_path: Path) -> None:
    with pytest.raises(DataNotFound, match="lacks synth_train_32x32.mat, synth_test_32x32.mat"):
        load("synth-digits", str(tmp_path))
    for part in ("train", "test"):
        (tmp_path / f"synth_{part}_32x32.mat").write_bytes(b"no MATLAB file at all" * 20)
    with pytest.raises(ValueError, match="synth_train_32x32.mat: expected a MATLAB file"):
        load("synth-digits", str(tmp_path))
    for part in ("train", "test"):
        scipy.io.savemat(tmp_path / f"synth_{part}_32x32.mat", {"X": np.zeros(3)})
    with pytest.raises(ValueError, match="expected the variables X and y, but there is no y"):
        load("synth-digits", f"{tmp_path}/")


def test_five_domains_of_stand_ins_in_colour(tmp_path: Path) -> None:
    for i, name in enumerate(STAND_INS):
        archive(tmp_path / f"{name}.npz", 10 * i, channels=() if name in ("digits_usps", "digits_mnist") else (3,))
    data = load("digits-five", str(tmp_path))
    assert data.domains == ("chars74k-street-for-SVHN", "USPS", "chars74k-font-for-SynthDigits", "MNIST-M", "MNIST")
    assert data.x_train.shape == (15, 3, 28, 28)
    assert data.domain_train is not None
    assert torch.equal(data.x_train[:, 0, 0, 0].long(), 10 * data.domain_train)
    assert torch.equal(data.x_train[:, 0], data.x_train[:, 2])
    assert load("digits-five", str(tmp_path), 20).image_size == 20


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


def test_a_domain_without_files_is_named(tmp_path: Path) -> None:
    for name in set(STAND_INS) - {"digits_mnist_m"}:
        archive(tmp_path / f"{name}.npz", 10)
    with pytest.raises(DataNotFound, match="has no files of the domain MNIST-M"):
        load("digits-five", str(tmp_path))
    archive(tmp_path / "digits_mnist_m.npz", 10)
    (tmp_path / "digits_usps.npz").unlink()
    with pytest.raises(DataNotFound, match="dataset 'usps' is not complete"):
        load("digits-five", str(tmp_path))


def test_shared_data() -> None:
    if not all((SHARED / f"{name}.npz").is_file() for name in STAND_INS):
        pytest.skip("the shared image data (../shared/data) are not on this machine")
    data = load("digits-five", str(SHARED))
    assert data.domain_train is not None
    assert data.domain_train.bincount().tolist() == [667, 7291, 6415, 7438, 7438]
    assert (data.channels, data.image_size, data.classes) == (3, 28, 10)
