"""Write a software bill of materials of an installation, as CycloneDX 1.5 in JSON.

    python -m tools.supply.sbom build/sbom.json
    python -m tools.supply.sbom --extra deployment --extra report --extra vision -- build/sbom.json

It lists fl-bn and every installed package that fl-bn with these extras needs. Each has its name, version, licence, package URL
and requirements. The hashes come from requirements.hashed.txt, which has those of every file that pip may have installed.
"""

from __future__ import annotations

import argparse
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from email.message import Message
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.supply.hashed import EXTRAS, FILE

PRODUCT = "fl-bn"
LONGEST = 100  # characters of a licence's name that are kept, since some packages give the whole text of the licence
UNKNOWN = {"", "unknown", "none"}
Key = tuple[str, str]  # name, version


def needed(product: str, extras: Sequence[str]) -> dict[str, tuple[Distribution, list[str]]]:
    """Return ``product``, and every installed package that it needs with ``extras``.

    Returns:
        Name -> the package, and the names of the installed packages that it needs. ``product`` comes first.

    Raises:
        PackageNotFoundError: ``product`` is not installed.
    """
    found: dict[str, tuple[Distribution, list[str]]] = {}
    done: set[tuple[str, str]] = set()
    waiting = [(canonicalize_name(product), extra) for extra in ("", *extras)]
    while waiting:
        if (one := waiting.pop(0)) in done:
            continue
        done.add(one)
        name, extra = one
        try:
            package = distribution(name)
        except PackageNotFoundError:
            if name == canonicalize_name(product):
                raise
            continue  # a requirement that this environment does not have
        needs = found.setdefault(name, (package, []))[1]
        for text in package.requires or ():
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            other = canonicalize_name(requirement.name)
            needs.append(other)
            waiting += [(other, more) for more in ("", *requirement.extras)]
    return {name: (package, sorted({one for one in needs if one in found and one != name})) for name, (package, needs) in found.items()}


def licences(about: Message) -> list[dict[str, Any]]:
    """Return the licences of a package as CycloneDX writes them; empty: it names none."""
    if expression := str(about.get("License-Expression") or "").strip():
        return [{"expression": expression}]
    listed = [value.rpartition("::")[2].strip() for value in about.get_all("Classifier") or () if value.startswith("License ::")]
    listed = [name for name in listed if name != "OSI Approved"]
    text = str(about.get("License") or "").strip().partition("\n")[0][:LONGEST]
    names = listed or ([text] if text.lower() not in UNKNOWN else [])
    return [{"license": {"name": name}} for name in dict.fromkeys(names)]


def hashes_in(text: str) -> dict[Key, list[str]]:
    """Return the hashes of a requirements file, by name and version."""
    found: dict[Key, list[str]] = {}
    for one in re.finditer(r"(?m)^([A-Za-z0-9._-]+)==(\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)", text):
        found[canonicalize_name(one[1]), one[2]] = re.findall(r"sha256:([0-9a-f]{64})", one[3])
    return found


def purl(name: str, version: str) -> str:
    """Return the package URL of a Python package."""
    return f"pkg:pypi/{canonicalize_name(name)}@{version.replace('+', '%2B')}"


def component(package: Distribution, hashes: Mapping[Key, list[str]], kind: str = "library") -> dict[str, Any]:
    """Return a package as a component of CycloneDX."""
    name, version = package.metadata["Name"], package.version
    found = {"type": kind, "bom-ref": purl(name, version), "name": name, "version": version, "purl": purl(name, version)}
    known = hashes.get((canonicalize_name(name), version), [])
    more = {
        "description": str(package.metadata.get("Summary") or ""),
        "licenses": licences(package.metadata),  # type: ignore[arg-type]
        "hashes": [{"alg": "SHA-256", "content": sha} for sha in known],
    }
    return found | {key: value for key, value in more.items() if value}


def bill(extras: Sequence[str], now: datetime, hashes: Mapping[Key, list[str]]) -> dict[str, Any]:
    """Return the bill of materials.

    Args:
        extras: The extras of fl-bn whose packages are listed, too.
        now: The time to write into the bill.
        hashes: The hashes of files, by name and version of the package.

    Raises:
        PackageNotFoundError: fl-bn is not installed.
    """
    found = needed(PRODUCT, extras)
    packages = {name: package for name, (package, _) in found.items()}
    refs = {name: purl(package.metadata["Name"], package.version) for name, package in packages.items()}
    product, *others = packages.values()
    libraries = sorted((component(package, hashes) for package in others), key=lambda one: one["bom-ref"])
    dependencies = [{"ref": refs[name], "dependsOn": [refs[one] for one in needs]} for name, (_, needs) in found.items()]
    same = json.dumps([libraries, dependencies], sort_keys=True)  # one installation has one serial number
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, same)}",
        "version": 1,
        "metadata": {
            "timestamp": now.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            "tools": {"components": [{"type": "application", "name": "tools.supply.sbom", "version": product.version}]},
            "component": component(product, hashes, "application"),
        },
        "components": libraries,
        "dependencies": sorted(dependencies, key=lambda one: str(one["ref"])),
    }


def without_licence(made: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the components whose licence is not known."""
    yield from (one["name"] for one in made["components"] if "licenses" not in one)


def main(words: Sequence[str] | None = None) -> None:
    """Write the bill of materials of this environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the file to write")
    parser.add_argument("--extra", action="append", help=f"an extra of fl-bn; may be repeated; default: {', '.join(EXTRAS)}")
    given = parser.parse_args(words)
    made = bill(given.extra or EXTRAS, datetime.now(UTC), hashes_in(FILE.read_text()))
    given.file.parent.mkdir(parents=True, exist_ok=True)
    given.file.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    unknown = list(without_licence(made))
    print(f"{given.file}: {len(made['components'])} packages" + (f"; of unknown licence: {', '.join(unknown)}" if unknown else ""))


if __name__ == "__main__":
    main()
