"""``fl-bn data``: the catalogue covers every set, the page is the catalogue's, and a check says what is wrong."""

from __future__ import annotations

import shutil
import urllib.request
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.data.inner import CATALOGUE, DATASETS, PACS_CLASSES, PACS_DOMAINS, SHIFTS, Finding, check_files, data_commands, page
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
    for entry in CATALOGUE.values():
        assert all((entry.title, entry.terms, entry.citation, entry.split, entry.size))
        assert bool(entry.tree) == (entry.how != "included")


def test_the_page_is_the_catalogues() -> None:
    text = (ROOT / "docs" / "data.md").read_text()
    assert text.endswith(page() + "\n"), "write its end anew: fl-bn data list --markdown"
    assert all(f"`{name}`" in text for name in SHIFTS)


@listed("name", [name for name, entry in CATALOGUE.items() if entry.how != "included"])
def test_missing_files_fail_and_say_where_they_go(name: str, tmp_path: Path) -> None:
    findings = check_files(name, str(tmp_path))
    assert [finding.status for finding in findings] == ["fail"]
    assert CATALOGUE[name].tree.split()[0].partition("{")[0] in findings[0].do
    assert str(tmp_path) in findings[0].do
    assert "\n" not in str(findings[0])
    assert not list(tmp_path.iterdir())  # nothing is written


def test_included_sets_and_unknown_names() -> None:
    findings = check_files("digits")
    assert [finding.status for finding in findings] == ["ok"]
    assert findings[0].text == "1,437 + 360 samples (3, 20, 20) of 10 classes, domains china, flower"
    with naming("'imagenet-21k'"):
        check_files("imagenet-21k")
    assert statuses(check_files("no_such_package.data:f")) == {"fail"}


@pytest.fixture
def pacs(tmp_path: Path) -> Path:
    for domain in PACS_DOMAINS:
        for label in PACS_CLASSES:
            (tmp_path / domain / label).mkdir(parents=True)
            for i in range(2):
                Image.new("RGB", (9, 8)).save(tmp_path / domain / label / f"{i}.png")
    return tmp_path


def test_a_subset_is_a_warning_with_the_expected_number(pacs: Path) -> None:
    findings = check_files("pacs", str(pacs))
    assert findings[0].text == "28 + 28 images of 7 classes, domains art_painting, cartoon, photo, sketch"
    warned = [finding for finding in findings if finding.status == "warn"]
    assert [finding.text for finding in warned] == ["56 samples, but the published set has 9,991"]
    assert sum(finding.check == "sample" for finding in findings) == 8  # of each split and domain
    assert "8 x 9, dog" in next(finding.text for finding in findings if finding.check == "sample")
    assert findings[-1].check == "memory"


def test_a_damaged_sample_fails_and_others_are_not_read(pacs: Path) -> None:
    for file in (pacs / "sketch" / "dog").iterdir():
        file.write_bytes(b"no image")
    findings = check_files("pacs", str(pacs))
    assert findings[-1].status == "fail"
    assert "sketch" in findings[-1].text
    assert "expected an image" in findings[-1].text


def test_mnist_in_place_and_packed(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        for kind, array in (("images-idx3", np.zeros((3, 28, 28), dtype=np.uint8)), ("labels-idx1", np.zeros(3, dtype=np.uint8))):
            header = bytes([0, 0, 8, array.ndim]) + b"".join(length.to_bytes(4, "big") for length in array.shape)
            (raw / f"{part}-{kind}-ubyte").write_bytes(header + array.tobytes())
    findings = check_files("mnist", str(tmp_path))
    assert [finding.status for finding in findings] == ["ok", "warn"]
    assert findings[1].text == "6 samples, but the published set has 70,000"
    for file in list(raw.iterdir()):
        file.rename(file.with_name(f"{file.name}.gz"))
    assert "are not unpacked" in check_files("mnist", str(tmp_path))[0].text
    next(raw.glob("t10k-labels*")).unlink()
    assert statuses(check_files("mnist", str(tmp_path))) == {"fail"}


def test_commands(tmp_path: Path, pacs: Path) -> None:
    runner = CliRunner()
    listed = runner.invoke(data_commands, ["list"], env={"COLUMNS": "200"})
    assert listed.exit_code == 0
    assert all(name in listed.output for name in CATALOGUE)
    assert runner.invoke(data_commands, ["list", "--markdown"]).output == page() + "\n"
    assert runner.invoke(data_commands, ["check", "pacs", "--path", str(pacs)]).exit_code == 0  # warnings do not fail
    shutil.rmtree(pacs / "photo")
    broken = runner.invoke(data_commands, ["check", "pacs", "--path", str(pacs)])
    assert broken.exit_code == 1
    assert "lacks photo" in broken.output
    unknown = runner.invoke(data_commands, ["check", "imagenet-21k"])
    assert unknown.exit_code == 2
    assert "dataset must be one of" in unknown.output
