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

from fl_bn.cli.data import data
from fl_bn.data.catalogue import CATALOGUE, page
from fl_bn.data.check import Finding, check_files
from fl_bn.data.dataset import DATASETS
from fl_bn.data.image_folders import LAYOUTS, PACS_CLASSES, PACS_DOMAINS
from fl_bn.data.shift import SHIFTS
from tests.listed import listed

ROOT = Path(__file__).parents[2]
BY_HAND = [name for name, entry in CATALOGUE.items() if entry.how == "by hand"]


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
    with pytest.raises(ValueError, match="dataset must be one of digits, .* but got 'imagenet-21k'"):
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


def test_stand_ins_and_downloads_of_digits_five_are_warnings(tmp_path: Path) -> None:
    x, y = np.zeros((3, 8, 8, 3), dtype=np.uint8), np.arange(3)
    for name in ("digits_chars74k_street", "digits_usps", "digits_chars74k_font", "mnist_m"):
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    findings = {finding.check: finding for finding in check_files("digits-five", str(tmp_path))}
    assert {what: finding.status for what, finding in findings.items()} == {
        "chars74k-street-for-SVHN": "warn",
        "USPS": "ok",
        "chars74k-font-for-SynthDigits": "warn",
        "MNIST-M": "ok",
        "MNIST": "warn",
    }
    assert "add the files of SVHN" in findings["chars74k-street-for-SVHN"].do
    assert "downloads it" in findings["MNIST"].do


def test_abide_counts_subjects_and_features(tmp_path: Path) -> None:
    for site, features in (("NYU", 5995), ("USM", 5995)):
        np.savez(tmp_path / f"{site}.npz", x=np.zeros((10, features)), y=np.arange(10) % 2)
    findings = check_files("abide", str(tmp_path))
    assert [str(finding) for finding in findings][0] == "ok    files: NYU: 10 subjects, 5 with autism, vectors of 5,995 numbers"
    np.savez(tmp_path / "NYU.npz", x=np.zeros((10, 10)), y=np.arange(10) % 2)
    assert check_files("abide", str(tmp_path))[0].status == "warn"


def test_cityscapes(tmp_path: Path) -> None:
    for part, city in (("train", "aachen"), ("val", "lindau")):
        for kind, suffix, mode in (("leftImg8bit", "leftImg8bit", "RGB"), ("gtFine", "gtFine_labelIds", "L")):
            (tmp_path / kind / part / city).mkdir(parents=True)
            Image.new(mode, (16, 8), (7,) * len(mode)).save(tmp_path / kind / part / city / f"{city}_0_0_{suffix}.png")
    texts = [str(finding) for finding in check_files("cityscapes", str(tmp_path))]
    assert texts[0] == "ok    files: 1 + 1 images with masks, domains aachen, lindau"
    assert "8 x 16, 100% of the pixels labelled" in texts[2]


def test_commands(tmp_path: Path, pacs: Path) -> None:
    runner = CliRunner()
    listed = runner.invoke(data, ["list"], env={"COLUMNS": "200"})
    assert listed.exit_code == 0
    assert all(name in listed.output for name in CATALOGUE)
    assert runner.invoke(data, ["list", "--markdown"]).output == page() + "\n"
    assert runner.invoke(data, ["check", "pacs", "--path", str(pacs)]).exit_code == 0  # warnings do not fail
    shutil.rmtree(pacs / "photo")
    broken = runner.invoke(data, ["check", "pacs", "--path", str(pacs)])
    assert broken.exit_code == 1
    assert "lacks photo" in broken.output
    unknown = runner.invoke(data, ["check", "imagenet-21k"])
    assert unknown.exit_code == 2
    assert "dataset must be one of" in unknown.output


def test_sizes_said_are_sizes_taken() -> None:
    for name, layout in LAYOUTS.items():
        assert CATALOGUE[name].size == f"3, {layout.size}, {layout.size}"
    assert BY_HAND
