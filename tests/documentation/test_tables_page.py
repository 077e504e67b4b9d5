"""The page on tables, followed from its first block: its files give the page's description, counts, keys and refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fl_bn.cli.data import data
from fl_bn.data.columns import read_columns
from fl_bn.run.config import RunConfig
from fl_bn.run.overrides import parse_overrides
from tests.documentation.commands import commands
from tests.documentation.pages import ROOT, blocks

PAGE = ROOT / "docs" / "how-to" / "tables.md"


def page(language: str) -> list[str]:
    return [block.text for block in blocks(PAGE) if block.language == language]


def invoke(*words: str) -> str:
    return CliRunner().invoke(data, words).stdout


def test_the_page_says_what_its_files_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(page("python")[0], {})
    drafted = invoke("columns", "hospitals", "--target", "ill")
    assert drafted.strip() == page("toml")[0].strip()
    Path("hospitals/columns.toml").write_text(drafted)
    checked = invoke("check", "csv", "--path", "hospitals")
    assert checked == page("text")[0]
    runs = [parse_overrides(words[-1]) for text in page("bash") for words in commands(text) if words[1] in ("run", "submit")]
    assert [RunConfig.from_mapping(run).task for run in runs] == ["classification-auc", "regression", "classification-auc"]
    assert runs[-1]["columns-digest"] == read_columns(Path("hospitals")).digest
    lines = Path("hospitals/south.csv").read_text().splitlines()
    cells = lines[6].split(",")
    Path("hospitals/south.csv").write_text("\n".join([*lines[:6], ",".join([cells[0], "", *cells[2:]]), *lines[7:]]) + "\n")
    refused = invoke("check", "csv", "--path", "hospitals")
    assert refused == page("text")[3].replace("bad/", "hospitals/")
    assert refused != checked  # control
