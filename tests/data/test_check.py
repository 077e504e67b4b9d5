"""``fl-bn data``: the catalogue and the page cover every set, and a check says what is wrong."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.data.inner import CATALOGUE, DATASETS, Finding, check_files, data_commands
from tests.listed import listed
from tests.refusals import naming

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a check downloads nothing")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def statuses(findings: list[Finding]) -> set[str]:
    return {finding.status for finding in findings}


def test_every_set_is_in_the_catalogue() -> None:
    assert set(CATALOGUE) == set(DATASETS) - {"npz", "folder", "csv"}
    text = (ROOT / "docs" / "data.md").read_text()
    assert [name for name in CATALOGUE if f"`{name}`" not in text] == []


@listed("name", [name for name, entry in CATALOGUE.items() if entry.files])
def test_missing_files_fail_and_say_where_they_go(name: str, tmp_path: Path) -> None:
    findings = check_files(name, str(tmp_path))
    assert [finding.status for finding in findings] == ["fail"]
    assert CATALOGUE[name].files in findings[0].do
    assert str(tmp_path) in findings[0].do
    assert not list(tmp_path.iterdir())  # nothing is written


def test_included_sets_and_unknown_names() -> None:
    findings = check_files("digits")
    assert [finding.status for finding in findings] == ["ok"]
    assert findings[0].text == "1,437 + 360 samples (3, 20, 20) of 10 classes, domains china, flower"
    with naming("'imagenet-21k'"):
        check_files("imagenet-21k")
    assert statuses(check_files("no_such_package.data:f")) == {"fail"}


def test_mnist_in_place_and_packed(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        for kind, array in (("images-idx3", np.zeros((3, 28, 28), dtype=np.uint8)), ("labels-idx1", np.zeros(3, dtype=np.uint8))):
            header = bytes([0, 0, 8, array.ndim]) + b"".join(length.to_bytes(4, "big") for length in array.shape)
            (raw / f"{part}-{kind}-ubyte").write_bytes(header + array.tobytes())
    findings = check_files("mnist", str(tmp_path))
    assert [finding.status for finding in findings] == ["ok", "warn"]
    assert findings[1].text == "the published set has 60,000 + 10,000 samples"
    for file in list(raw.iterdir()):
        file.rename(file.with_name(f"{file.name}.gz"))
    assert "are not unpacked" in check_files("mnist", str(tmp_path))[0].text
    next(raw.glob("t10k-labels*")).unlink()
    assert statuses(check_files("mnist", str(tmp_path))) == {"fail"}


def test_commands(tmp_path: Path) -> None:
    runner = CliRunner()
    listed = runner.invoke(data_commands, ["list"], env={"COLUMNS": "200"})
    assert listed.exit_code == 0
    assert all(name in listed.output for name in CATALOGUE)
    assert runner.invoke(data_commands, ["check", "digits"]).exit_code == 0
    assert runner.invoke(data_commands, ["check", "usps", "--path", str(tmp_path)]).exit_code == 1
    unknown = runner.invoke(data_commands, ["check", "imagenet-21k"])
    assert unknown.exit_code == 2
    assert "dataset must be one of" in unknown.output
