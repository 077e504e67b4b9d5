"""Links of README and pages lead somewhere, also where the repository is browsed; numbers are those of the committed results."""

from __future__ import annotations

import re
from pathlib import Path

from fl_bn.methods import METHODS
from tests.documentation.pages import LINK, PAGES, ROOT, SITE, anchors, links, name
from tests.listed import listed

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
