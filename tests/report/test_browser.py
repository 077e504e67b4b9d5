"""The page in a real browser: it renders, its table sorts, and nothing that it shows is run."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.report.inner import write_report
from tests.report.made_up import comparison, rounds, run

BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH: the page is not seen in a browser (apt-get install chromium)"),
]


def dump(page: Path, profile: Path) -> str:
    """The document after its script has run."""
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--virtual-time-budget=2000", "--dump-dom"]
    done = subprocess.run([BROWSER, *options, page.resolve().as_uri()], capture_output=True, text=True, timeout=200, check=True)
    return done.stdout


def rows_of(dom: str) -> list[str]:
    (body,) = re.findall(r'<table class="sortable".*?<tbody>(.*?)</tbody>', dom, re.DOTALL)
    return re.findall(r'<th scope="row">(.*?)</th>', body)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    folder = comparison(tmp_path / "sweep")
    run(folder, {"method": "<script>document.title = 'run'</script>", "split": "IID", "seed": 0}, rounds([0.65]))
    write_report(folder, ["html"])
    return folder / "report.html"


def clicking(page: Path, clicks: str, allowed: bool = True) -> Path:
    """The page with a second script, which the policy forbids unless it is taken out."""
    text = page.read_text()
    text = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", text, flags=re.DOTALL) if allowed else text
    page.write_text(text.replace("</body>", f"<script>{clicks}</script></body>"))
    return page


def test_it_renders_and_runs_its_own_script_only(page: Path, tmp_path: Path) -> None:
    clicking(page, "document.title = 'foreign'", allowed=False)
    dom = dump(page, tmp_path / "profile")
    assert "<title>Made up</title>" in dom
    assert len(re.findall("<th[^>]*><button", dom)) == 3  # the page's own script ran
    nasty = "&lt;script&gt;document.title = 'run'&lt;/script&gt;"
    assert rows_of(dom) == ["BN", "GN", "FixBN", nasty]
    assert "<svg" in dom
    assert "<path" in dom
    without = clicking(page, "document.title = 'foreign'")  # control: it is the policy that stopped it
    assert "<title>foreign</title>" in dump(without, tmp_path / "other")


@pytest.mark.parametrize(
    ("column", "clicks", "order", "direction"),
    [
        (1, 1, ["FixBN", "GN", "&lt;", "BN"], "descending"),
        (2, 1, ["FixBN", "BN", "GN", "&lt;"], "descending"),  # who has no number comes last, in both directions
        (2, 2, ["BN", "FixBN", "GN", "&lt;"], "ascending"),
        (0, 1, ["&lt;", "BN", "FixBN", "GN"], "ascending"),
    ],
)
def test_a_click_sorts(page: Path, tmp_path: Path, column: int, clicks: int, order: list[str], direction: str) -> None:
    script = f"for (let n = 0; n < {clicks}; n++) document.querySelectorAll('table.sortable th button')[{column}].click();"
    dom = dump(clicking(page, script), tmp_path / "profile")
    assert [name[: len(short)] for name, short in zip(rows_of(dom), order, strict=True)] == order
    assert re.findall(r'aria-sort="(\w+)"', dom) == [direction]
