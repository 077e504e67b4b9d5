"""README and site: Python runs, page by page, top to bottom; TOML parses; commands exist; links lead somewhere; numbers are results."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_bn.app.sweep.file import parse
from fl_bn.methods import METHODS
from tests.documentation.commands import CHECKS, check, commands
from tests.documentation.given import GIVEN
from tests.documentation.pages import LINK, PAGES, ROOT, SITE, anchors, blocks, inline_code, links, name
from tests.extension.package import registries_kept
from tests.listed import listed
from tests.refusals import naming

LANGUAGES = {"python", "bash", "toml", "text", "diff"}
SLOW = re.compile(r"^(from|import) (accelerate|lightning|monai|opacus)\b", re.MULTILINE)  # of the extra loops, which slow tests alone need


@pytest.fixture
def undisturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own; what a page enters (methods, values of a run) and random numbers that it draws are the page's."""
    monkeypatch.chdir(tmp_path)
    with registries_kept(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def pages_of_python() -> Iterator[Any]:
    """Those with Python in them; slow tests where that imports other people's training loops."""
    for page in PAGES:
        if code := [block.text for block in blocks(page) if block.language == "python"]:
            yield pytest.param(page, id=name(page), marks=[pytest.mark.slow] if SLOW.search("\n".join(code)) else [])


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.filterwarnings("ignore:Secure RNG turned off")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("page", list(pages_of_python()))
def test_python_runs(page: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    checks = []
    for block in blocks(page):
        if block.given:
            given, after = GIVEN[block.given]()
            names |= given
            checks.append(after)
        if block.language == "python":
            exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
    for after in checks:
        after(names)


@listed("page", PAGES, ids=name)
def test_commands_exist(page: Path) -> None:
    for block in blocks(page):
        indented = block.text.splitlines() if not block.language and not block.fenced else []
        lines = [line for line in indented if line.strip().split(" ")[0] in CHECKS and line.count('"') % 2 == 0]
        for words in commands(block.text if block.language == "bash" else "\n".join(lines)):
            check(words)
    for code in inline_code(page) if page.name != "CHANGELOG.md" else ():  # it names what is gone
        if code.startswith("fl-bn ") and " | " not in code:
            try:
                check(shlex.split(code))
            except AssertionError as error:
                if "Missing" not in str(error):  # the text may name a command without all that it takes
                    raise


@listed(
    ("text", "why"),
    [
        ("fl-bn rum", "there is no command"),
        ("cd x && fl-bn recalibrate", "Missing"),
        ("python benchmarks/gpus.py", "there is no"),
        ("python -m tests.nothing", "no module"),
        ("X=1 fl-bn run --run-config \"rounds=1\n    metod='fbn'\"  # twice\n", "metod"),
    ],
)
def test_a_command_that_is_wrong_is_found(text: str, why: str) -> None:
    *before, wrong = commands(text)
    for words in before:
        check(words)
    with naming(why, ValueError if why == "metod" else AssertionError):
        check(wrong)


@listed("page", PAGES, ids=name)
def test_toml_parses_and_blocks_of_the_site_say_their_language(page: Path) -> None:
    for block in blocks(page):
        if block.language == "toml":
            tables = tomllib.loads(block.text)
            for variant in ("", *tables.get("variants", ())) if "axes" in tables else ():
                assert parse(tables, "x", variant, "data", {}).cells(Path("nowhere"))
        if page in (ROOT / "README.md", *SITE):
            assert block.language in LANGUAGES or not block.fenced, block.line
            assert block.fenced or page.name == "data.md", block.line


# Links and numbers


SPREAD = re.compile(r"\d+\.\d \(\d+\.\d\)")
RESULTS = sorted((ROOT / "benchmarks" / "results").rglob("*.md"))


def plain(page: Path) -> str:
    return re.sub(r"\*\*| %(?= \()", "", page.read_text())


EVIDENCE = "".join(plain(page) for page in [ROOT / "benchmarks" / "README.md", ROOT / "experiments" / "README.md", *RESULTS])


def broken(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists() or not file.is_relative_to(ROOT):
        return True
    return bool(anchor) and file.suffix == ".md" and anchor not in anchors(file)


@listed("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    inside = [link for link in links(page) if not re.match(r"[a-z]+:", link)]
    assert [link for link in inside if broken(page, link)] == []


@listed("link", ["nothing.md", "docs/privacy.md#nothing", "#nothing", "../elsewhere.md"])
def test_a_link_that_leads_nowhere_is_found(link: str) -> None:
    assert broken(ROOT / "README.md", link)


@listed("page", [ROOT / "README.md", *SITE], ids=name)
def test_numbers_are_those_of_the_results(page: Path) -> None:
    """A mean with its spread stands in the result that its line links to; or, where it links to none, in some result."""
    for line in page.read_text().splitlines():
        results = [(page.parent / link).resolve() for link in LINK.findall(line) if "/results/" in link and link.endswith(".md")]
        text = "".join(plain(file) for file in results) or EVIDENCE
        assert [number for number in SPREAD.findall(line) if number not in text] == [], line


def test_every_method_has_its_place() -> None:
    chosen = (ROOT / "docs" / "methods" / "choosing.md").read_text()
    assert [method for method in METHODS if f"`{method}`" not in chosen] == []
