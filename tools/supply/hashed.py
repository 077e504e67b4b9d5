"""Write requirements.hashed.txt: all packages of servers and sites, with the SHA-256 of each file that pip may install.

    python -m tools.supply.hashed

pip resolves the requirements of fl-bn with ``deployment``, ``report`` and ``vision`` under constraints.txt, for Linux on
x86_64 and each version of Python in ``PYTHONS``. It installs nothing, but reports which files it would install, with
their hashes. requirements.hashed.txt names no package index.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FILE = ROOT / "requirements.hashed.txt"
EXTRAS = ("deployment", "report", "vision")  # the same as in deploy/docker/requirements.py
PYTHONS = ("3.11", "3.12", "3.13")
HEAD = """\
# All packages of servers and sites, with the SHA-256 of every file that may be installed: Linux on x86_64, Python {pythons}.
# Made by python -m tools.supply.hashed from constraints.txt. Use: docs/how-to/updates.md
"""
Files = dict[tuple[str, str], set[str]]  # (name, version) -> hashes


def requirements() -> list[str]:
    """Return the requirements of servers and sites, as pyproject.toml lists them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]


def files_of(report: Mapping[str, object]) -> Files:
    """Return the hashes of the files in a report of pip, by package.

    Raises:
        ValueError: The index gave no hash of a file.
    """
    found: Files = {}
    for one in report["install"]:  # type: ignore[attr-defined]
        about, archive = one["metadata"], one["download_info"].get("archive_info", {})
        if not (sha := archive.get("hashes", {}).get("sha256")):
            raise ValueError(f"the index has no SHA-256 of {about['name']} {about['version']}")
        found.setdefault((canonicalize_name(about["name"]), about["version"]), set()).add(sha)
    return found


def asked(python: str) -> Files:
    """Return the hashes of the files that pip would install for one version of Python, by package.

    Raises:
        subprocess.CalledProcessError: pip finds no set of packages that fits the requirements.
    """
    with tempfile.TemporaryDirectory() as made:
        report = Path(made) / "report.json"
        words = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(report)]
        other = ["--python-version", python, "--only-binary=:all:", "--target", made]
        options = [] if python == f"{sys.version_info.major}.{sys.version_info.minor}" else other
        subprocess.run([*words, *options, "--constraint", str(ROOT / "constraints.txt"), *requirements()], check=True)
        return files_of(json.loads(report.read_text()))


def text_of(files: Iterable[Files]) -> str:
    """Return the text of the requirements file that allows each of ``files``."""
    together: Files = {}
    for some in files:
        for package, hashes in some.items():
            together.setdefault(package, set()).update(hashes)
    lines = [
        f"{name}=={version} \\\n    " + " \\\n    ".join(f"--hash=sha256:{sha}" for sha in sorted(together[name, version]))
        for name, version in sorted(together)
    ]
    return HEAD.format(pythons=", ".join(PYTHONS)) + "\n".join(lines) + "\n"


def main() -> None:
    """Write requirements.hashed.txt, and print how many packages it has."""
    FILE.write_text(text_of(map(asked, PYTHONS)))
    print(f"{FILE.name}: {sum(' --hash' not in line and '==' in line for line in FILE.read_text().splitlines())} packages")


if __name__ == "__main__":
    main()
