"""Fixtures of several files: a kit for two sites, and a user's own app."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.deployment.inner import KitPlan, ServerFolder, SiteFolder, app, create

PLAN = KitPlan(
    "fl.example.org", ["A", "B"], exchange_host="x.example.org", also=["10.1.2.3", "alias"], fleet_port=21092, exchange_port=21095
)


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """In a folder whose name shells and configs stumble over."""
    create(PLAN, tmp_path / "St. Mary's kit")
    return tmp_path / "St. Mary's kit"


@pytest.fixture
def server(kit: Path) -> ServerFolder:
    return ServerFolder.read(kit / "server")


@pytest.fixture
def site(kit: Path) -> SiteFolder:
    return SiteFolder.read(kit / "sites/A")


@pytest.fixture
def own_app(tmp_path: Path) -> Path:
    """The folder of an app that ``fl-bn new myapp`` has made."""
    with chdir(tmp_path):
        made = CliRunner().invoke(app, ["new", "myapp"])
    assert made.exit_code == 0, made.output
    return tmp_path / "myapp"
