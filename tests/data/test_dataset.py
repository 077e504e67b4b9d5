"""Data sets by name: the registry, its cache, and the public sets without a network."""

from __future__ import annotations

import bz2
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any, NoReturn
from urllib.error import URLError

import numpy as np
import pytest
import scipy.io
import torch

from tests.data.inner import DATASETS, DataNotFound, load
from tests.listed import listed


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise URLError("no network in tests")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def test_every_set_is_on_the_page() -> None:
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    assert [name for name in DATASETS if f"`{name}`" not in text and name not in ("npz", "folder", "csv")] == []


@listed("name", ["cifar10", "cifar100", "mnist", "svhn", "usps"])
def test_missing_files_are_named_and_nothing_is_written(name: str, tmp_path: Path, offline: None) -> None:
    with pytest.raises(DataNotFound, match=re.escape(str(tmp_path))):
        load(name, str(tmp_path))
    assert not [path for path in tmp_path.rglob("*.*") if path.is_file()]


def test_loaded_once_however_the_call_is_written() -> None:
    assert load("digits") is load(name="digits", path="", image_size=0)
    assert load("digits") is not load("digits", image_size=24)


def write_idx(file: Path, array: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """LeCun's format: two zeros, the type (8: uint8), the number of axes, their lengths, the bytes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, array.ndim]) + b"".join(length.to_bytes(4, "big") for length in array.shape)
    file.write_bytes(header + array.tobytes())


@pytest.mark.usefixtures("offline")
def test_mnist_files_are_read(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    for split, count in (("train", 3), ("t10k", 2)):
        write_idx(tmp_path / f"MNIST/raw/{split}-images-idx3-ubyte", images[:count])
        write_idx(tmp_path / f"MNIST/raw/{split}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) + 7)
    data = load("mnist", str(tmp_path))
    assert torch.equal(data.x_train, torch.from_numpy(images[:3, None]))
    assert data.y_train.tolist() == [7, 8, 9]
    assert (data.name, data.classes, data.channels, len(data.x_test)) == ("mnist", 10, 1, 2)


@pytest.mark.usefixtures("offline")
def test_usps_files_are_read(tmp_path: Path) -> None:
    for name, labels in (("usps.bz2", (1, 10)), ("usps.t.bz2", (4,))):
        lines = [f"{label} " + " ".join(f"{i}:{1 if i == label else -1}" for i in range(1, 257)) for label in labels]
        (tmp_path / name).write_bytes(bz2.compress("\n".join(lines).encode()))
    data = load("usps", str(tmp_path))
    assert data.y_train.tolist() == [0, 9]
    assert data.y_test.tolist() == [3]
    assert data.x_train.shape == (2, 1, 16, 16)
    assert data.x_train.flatten(1).argmax(1).tolist() == [0, 9]


@pytest.mark.usefixtures("offline")
def test_svhn_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchvision.datasets.svhn.check_integrity", lambda *_: True)
    monkeypatch.setattr("torchvision.datasets.utils.check_integrity", lambda *_: True)
    images = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 2), dtype=np.uint8)  # H, W, C, N in these files
    for split in ("train", "test"):
        scipy.io.savemat(tmp_path / f"{split}_32x32.mat", {"X": images, "y": np.array([[10], [1]])})
    data = load("svhn", str(tmp_path))
    assert torch.equal(data.x_train, torch.from_numpy(images).permute(3, 2, 0, 1))
    assert data.y_train.tolist() == [0, 1]  # the files call zero ten


@pytest.mark.slow
def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = "import sys, fl_bn.data.dataset, fl_bn.data.partition, fl_bn.models.build; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "fl_bn.data.dataset" in modules
    assert not {"torchvision", "sklearn", "pandas", "flwr", "matplotlib"} & set(modules)
