"""Write a software bill of materials of this environment, as CycloneDX 1.5 in JSON.

    python -m tools.supply.sbom build/sbom.json

It lists fl-bn and every installed package that servers and sites need. Each has its name, version, licence, package URL and
requirements. The hashes come from requirements.hashed.txt, which has those of every file that pip may have installed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from email.message import Message
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.supply.hashed import EXTRAS, FILE

PRODUCT = "fl-bn"
LONGEST = 100  # characters of a licence's name that are kept, since some packages give the whole text of the licence
Key = tuple[str, str]  # name, version


def needed(product: str, extras: Sequence[str]) -> dict[str, tuple[Distribution, set[str]]]:
    """Return ``product``, and every installed package that it needs with ``extras``.

    Returns:
        Name -> the package, and the names of the packages that it needs. ``product`` comes first.

    Raises:
        PackageNotFoundError: ``product`` is not installed.
    """
    found = {canonicalize_name(product): (distribution(product), set[str]())}
    done, waiting = set[tuple[str, str]](), [(canonicalize_name(product), extra) for extra in ("", *extras)]
    while waiting:
        if (one := waiting.pop(0)) in done:
            continue
        done.add(one)
        package, needs = found[one[0]]
        for requirement in map(Requirement, package.requires or ()):
            name = canonicalize_name(requirement.name)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": one[1]}):
                continue
            try:
                found.setdefault(name, (distribution(name), set()))
            except PackageNotFoundError:  # a requirement that this environment does not have
                continue
            needs.update({name} - {one[0]})
            waiting += [(name, more) for more in ("", *requirement.extras)]
    return found


def licences(about: Message) -> list[dict[str, Any]]:
    """Return the licences of a package as CycloneDX writes them; empty: it names none."""
    if expression := str(about.get("License-Expression") or "").strip():
        return [{"expression": expression}]
    listed = [value.rpartition("::")[2].strip() for value in about.get_all("Classifier") or () if value.startswith("License ::")]
    names = [name for name in listed if name != "OSI Approved"] or [str(about.get("License") or "").strip().partition("\n")[0][:LONGEST]]
    return [{"license": {"name": name}} for name in dict.fromkeys(names) if name.lower() not in ("", "unknown", "none")]


def hashes_in(text: str) -> dict[Key, list[str]]:
    """Return the hashes of a requirements file, by name and version."""
    found: dict[Key, list[str]] = {}
    for one in re.finditer(r"(?m)^([A-Za-z0-9._-]+)==(\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)", text):
        found[canonicalize_name(one[1]), one[2]] = re.findall(r"sha256:([0-9a-f]{64})", one[3])
    return found


def purl(package: Distribution) -> str:
    """Return the package URL of a Python package."""
    return f"pkg:pypi/{canonicalize_name(package.metadata['Name'])}@{package.version.replace('+', '%2B')}"


def component(package: Distribution, hashes: Mapping[Key, list[str]], kind: str = "library") -> dict[str, Any]:
    """Return a package as a component of CycloneDX."""
    name, version, ref = package.metadata["Name"], package.version, purl(package)
    found: dict[str, Any] = {"type": kind, "bom-ref": ref, "name": name, "version": version, "purl": ref}
    if named := licences(package.metadata):  # type: ignore[arg-type]
        found["licenses"] = named
    if known := hashes.get((canonicalize_name(name), version)):
        found["hashes"] = [{"alg": "SHA-256", "content": sha} for sha in known]
    return found


def bill(extras: Sequence[str], hashes: Mapping[Key, list[str]]) -> dict[str, Any]:
    """Return the bill of materials of fl-bn with ``extras``. ``hashes`` are those of files, by name and version of the package."""
    found = needed(PRODUCT, extras)
    product, *others = (package for package, _ in found.values())
    dependencies = [{"ref": purl(one), "dependsOn": sorted(purl(found[name][0]) for name in needs)} for one, needs in found.values()]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component(product, hashes, "application")},
        "components": sorted((component(package, hashes) for package in others), key=lambda one: str(one["bom-ref"])),
        "dependencies": sorted(dependencies, key=lambda one: str(one["ref"])),
    }


def main(file: Path) -> None:
    """Write the bill of materials of this environment."""
    made = bill(EXTRAS, hashes_in(FILE.read_text()))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    unknown = [one["name"] for one in made["components"] if "licenses" not in one]
    print(f"{file}: {len(made['components'])} packages" + (f"; of unknown licence: {', '.join(unknown)}" if unknown else ""))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
