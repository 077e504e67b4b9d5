"""The hashes of what servers and sites install."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "requirements.hashed.txt").read_text()
CONSTRAINTS = {
    canonicalize_name(name): version
    for name, _, version in (line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
}


def test_every_package_has_the_version_of_the_constraints_and_a_hash() -> None:
    found = re.finditer(r"(?m)^([A-Za-z0-9._-]+)==(\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)", TEXT)
    hashes = {(canonicalize_name(one[1]), one[2]): re.findall(r"sha256:([0-9a-f]{64})", one[3]) for one in found}
    assert len(hashes) == len(re.findall(r"(?m)^[^#\s].*==", TEXT)) > 50
    assert {name for name, version in hashes if CONSTRAINTS.get(name) != version} == {"setuptools"}, (
        "which builds, and is pinned here alone"
    )
    assert all(shas and len(set(shas)) == len(shas) for shas in hashes.values())
    assert "://" not in TEXT, "it names no index"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (project["optional-dependencies"][extra] for extra in ("deployment", "report", "vision"))
    wanted = {canonicalize_name(Requirement(line).name) for line in chain(project["dependencies"], *extras)}
    assert wanted <= {name for name, _ in hashes}
    assert {"pytest", "ray", "mkdocs-material"}.isdisjoint(name for name, _ in hashes), "tests are not for sites"


@pytest.mark.slow
def test_pip_takes_what_has_the_hash_and_refuses_what_has_another(tmp_path: Path) -> None:
    """One small package, from the index that pip has here."""
    (lines,) = re.findall(r"(?m)^mdurl==.*\n(?: +--hash=.*\n)+", TEXT)
    (tmp_path / "right.txt").write_text(lines)
    (tmp_path / "wrong.txt").write_text(re.sub("sha256:[0-9a-f]{8}", "sha256:00000000", lines))
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--dest", str(tmp_path)]
    done = [
        subprocess.run([*words, "-r", str(tmp_path / name)], capture_output=True, text=True, timeout=120, check=False)
        for name in ("right.txt", "wrong.txt")
    ]
    assert done[0].returncode == 0, done[0].stderr
    assert done[1].returncode != 0
    assert "hash" in done[1].stderr.lower()
