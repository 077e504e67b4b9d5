"""The hashes of what servers and sites install, and the bill of materials of an installation."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from email.message import Message
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.supply import hashed, sbom

ROOT = Path(__file__).parents[2]
CONSTRAINTS = {
    canonicalize_name(name): version
    for name, _, version in (line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
}


@pytest.fixture(scope="module")
def hashes() -> dict[tuple[str, str], list[str]]:
    return sbom.hashes_in(hashed.FILE.read_text())


@pytest.fixture(scope="module")
def made(hashes: dict[tuple[str, str], list[str]]) -> dict[str, Any]:
    return sbom.bill(hashed.EXTRAS, hashes)


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


def test_every_package_that_a_deployment_needs_here_is_in_it(hashes: dict[tuple[str, str], list[str]]) -> None:
    """By the metadata of what is installed, not by pip's word: on another system other packages belong to it."""
    found = sbom.needed("fl-bn", hashed.EXTRAS)
    here = {(name, package.version) for name, (package, _) in found.items() if name != "fl-bn"}
    if sys.platform == "linux":
        assert {one for one in here if one[1] == CONSTRAINTS.get(one[0])} <= hashes.keys()
    assert len(here) > 40


def test_a_report_of_pip_becomes_the_file_and_a_file_without_hash_is_refused() -> None:
    def report(name: str, archive: Mapping[str, Any]) -> dict[str, Any]:
        return {"install": [{"metadata": {"name": name, "version": "1.0"}, "download_info": {"archive_info": archive}}]}

    both = [hashed.files_of(report("Some_Name", {"hashes": {"sha256": sha * 64}})) for sha in "ba"]
    text = hashed.text_of(both)
    assert text.splitlines()[2:] == ["some-name==1.0 \\", f"    --hash=sha256:{'a' * 64} \\", f"    --hash=sha256:{'b' * 64}"]
    assert sbom.hashes_in(text) == {("some-name", "1.0"): ["a" * 64, "b" * 64]}
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


# The bill of materials


def problems(bom: Mapping[str, Any]) -> list[str]:
    """What CycloneDX 1.5 asks of the parts that we write, from its schema."""
    found = [f"{key} is {bom.get(key)!r}" for key, value in (("bomFormat", "CycloneDX"), ("specVersion", "1.5")) if bom.get(key) != value]
    found += sorted(bom.keys() - {"bomFormat", "specVersion", "version", "metadata", "components", "dependencies"})
    components = [bom["metadata"]["component"], *bom["components"]]
    refs = [one["bom-ref"] for one in components]
    found += [f"{ref} occurs twice" for ref in set(refs) if refs.count(ref) > 1]
    for one in components:
        ref = one["bom-ref"]
        found += [f"{ref}: {key}" for key in one.keys() - {"type", "bom-ref", "name", "version", "purl", "licenses", "hashes"}]
        if one["type"] not in ("application", "library") or not one["name"] or not one["version"]:
            found.append(f"{ref}: type, name and version are needed")
        if not re.fullmatch(r"pkg:pypi/[a-z0-9]+(-[a-z0-9]+)*@[A-Za-z0-9.%!-]+", one["purl"]):
            found.append(f"{ref} is no package URL")
        found += [
            f"{ref}: {sha}" for sha in one.get("hashes", ()) if sha["alg"] != "SHA-256" or not re.fullmatch("[0-9a-f]{64}", sha["content"])
        ]
        licences = one.get("licenses", [])
        expressions = [licence for licence in licences if licence.keys() == {"expression"}]
        if (expressions and len(licences) > 1) or any(
            licence.keys() != {"license"} or not licence["license"].get("name") for licence in licences if licence not in expressions
        ):
            found.append(f"{ref}: one expression, or licences with names, are expected")
    for one in bom["dependencies"]:
        found += [f"{one['ref']} needs {ref}, which is not listed" for ref in {one["ref"], *one["dependsOn"]} - set(refs)]
        found += [f"{one['ref']}: it needs something twice"] * (len(set(one["dependsOn"])) < len(one["dependsOn"]))
    return found


def test_the_bill_is_valid_and_complete(made: dict[str, Any]) -> None:
    assert problems(made) == []
    names = {canonicalize_name(one["name"]) for one in made["components"]}
    assert {"torch", "numpy", "flwr", "cryptography", "grpcio", "protobuf"} <= names
    assert "pytest" not in names
    assert len(made["dependencies"]) == len(made["components"]) + 1
    needs = {one["ref"]: one["dependsOn"] for one in made["dependencies"]}
    assert any(ref.startswith("pkg:pypi/cffi@") for ref in needs[next(ref for ref in needs if ref.startswith("pkg:pypi/cryptography@"))])
    assert sum("licenses" in one for one in made["components"]) > 0.9 * len(made["components"])
    assert sum("hashes" in one for one in made["components"]) > 0.9 * len(made["components"])


SPOILT = {
    "no version": lambda bom: bom["components"][0].update(version=""),
    "a field of its own": lambda bom: bom["components"][0].update(licence="MIT"),
    "twice": lambda bom: bom["components"].append(bom["components"][0]),
    "a hash cut short": lambda bom: bom["components"][0]["hashes"][0].update(content="ab"),
    "needs what is not there": lambda bom: bom["dependencies"][0]["dependsOn"].append("pkg:pypi/nothing@1"),
    "another version of the format": lambda bom: bom.update(specVersion="1.4"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_what_is_wrong_with_a_bill_is_found(case: str, made: dict[str, Any]) -> None:
    """Control of the check above."""
    spoilt = json.loads(json.dumps(made))
    SPOILT[case](spoilt)
    assert problems(spoilt) != []


def test_more_extras_are_more_parts(made: dict[str, Any], hashes: dict[tuple[str, str], list[str]]) -> None:
    fewer = sbom.bill((), hashes)
    assert {one["name"] for one in made["components"]} - {one["name"] for one in fewer["components"]} >= {"matplotlib"}
    with pytest.raises(PackageNotFoundError):
        sbom.needed("no-such-package-at-all", ())


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ({"License-Expression": "MIT AND Apache-2.0", "License": "x"}, [{"expression": "MIT AND Apache-2.0"}]),
        ({"Classifier": "License :: OSI Approved :: BSD License", "License": "long text"}, [{"license": {"name": "BSD License"}}]),
        ({"License": "Apache 2.0\nwith all of its text"}, [{"license": {"name": "Apache 2.0"}}]),
        ({"Classifier": "License :: OSI Approved", "License": "UNKNOWN"}, []),
    ],
)
def test_licences_are_as_the_package_names_them(lines: dict[str, str], expected: list[dict[str, Any]]) -> None:
    about = Message()
    for name, value in lines.items():
        about[name] = value
    assert sbom.licences(about) == expected


def test_the_command_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sbom.main(tmp_path / "made/sbom.json")
    bom = json.loads((tmp_path / "made/sbom.json").read_text())
    assert problems(bom) == []
    assert f"{len(bom['components'])} packages" in capsys.readouterr().out
