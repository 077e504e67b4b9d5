"""Build the wheel, and install it into a folder, once for each test file that needs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.packaging.wheels import PIP, built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    target = wheel.parent / "installed"
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(target), str(wheel)], check=True, capture_output=True)
    return target
