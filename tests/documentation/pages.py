"""Read the Markdown pages of README and documentation site: code blocks, commands, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
SITE = sorted((ROOT / "docs").rglob("*.md"))
COPIED = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", *sorted(ROOT.glob("[be]*/README.md")))]
PAGES = [ROOT / "README.md", *SITE, *COPIED, *sorted((ROOT / "deploy").rglob("*.md"))]
"""All pages of the site except the tables of results; also the README and the pages in deploy/."""
GIVEN = re.compile(r"<!-- given: (.*?) -->")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """Describe a code block."""

    text: str
    language: str  # of the fence; empty for an indented block, or a fence without a language
    line: int  # of the page
    fenced: bool
    given: str = ""  # the NAME in the comment ``<!-- given: NAME -->`` before the block


@cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(page.read_text())


def blocks(page: Path) -> Iterator[Block]:
    given = ""
    for token in tokens(page):
        if token.type == "html_block" and (found := GIVEN.search(token.content)):
            given = found[1]
        elif token.type in ("fence", "code_block"):
            assert token.map is not None
            yield Block(token.content, token.info.strip(), token.map[0] + 1, token.type == "fence", given)
            given = ""


def inline_code(page: Path) -> Iterator[str]:
    for token in tokens(page):
        yield from (child.content for child in token.children or [] if child.type == "code_inline")


def anchors(page: Path) -> set[str]:
    """Return the ids that GitHub and mkdocs give to the headings of a page."""
    found, heading = set[str](), False
    for token in tokens(page):
        if heading:
            text = "".join(child.content for child in token.children or [])
            found.add(re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-"))
        heading = token.type == "heading_open"
    return found


def links(page: Path) -> Iterator[str]:
    """Yield the targets of the page's links and pictures."""
    for token in tokens(page):
        for child in token.children or []:
            for key in ("href", "src"):
                if isinstance(target := child.attrs.get(key), str):
                    yield target
