"""The site builds without a warning, every link in it leads somewhere, and it loads nothing from elsewhere: it works offline."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.documentation.pages import ROOT

pytest.importorskip("mkdocs", reason="the extra docs is not installed: the site is not built")
pytestmark = pytest.mark.slow
BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href"}


class Page(HTMLParser):
    """The links of a page, its ids, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.ids, self.loads = list[str](), set[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        if "id" in found:
            self.ids.add(found["id"])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in LOADED and found.get(LOADED[tag]) and found.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(found[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file.read_text()) for file in sorted(site.rglob("*.html")) if file.name != "404.html"}


def test_links_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    assert len(pages) > 50
    wrong = []
    for file, page in pages.items():
        for link in page.links:
            path, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            target = (file.parent / path).resolve() if path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].ids and anchor != "__codelineno-0-1"):
                wrong.append(f"{file.relative_to(site)}: {link}")
    assert wrong == []


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Page]) -> None:
    assert {load for page in pages.values() for load in page.loads if re.match(r"(?!data:)[a-z]+:|//", load)} == set()


def test_styles_load_nothing_from_elsewhere(site: Path) -> None:
    assert [link for file in site.rglob("*.css") for link in re.findall(r"url\(['\"]?(https?:[^)]*)", file.read_text())] == []


def test_every_public_name_is_in_the_reference(site: Path, pages: dict[Path, Page]) -> None:
    import fl_bn

    reference = set().union(*(page.ids for file, page in pages.items() if file.parent.name == "reference"))
    assert [name for name in fl_bn.__all__ if name not in ("__version__", "methods") and f"fl_bn.{name}" not in reference] == []


def test_signatures_show_the_defaults_of_options_alone(site: Path) -> None:
    texts = [re.sub(r"<[^>]+>", "", file.read_text()) for file in (site / "reference").rglob("*.html")]
    assert [text for text in texts if re.search(r"\b(option|shared)\(", text)] == []
    assert any(re.search(r"fraction:\s*float\s*=\s*1\.0", text) for text in texts)


@pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH: the search is not tried in a browser (apt-get install chromium)")
def test_search_works_from_a_folder(site: Path, tmp_path: Path) -> None:
    assert BROWSER is not None
    page = f"{(site / 'index.html').as_uri()}?q=recalibrate"
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--virtual-time-budget=15000", "--dump-dom"]
    dom = subprocess.run([BROWSER, *options, page], capture_output=True, text=True, timeout=200, check=True).stdout
    results = re.search(r'<ol class="md-search-result__list".*?</ol>', dom, re.DOTALL)
    assert results is not None
    assert "concepts/statistics.html" in results[0]
