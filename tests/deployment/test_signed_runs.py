"""Which runs a site lets in, tried on real processes: signed, unsigned, signed by a stranger, changed, and sent twice."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.cli.build import build_fab_from_disk

from fl_bn_site.control import control_of
from fl_bn_site.project import project_of
from fl_bn_site.submit import _complete
from tests.deployment.federation import FL_BN, ROOT, Federation, wait_until
from tests.deployment.inner import (
    COMPLETED,
    Package,
    Scalar,
    ServerFolder,
    SiteFolder,
    build,
    complete_config,
    flower_config,
    key_file,
    lines_in,
    read_key,
    stage,
    with_sites,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
POLICIES = ("installed", "signed", "any")  # a site of each, which has the name of its policy
RUN: dict[str, Any] = {
    "model": "mlp", "method": "fedavg", "rounds": 1, "local-steps": 1, "pictures": False, "evaluate-every": 1, "min-sites": 1,
}  # fmt: skip
REFUSES = {  # what is submitted: what each site that refuses it says
    "signed": {},
    "unsigned": {"signed": "allow-code = signed, but the run is not signed"},
    "signed by a stranger": {"signed": r"allow-code = signed, but the run is signed by the key SHA256:\S+, and this site trusts sub"},
    "package changed": {
        "signed": "allow-code = signed, but the signature of submitter is for another package or run config",
        "installed": r"allow-code = installed, but the file fl_bn/__init__\.py of the run differs",
    },
    "config changed": {"signed": "allow-code = signed, but the signature of submitter is for another package or run config"},
    "sent again": {"signed": r"allow-code = signed, but the run's signature was used for run \d+ already"},
}
IMPORTED = "imported"
# what a hostile package does
MARKS = f'\n\nimport os, pathlib\npathlib.Path(os.environ["FLWR_HOME"], "..", "{IMPORTED}").resolve().touch()\n'


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("signed"), POLICIES) as running:
        for site in POLICIES:
            policy = running.kit / "sites" / site / "policy.toml"
            policy.write_text(re.sub(r'(?m)^allow-code = "signed"', f'allow-code = "{site}"', policy.read_text()))
        running.start_all()
        yield running


def changed(server: ServerFolder) -> bytes:
    """The package with other bytes in one file, which leave a trace where they are imported."""
    with stage(project_of(server)) as app:
        with (app / "fl_bn/__init__.py").open("a") as file:
            file.write(MARKS)
        package: bytes = build_fab_from_disk(app)
    return package


def files(federation: Federation, site: str) -> set[str]:
    """All files in the folder of a site but its logs, its audit log, and the packages, packed, that Flower's SuperNode stores."""
    folder = federation.kit / "sites" / site
    whole = {path for path in folder.rglob("*") if path.is_file() and path.parts[-2] != "logs"}
    return {
        path.relative_to(folder).as_posix()
        for path in whole
        if not path.is_relative_to(folder / "node/flower") and path.parent != folder / "node/audit"
    }


class Server:
    """Whoever holds the server: submits any bytes with any run config, past ``fl-bn submit``."""

    def __init__(self, federation: Federation) -> None:
        self.folder = ServerFolder.read(federation.kit / "server")
        file = key_file(self.folder)
        assert file is not None
        self.key, self.content = read_key(file), build(self.folder)

    def config(self, name: str, key: Ed25519PrivateKey | None) -> dict[str, Scalar]:
        given = _complete(self.folder, {**RUN, "name": name})
        return Package(self.content, key).signed(complete_config(self.folder, given)) | {
            name: value for name, value in given.items() if name.startswith("exchange")
        }

    def carry_out(self, config: Mapping[str, Scalar], package: bytes, folder: Path) -> Path:
        """The folder of a run that must complete."""
        with control_of(self.folder) as control:
            run = control.start_run(package, with_sites(self.folder, config))
            status = wait_until("the run's end", lambda: (s := control.status(run)).startswith("finished") and s, 400, 1.0)
            assert status == COMPLETED, "\n".join(control.log(run))
        return self.folder.results / str(config["name"])


@pytest.mark.nightly
def test_each_policy_lets_in_what_it_says_and_nothing_of_the_rest_is_kept(federation: Federation, tmp_path: Path) -> None:
    server, table, code = Server(federation), {}, {}
    genuine = server.config("genuine", server.key)
    runs = {
        "signed": (genuine, server.content),
        "unsigned": (server.config("unsigned", None), server.content),
        "signed by a stranger": (server.config("stranger", Ed25519PrivateKey.generate()), server.content),
        "package changed": (server.config("package", server.key), changed(server.folder)),
        "config changed": ({**server.config("config", server.key), "local-steps": 2}, server.content),
        "sent again": (genuine, server.content),
    }
    for what, (config, package) in runs.items():
        if what == "sent again":  # not even after a restart of the site
            shutil.move(federation.result("genuine"), tmp_path / "genuine")
            federation.stop("sites/signed")
            federation.start_again("sites/signed")
        before = {site: files(federation, site) for site in POLICIES}
        summary = (server.carry_out(config, package, tmp_path) / "summary.md").read_text()
        table[what] = {site: said for site in POLICIES if (said := refusal(summary, site))}
        for site in table[what]:
            assert files(federation, site) == before[site], f"{what}: {site} kept something"
        code[what] = Package(package).code

    for what, expected in REFUSES.items():
        assert table[what].keys() == expected.keys(), (what, table[what])
        for site, words in expected.items():
            assert re.search(words, table[what][site]), (what, site, table[what][site])

    sites = federation.kit / "sites"
    for site in POLICIES:  # the changed package: hashed, or compared as bytes, and no more
        traces = [path for path in (sites / site).rglob("*") if code["package changed"][:8] in path.name or path.name == IMPORTED]
        traces = [path for path in traces if not path.is_relative_to(sites / site / "node/flower")]  # packed, as it came
        assert bool(traces) == (site == "any"), traces
    assert [path.name == IMPORTED for path in (sites / "any/state").iterdir()].count(True) == 1  # control: it was imported there
    assert len(list((sites / "signed/node/accepted").iterdir())) == 1
    assert answered(sites / "signed") == {("submitter", code["signed"])}
    logged = [entry for line in lines_in(SiteFolder.read(sites / "signed").audit_log) if (entry := line.values)]
    assert list(dict.fromkeys(entry["name"] for entry in logged if entry["decision"] == "refused")) == [
        *("unsigned", "stranger", "package", "config", "genuine")
    ], "a line for each run that the gate refused"
    assert {submitter for submitter, _ in answered(sites / "any")} == {None}, "nobody asked there who signed"
    assert code["package changed"] in {package for _, package in answered(sites / "any")}


def answered(site: Path) -> set[tuple[str | None, str]]:
    """Submitter and code of all answers of an app, by the audit log of a site."""
    entries = [line.values for line in lines_in(SiteFolder.read(site).audit_log)]
    return {(entry["submitter"], entry["code"]) for entry in entries if entry and entry["decision"] == "sent"}


def refusal(summary: str, site: str) -> str:
    """What the record of a run says of a site that refused it; empty: it took part."""
    found = re.search(rf"(?m)^.*\b{site}\b.*this site's policy has (.*)$", summary)
    return found[1] if found else ""


@pytest.mark.nightly
def test_a_run_signed_on_another_machine_is_submitted_as_it_is(federation: Federation, tmp_path: Path) -> None:
    """The server's folder, as a copy of its public files, and the key are on the submitter's machine alone."""
    copy, server = tmp_path / "copy", federation.kit / "server"
    shutil.copytree(server, copy, ignore=shutil.ignore_patterns("state", "results", "logs", "*.key"))
    key, moved = federation.kit / "submitters/submitter/submitter.key", tmp_path / "my.key"
    shutil.move(key, moved)
    config = {name: flower_config({**RUN, "name": name, "min-sites": 3}) for name in ("unsigned-here", "elsewhere")}

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*FL_BN, "submit", *words], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)

    try:
        without = typed(str(server), "--run-config", config["unsigned-here"])
        assert without.returncode == 1
        assert "the run is not signed, so sites with allow-code" in without.stdout
        assert "site signed cannot take part: its policy refuses the run: this site's policy has allow-code = signed" in without.stdout
        signed = typed(str(copy), "--key", str(moved), "--sign-only", str(tmp_path / "run.signed"), "--run-config", config["elsewhere"])
        assert signed.returncode == 0, signed.stderr
        done = typed(str(server), "--signed", str(tmp_path / "run.signed"))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "3/3 clients" in done.stdout
    finally:
        shutil.move(moved, key)
