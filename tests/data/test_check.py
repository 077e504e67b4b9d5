"""Public data sets without a network."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.data.inner import DATASETS, DataNotFound, load
from tests.listed import listed

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise OSError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def test_every_set_is_on_the_page() -> None:
    text = (ROOT / "docs" / "data.md").read_text()
    assert [name for name in DATASETS if f"`{name}`" not in text and name not in ("npz", "folder", "csv")] == []


@listed(
    ("name", "file"),
    [
        ("cifar10", "cifar-10-python.tar.gz"),
        ("cifar100", "cifar-100-python.tar.gz"),
        ("mnist", "MNIST/raw/train-images-idx3-ubyte.gz"),
        ("svhn", "test_32x32.mat"),
        ("usps", "usps.t.bz2"),
    ],
)
def test_missing_files_are_named_and_nothing_is_written(name: str, file: str, tmp_path: Path) -> None:
    with pytest.raises(DataNotFound, match=re.escape(str(tmp_path / file))):
        load(name, str(tmp_path))
    assert not [path for path in tmp_path.rglob("*.*") if path.is_file()]
