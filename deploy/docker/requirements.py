"""Write the files by which pip installs the packages of the image, with CUDA (``gpu``) or without (``cpu``).

    python requirements.py cpu FOLDER

The program reads pyproject.toml, constraints.txt and requirements.hashed.txt in FOLDER. It writes requirements.txt,
constraints.txt, options.txt and hashed.txt there. pip installs hashed.txt first, and checks each file by its hash.
hashed.txt is empty where no hashes are known: without CUDA (torch is then another build), and on machines other than
x86_64.
"""

import os
import platform
import re
import sys
import tomllib
from pathlib import Path

EXTRAS = ("deployment", "report", "vision")
VARIANTS = ("cpu", "gpu")
HASHED = "x86_64"  # the machine for which requirements.hashed.txt has hashes
CUDA = re.compile(r"^(cuda|nvidia|triton)\b")  # packages that only torch with CUDA needs
PINNED = re.compile(r"^(torch|torchvision)==([^+;\s]+)")  # packages that have separate builds without CUDA, as 2.9.0+cpu


def requirements(project: dict) -> list[str]:  # type: ignore[type-arg]
    return [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]


def constraints(lines: list[str], variant: str) -> list[str]:
    if variant == "gpu":
        return lines
    return [PINNED.sub(r"\1==\2+cpu", line) for line in lines if not CUDA.match(line)]


def main(variant: str, folder: Path) -> None:
    if variant not in VARIANTS:
        sys.exit(f"VARIANT must be {' or '.join(VARIANTS)}, but got {variant!r}")
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    (folder / "requirements.txt").write_text("\n".join(requirements(project)) + "\n")
    lines = (folder / "constraints.txt").read_text().splitlines()
    (folder / "constraints.txt").write_text("\n".join(constraints(lines, variant)) + "\n")
    checked = variant == "gpu" and platform.machine() == HASHED
    (folder / "hashed.txt").write_text((folder / "requirements.hashed.txt").read_text() if checked else "")
    index = os.environ.get("TORCH_INDEX", "")
    (folder / "options.txt").write_text(f"--extra-index-url {index}\n" if variant == "cpu" and index else "")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
