"""Fixtures for tests of commands at a server: a fake SuperLink, a kit for two sites, and a user's own app."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_bn_site import runs as runs_module
from fl_bn_site import status as status_module
from fl_bn_site import submit as submit_module
from fl_bn_site.folders import EXCHANGE_PORTS
from tests.deployment.inner import KitPlan, ServerFolder, app, create
from tests.deployment.superlink import SuperLink
from tests.deployment.tls_servers import free_range


@pytest.fixture
def own_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create an app in a temporary folder by ``fl-bn new myapp``, and make this folder the working directory; return the app's folder."""
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(app, ["new", "myapp"])
    assert made.exit_code == 0, made.output
    return tmp_path / "myapp"


@pytest.fixture
def server(tmp_path: Path) -> ServerFolder:
    create(KitPlan("127.0.0.1", ["a", "b"], exchange_port=free_range(EXCHANGE_PORTS)), tmp_path / "kit")
    return ServerFolder.read(tmp_path / "kit/server")


@pytest.fixture
def superlink(server: ServerFolder, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = SuperLink(server)

    @contextmanager
    def control_of(server: ServerFolder, address: str = "") -> Iterator[SuperLink]:
        yield made

    for where in (submit_module, runs_module, status_module):
        monkeypatch.setattr(where, "control_of", control_of)
    monkeypatch.setattr("fl_bn_site.submit.time.sleep", lambda seconds: None)
    monkeypatch.setattr("fl_bn_site.launch.PATIENCE", 0.01)
    monkeypatch.setattr(submit_module, "build", lambda server, own=None: b"a package")
    return made
