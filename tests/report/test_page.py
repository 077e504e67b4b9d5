"""The page: whole, asks for nothing from anywhere, and shows every label and error as text."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.report.inner import write_report
from tests.report.made_up import comparison, rounds, run

LOADS = {"src", "srcset", "href", "data", "poster", "action", "formaction", "background", "xlink:href"}
ASKS = ("link", "iframe", "object", "embed", "base", "form", "script")


class Page(HTMLParser):
    """Keeps tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.pieces: list[str] = []
        self.feed(text)
        self.text = " ".join(" ".join(self.pieces).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.pieces.append(data)


def outside(page: Page, text: str) -> list[str]:
    """Whatever a browser would ask of a server, or of another file."""
    targets = [value for tag, name, value in page.attributes if name in LOADS and tag != "a"]
    asked = [target for target in targets if not target.startswith(("#", "data:"))] + [tag for tag in ASKS if page.tags[tag]]
    return asked + re.findall(r"@import[^;]*|url\((?!#|data:)[^)]*\)|fetch\(|XMLHttpRequest|WebSocket|import\(", text)


NASTY = """<script>alert("1")</script> & 'quoted' {{ 7 * 7 }}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep whose every text tries to be markup."""
    root = tmp_path_factory.mktemp("sweep") / "a 'b' <i>"
    notes = f'text = """{NASTY}"""'
    comparison(root, f"[paper]\nsource = '''{NASTY}'''\nnote = '''{NASTY}'''\n[notes]\n{notes}")
    for seed in (0, 1):
        axes = {"method": NASTY, "split": "<b>bold</b>", "seed": seed}
        run(root, axes, rounds([0.5]), optimizer=NASTY)
    run(root, {"method": NASTY, "split": "IID", "seed": 0}, [], "failed", f"RunFailed: {NASTY}", optimizer=NASTY)
    write_report(root)
    return root


def test_the_page_asks_for_nothing(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert outside(page, text) == []
    assert all(value for tag, name, value in page.attributes if (tag, name) == ("img", "alt"))
    assert page.tags["img"] == page.tags["figure"] == page.tags["figcaption"] == 1
    assert page.tags["h1"] == 1


@pytest.mark.parametrize("addition", ['<img src="https://example.org/x">', '<p style="background: url(x)">x</p>', '<use href="x.svg"/>'])
def test_a_page_that_asks_for_something_is_found(addition: str) -> None:
    """Negative control."""
    text = f"<html><body>{addition}</body></html>"
    assert outside(Page(text), text)


def test_labels_are_text(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.tags["b"] == 0
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "49" not in page.text.replace("{{ 7 * 7 }}", "")  # nor does the template read them
    assert page.text.count(NASTY) >= 6  # row, error, source, note, notes, config value
    assert "<b>bold</b>" in page.text


def test_no_script_may_run_and_nothing_may_be_loaded(folder: Path) -> None:
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', (folder / "report.html").read_text())
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
