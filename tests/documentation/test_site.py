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


def test_it_builds_loads_nothing_from_elsewhere_and_has_every_public_name(tmp_path: Path) -> None:
    """mkdocs.yml makes every warning, as of a link or an anchor that leads nowhere, an error."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    files = [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")]
    loaded = {load for file in files for found in LOADING.findall(file.read_text()) for load in found}
    assert {load for load in loaded if re.match(r"['\"]?(?!data:)([a-z]+:|//)", load)} == set()
    assert any("javascripts" in load for load in loaded)  # control
    reference = "".join(file.read_text() for file in (tmp_path / "reference").rglob("*.html"))
    assert [name for name in fl_bn.__all__ if name not in ("__version__", "methods") and f'id="fl_bn.{name}"' not in reference] == []
