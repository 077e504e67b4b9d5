"""docs/security-claims.md: every sentence that it quotes stands in its page, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.documentation.pages import ROOT

PAGE = ROOT / "docs" / "security-claims.md"
HEADING = re.compile(r"^## \[[^\]]+\]\(([^)]+)\)$")
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
TABLES = ("## Ways of running", "## What each check is for")  # of docs/security.md
PROMISES_NOTHING = ("simulation",)


def plain(text: str) -> str:
    """Words and signs, without what Markdown makes of them."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(re.sub(r"[`*]", "", text).split())


def claims() -> list[tuple[Path, str, str]]:
    """Page, sentence and cell of tests, row by row."""
    found, page = [], ROOT
    for line in PAGE.read_text().splitlines():
        if heading := HEADING.match(line):
            page = (PAGE.parent / heading[1]).resolve()
        elif line.startswith("| ") and not line.startswith("| claim"):
            _, claim, tests, _ = line.split("|")
            found.append((page, claim.strip(), tests.strip()))
    return found


@cache
def text_of(page: Path) -> str:
    return plain(page.read_text())


@cache
def names_in(file: str) -> frozenset[str]:
    path = ROOT / "tests" / file
    if not path.is_file():
        return frozenset()
    return frozenset(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def problems(page: Path, claim: str, tests: str) -> list[str]:
    named = TEST.findall(tests)
    found = [f"{file}::{name} does not exist" for file, name in named if name not in names_in(file)]
    if not named or TEST.sub("", tests).strip(", "):
        found.append(f"not a list of tests: {tests!r}")
    if plain(claim) not in text_of(page):
        found.append(f"not in {page.relative_to(ROOT)}: {claim!r}")
    return found


def test_every_claim_stands_in_its_page_and_has_tests_that_exist() -> None:
    assert len(claims()) > 80
    assert [problem for row in claims() for problem in problems(*row)] == []


def test_control_a_claim_that_changed_and_a_test_that_went_are_found() -> None:
    security = ROOT / "docs" / "security.md"
    good = "`hostile/test_fuzz.py::test_some_thousand`"
    claim = "The network is trusted with everything."
    assert problems(security, claim, good) == [f"not in docs/security.md: {claim!r}"]
    gone = "hostile/test_fuzz.py::test_nothing"
    assert problems(security, "Traffic analysis", f"`{gone}`") == [f"{gone} does not exist"]
    assert problems(security, "Traffic analysis", "") == ["not a list of tests: ''"]
    assert problems(security, "Traffic analysis", good) == []


@pytest.mark.parametrize("heading", TABLES)
def test_every_row_of_the_security_page_s_tables_has_a_claim(heading: str) -> None:
    page = ROOT / "docs" / "security.md"
    table = page.read_text().partition(heading)[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 5
    quoted = [plain(claim) for of, claim, _ in claims() if of == page]
    open_rows = [row for row in rows if not any(claim in plain(row) for claim in quoted)]
    assert [row for row in open_rows if not any(row.startswith(f"| {name}") for name in PROMISES_NOTHING)] == []
