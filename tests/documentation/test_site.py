"""The site builds without a warning, so every link in it leads somewhere, and it loads nothing from elsewhere: it works offline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fl_bn
from tests.documentation.pages import ROOT

pytest.importorskip("mkdocs", reason="the extra docs is not installed: the site is not built")
pytestmark = pytest.mark.slow
LOADING = re.compile(r'<(?:script|img|iframe|link)\b(?![^>]*rel="(?:canonical|next|prev)")[^>]*\b(?:src|href)="([^"]*)"|url\(([^)]*)\)')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; mkdocs.yml makes every warning, as of a link or an anchor that leads nowhere, an error."""
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    loaded = {load for file in [*pages, *site.rglob("*.css")] for found in LOADING.findall(file.read_text()) for load in found}
    assert {load for load in loaded if re.match(r"['\"]?(?!data:)([a-z]+:|//)", load)} == set()
    assert any("javascripts" in load for load in loaded)  # control


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    reference = "".join(file.read_text() for file in (site / "reference").rglob("*.html"))
    assert [name for name in fl_bn.__all__ if name not in ("__version__", "methods") and f'id="fl_bn.{name}"' not in reference] == []
