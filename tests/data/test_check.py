"""``fl-bn data check``: what is wrong with a data set's files, without a download."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.data.inner import DATASETS, check_files, data_commands
from tests.listed import listed

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a check downloads nothing")

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
    found = check_files(name, str(tmp_path))
    assert [finding.status for finding in found] == ["fail"]
    assert str(tmp_path / file) in found[0].text
    assert not list(tmp_path.rglob("*.*"))


def test_labels_that_a_run_refuses(tmp_path: Path) -> None:
    x = np.zeros((3, 2, 2), dtype=np.uint8)
    np.savez(tmp_path / "site.npz", x_train=x, y_train=np.array([0, 1, 1]), x_test=x, y_test=np.array([0, 1, 2]))
    assert [finding.status for finding in check_files("npz", str(tmp_path / "site.npz"))] == ["ok", "fail"]


def test_the_command(tmp_path: Path) -> None:
    runner = CliRunner()
    included = runner.invoke(data_commands, ["check", "digits"])
    assert (included.exit_code, included.output) == (
        0,
        "ok    files: 1,437 + 360 samples (3, 20, 20) of 10 classes, domains china, flower\n",
    )
    assert runner.invoke(data_commands, ["check", "usps", "--path", str(tmp_path)]).exit_code == 1
    assert runner.invoke(data_commands, ["check", "no_such_package.data:f"]).exit_code == 1
    unknown = runner.invoke(data_commands, ["check", "imagenet-21k"])
    assert unknown.exit_code == 2
    assert "dataset must be one of" in unknown.output
