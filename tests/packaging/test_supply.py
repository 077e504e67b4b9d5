"""The hashes of what servers and sites install."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.supply import hashed

ROOT = Path(__file__).parents[2]
CONSTRAINTS = {
    canonicalize_name(name): version
    for name, _, version in (line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
}


@pytest.fixture(scope="module")
def hashes() -> dict[tuple[str, str], list[str]]:
    return hashes_in(hashed.FILE.read_text())


def hashes_in(text: str) -> dict[tuple[str, str], list[str]]:
    """The hashes of a requirements file, by name and version."""
    found = re.finditer(r"(?m)^([A-Za-z0-9._-]+)==(\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)", text)
    return {(canonicalize_name(one[1]), one[2]): re.findall(r"sha256:([0-9a-f]{64})", one[3]) for one in found}


# Hashes


def test_every_package_has_the_version_of_the_constraints_and_a_hash(hashes: dict[tuple[str, str], list[str]]) -> None:
    text = hashed.FILE.read_text()
    assert len(hashes) == len(re.findall(r"(?m)^[^#\s].*==", text)) > 50
    assert {name for name, version in hashes if CONSTRAINTS.get(name) != version} == {"setuptools"}, (
        "which builds, and is pinned here alone"
    )
    assert all(shas and len(set(shas)) == len(shas) for shas in hashes.values())
    assert "://" not in text, "it names no index"
    wanted = {canonicalize_name(Requirement(line).name) for line in hashed.requirements()}
    assert wanted <= {name for name, _ in hashes}
    assert {"pytest", "ray", "mkdocs-material"}.isdisjoint(name for name, _ in hashes), "tests are not for sites"


def test_a_report_of_pip_becomes_the_file_and_a_file_without_hash_is_refused() -> None:
    def report(name: str, archive: Mapping[str, Any]) -> dict[str, Any]:
        return {"install": [{"metadata": {"name": name, "version": "1.0"}, "download_info": {"archive_info": archive}}]}

    both = [hashed.files_of(report("Some_Name", {"hashes": {"sha256": sha * 64}})) for sha in "ba"]
    text = hashed.text_of(both)
    assert text.splitlines()[2:] == ["some-name==1.0 \\", f"    --hash=sha256:{'a' * 64} \\", f"    --hash=sha256:{'b' * 64}"]
    assert hashes_in(text) == {("some-name", "1.0"): ["a" * 64, "b" * 64]}
    with pytest.raises(ValueError, match=r"the index has no SHA-256 of other 1\.0"):
        hashed.files_of(report("other", {}))


@pytest.mark.slow
def test_pip_takes_what_has_the_hash_and_refuses_what_has_another(tmp_path: Path) -> None:
    """One small package, from the index that pip has here."""
    (lines,) = re.findall(r"(?m)^mdurl==.*\n(?: +--hash=.*\n)+", hashed.FILE.read_text())
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
