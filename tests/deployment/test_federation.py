"""Three sites on real processes, with TLS and authenticated nodes: models, the sites' logs, whose code runs, strangers, and what dies."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import socket
import sqlite3
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fl_bn.support.flower_config import flower_config
from fl_bn_site.audit_report import chosen, report_of
from fl_bn_site.commands import environment, of_1_25, program
from fl_bn_site.submitters import Package, trust, write_submitter_key
from tests.deployment.federation import FL_BN, SMALL, Federation, check_bits, differing, ended, farewell, in_process, rounds_of, wait_until
from tests.deployment.inner import OTHER, KitPlan, ServerFolder, SiteFolder, build, check, create, lines_in, status, write_site_key
from tests.deployment.tls_servers import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
WAIT = 30.0  # seconds for a stranger to be let in
UP = "../../../../../../../escaped/fl-bn.fl-bn"
LINE = '\nimport os, pathlib\nif "sites" in os.environ["FLWR_HOME"]: pathlib.Path(os.environ["FLWR_HOME"], "..", {!r}).resolve().touch()\n'
PLANTING = """
import os, pathlib, py_compile, shutil
from torch import nn

def build(classes, channels, image_size):
    here = pathlib.Path(__file__).parent
    if "sites" in here.parts:
        first, second = (here.parent / name for name in {names!r})
        if not first.exists():
            shutil.copytree(here, first)
        if not os.path.lexists(second):
            second.symlink_to(first) if "b" in here.parts else shutil.copytree(here, second)
        for file in here.parent.rglob("fl_bn/__init__.py"):
            if here not in file.parents:
                for path in (file.parents[1], file.parent, file):
                    path.chmod(0o755)
                file.write_text(file.read_text() + {line!r})
                py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))
"""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("federation")) as running:
        running.start_all()
        yield running


# Models, and what the sites say of them


RUNS: dict[str, dict[str, Any]] = {
    "fedbn": {"method": "fedbn", "unseen-client": True, "objective": "scaffold", "momentum": 0.0, "server-optimizer": "fedyogi"},
    "hbn": {"method": "hbn"},
    "fedtan": {"method": "fedtan"},
    "hbn-secure": {"method": "hbn", "secure-aggregation": True},
}


def log_of(federation: Federation, site: str) -> Path:
    return SiteFolder.read(federation.kit / "sites" / site).audit_log


def sums(rows: Iterable[tuple[str, int, int, int]]) -> dict[str, list[int]]:
    """Section -> answers, bytes, fewest samples (0: unknown)."""
    found: dict[str, list[int]] = {}
    for section, answers, nbytes, samples in rows:
        one = found.setdefault(section, [0, 0, 0])
        one[:] = one[0] + answers, one[1] + nbytes, min(filter(None, (one[2], samples)), default=0)
    return found


def disclosed(file: Path, site: str) -> Iterator[tuple[str, int, int, int]]:
    """The rows of the server's report. An exchange counts by its vectors, of which each is a line of the site's log."""
    for row in csv.DictReader(file.read_text().splitlines()):
        if row["site"] == site:
            answers = int(row["messages"]) * (int(row["tensors"]) if row["section"] == "exchange" else 1)
            yield row["section"], answers, int(row["bytes"]), int(row["smallest-samples"] or 0)


@pytest.mark.parametrize("name", RUNS)
def test_a_deployed_run_has_the_bits_of_one_process_and_sites_log_what_the_server_reports(
    name: str, federation: Federation, tmp_path: Path
) -> None:
    """The server reports section by section, and what Flower's SuperLink has counted, whose requests have some bytes more."""
    if name == "hbn-secure" and not of_1_25():
        pytest.skip("secure aggregation in deployments needs Flower 1.25")
    config = {**SMALL, **RUNS[name], "evaluate-every": 1, "name": name}
    check_bits(federation, config, federation.run(config), tmp_path)
    sent = 0
    for site in federation.sites:
        entries = list(chosen(log_of(federation, site), name))
        totals = report_of(entries).totals.items()
        counted = sums((section, total.answers, total.nbytes, total.smallest) for (*_, section), total in totals)
        assert counted.pop(OTHER)[0] > 0
        assert counted.pop("nothing", [0, 0, 0])[1] == 0
        server = sums(disclosed(federation.result(name) / "disclosure.csv", site))
        assert counted == server, site
        assert (("exchange" in counted), ("masked" in counted)) == (name in ("fedtan", "hbn"), name == "hbn-secure")
        assert check(log_of(federation, site)).faults == ()
        sent += sum(entry["message-bytes"] for entry in entries if entry["message"] != "exchange")
    (run,) = (run for run in status(ServerFolder.read(federation.kit / "server")).runs if run.name == name)
    assert sent < run.received < 1.03 * sent


# Whose code runs


def names_of(package: Package) -> tuple[str, str]:
    """The names of a package's folder: by id, version and the beginning of its hash, as Flower has them, and by its hash."""
    return f"fl-bn.fl-bn.0.1.0.{package.code[:8]}", package.code


def ran(federation: Federation, name: str) -> list[str]:
    """The sites at which a line with this name has run."""
    return [site for site in federation.sites if (federation.kit / f"sites/{site}/state/{name}").exists()]


def codes(federation: Federation, run: str) -> set[tuple[str, str, str]]:
    """Site, submitter and code of all answers to a run, as the sites' audit logs have them."""
    entries = {site: lines_in(SiteFolder.read(federation.kit / f"sites/{site}").audit_log) for site in federation.sites}
    return {(site, of["submitter"], of["code"]) for site in entries for line in entries[site] if (of := line.values) and of["name"] == run}


@pytest.mark.parametrize(("column", "lie"), [("fab_version", f"x/{UP}.0.1.0"), ("fab_id", f"fl-bn/{UP}")])
def test_the_server_chooses_neither_where_a_package_is_unpacked_nor_what_runs_from_there(
    column: str, lie: str, federation: Federation
) -> None:
    """Its database has, from the first message on, a text that leads from the folder of each site to code of the server's own.

    Flower 1.42 refuses such an id at each site.
    """
    refused = column == "fab_id" and not of_1_25()
    server = ServerFolder.read(federation.kit / "server")
    package, escaped = Package(build(server)), federation.kit.parent / "escaped"
    for name in names_of(package):
        zipfile.ZipFile(io.BytesIO(package.content)).extractall(escaped / name)
        with (escaped / name / "fl_bn/__init__.py").open("a") as file:
            file.write(LINE.format("escaped"))
    before = sorted(escaped.rglob("*"))
    database = sqlite3.connect(server.state / "superlink.db", timeout=60, isolation_level=None)
    action = f"UPDATE run SET {column} = '{lie}' WHERE run_id = NEW.run_id"
    database.execute(f"CREATE TRIGGER lie AFTER INSERT ON message_ins BEGIN {action}; END")
    try:
        log = ended(federation.submit({**SMALL, "method": "fedavg", "rounds": 1, "name": f"escaped-{column}"}), code=int(refused))
    finally:
        database.execute("DROP TRIGGER lie")
    assert database.execute(f"SELECT count(*) FROM run WHERE {column} = '{lie}'").fetchall() == [(1,)]
    assert "3/3 clients" in log or all(f"site {site} is refused: ValueError: Invalid FAB ID" in log for site in "abc")
    assert ran(federation, "escaped") == []
    assert sorted(escaped.rglob("*")) == before
    assert refused or codes(federation, f"escaped-{column}") == {(site, "submitter", package.code) for site in federation.sites}


def test_what_the_code_of_a_removed_submitter_has_left_is_not_run(federation: Federation, tmp_path: Path) -> None:
    """It has changed all packages that it found, and made folders, at site b a link, with the names that the next one could have."""
    package, own = Package(build(ServerFolder.read(federation.kit / "server"))), tmp_path / "own"
    own.mkdir()
    (own / "planting.py").write_text(PLANTING.format(names=names_of(package), line=LINE.format("left")))
    mallory = write_submitter_key(tmp_path / "mallory", "mallory")
    policies = [SiteFolder.read(federation.kit / f"sites/{site}").policy for site in federation.sites]
    for policy in policies:
        trust(SiteFolder.read(policy.parent), mallory)
    config = {**SMALL, "method": "fedavg", "rounds": 1}
    key = str(tmp_path / "mallory/submitter.key")
    planting = {**config, "name": "planting", "model": "planting:build"}
    assert "3/3 clients" in ended(federation.submit(planting, "--app", str(own), "--key", key))
    ((_, _, code),) = {(0, 0, of[2]) for of in codes(federation, "planting") if of[1] == "mallory"}
    packages = [federation.kit / f"sites/{site}/packages" for site in federation.sites]
    assert all((folder / name).exists() for folder in packages for name in names_of(package)), "control: it was run at each site"

    for policy in policies:
        (policy.parent / "submitters/mallory.pub").unlink()
    assert "3/3 clients" in federation.run({**config, "name": "afterwards"})
    assert ran(federation, "left") == []
    assert not [path for folder in packages for path in folder.rglob(f"*{code[:8]}*")], "nothing of a name that is not trusted stays"
    assert codes(federation, "afterwards") == {(site, "submitter", package.code) for site in federation.sites}


# What people submit


def test_an_own_app_exchanges_over_tls_and_its_run_ends_where_too_few_sites_let_it_in(federation: Federation, own_app: Path) -> None:
    """FedTAN's clients exchange vectors with the server layer by layer."""
    server, client = own_app / "myapp/server_app.py", own_app / "myapp/client_app.py"
    server.write_text(server.read_text().replace("import FBN", "import FedTAN").replace("FBN(Net())", "FedTAN(Net())"))
    client.write_text(client.read_text().replace("fbn", "fedtan"))
    out = ended(federation.submit("num-server-rounds=1 local-epochs=1 name='own'", "--app", str(own_app)))
    assert f"exchange: listening on 127.0.0.1:{federation.exchange} (TLS)" in out
    assert ("3/3 clients" in out, "goes on with replay" in out) == (True, False), out
    run = next(run for run in json.loads(federation.command("status", "--json"))["runs"] if run["name"] == "own")
    assert (run["round"], run["rounds"], run["accepted"], run["note"]) == (1, 1, 3, "")
    assert (run["loss"] is not None, 0 <= run["value"] <= 1) == (True, True)
    sent = [line.values for line in lines_in(log_of(federation, "a"))]
    assert any(line and line["message"] == "exchange" and line["name"] == "own" for line in sent), "vectors went over the exchange"

    policies = [SiteFolder.read(federation.kit / "sites" / site).policy for site in "bc"]
    before = policies[0].read_text()
    for policy in policies:
        policy.write_text('allow-code = "installed"\n')
    try:
        out = ended(federation.submit("num-server-rounds=1 name='refused'", "--app", str(own_app)), 1)
    finally:
        for policy in policies:
            policy.write_text(before)
    assert "site b is refused: its policy refuses the run: this site's policy has allow-code = installed" in out
    (line,) = json.loads(federation.command("audit", "--run", "refused", "--json", part="sites/b"))["refused"]
    assert (line["message"], line["decision"], "allow-code = installed" in line["reason"]) == ("query.hello", "refused", True)


def test_a_run_that_was_signed_elsewhere_is_watched_and_ended_and_not_changed(federation: Federation, tmp_path: Path) -> None:
    """By a key with a passphrase. And no other run gets its name."""
    key, file, own = tmp_path / "alice.key", tmp_path / "run", federation.kit / "submitters/submitter/submitter.key"
    subprocess.run(["openssl", "pkey", "-aes256", "-passout", "pass:two words", "-in", str(own), "-out", str(key)], check=True)
    small = {name: value for name, value in SMALL.items() if name != "clients"}  # which the server fills in
    config = flower_config({**small, "method": "fedavg", "rounds": 200, "checkpoint-every": 1, "name": "mine"})
    words = ["--run-config", config, "--sign-only", str(file), "--key", str(key)]
    for typed, code in (("another", 2), ("two words", 0)):
        argv = [*FL_BN, "submit", str(federation.kit / "server"), *words]
        done = subprocess.run(
            argv, cwd=Path(__file__).parents[2], input=f"{typed}\n", text=True, capture_output=True, start_new_session=True, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
    process = federation.submit("", "--signed", str(file))
    wait_until("round 1", lambda: rounds_of(federation, "mine") >= 1, 300)
    shown = federation.command("status")
    assert [word for word in ("mine", "running", "/200", "3/3", "online") if word not in shown] == [], shown
    assert "another run here is called mine" in federation.command("submit", "--signed", str(file), code=2)
    assert "mine is stopped; resume it from its checkpoint after round" in federation.command("abort", "mine")
    ended(process, 1)
    assert "mine had ended already: stopped" in federation.command("abort", "mine")
    federation.command("abort", "nobody", code=2)
    stored = federation.result("mine") / "config.toml"
    stored.write_text(stored.read_text().replace("a,b,c", "a,b,gone"))
    assert "gone" in federation.command("resume", "mine", code=2), "a site that is no longer there"

    content = json.loads(file.read_text())
    content["config"] |= {"rounds": 1, "name": "changed"}
    file.write_text(json.dumps(content))
    assert "is for another package or run config" in ended(federation.submit("", "--signed", str(file)), 1)


@contextmanager
def supernode(federation: Federation, folder: Path, port: int, *options: str, isolation: str = "process") -> Iterator[Callable[[], bool]]:
    """Run Flower's SuperNode as a stranger could. Yield a function that tells whether the server has let it in."""
    folder.mkdir()
    place = ("--clientappio-api-address", f"127.0.0.1:{port}") if of_1_25() else ("--host", "127.0.0.1", "--port", str(port))
    argv = [program("flower-supernode"), "--superlink", f"127.0.0.1:{federation.fleet}", "--isolation", isolation, *place, *options]
    told = environment({"FLWR_HOME": str(folder), "FLWR_TELEMETRY_ENABLED": "0", "PYTHONUNBUFFERED": "1"})
    output = folder / "out.txt"
    with output.open("wb") as target:
        process = subprocess.Popen(argv, stdout=target, stderr=target, start_new_session=True, env=told)
        try:
            yield lambda: "SuperNode ID" in output.read_text(errors="replace")
        finally:
            farewell(process)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it had started


def test_strangers_are_not_let_in(federation: Federation, tmp_path: Path) -> None:
    """The control is the next test."""
    authority = ("--root-certificates", str(federation.kit / "sites/a/ca.crt"))
    write_site_key(tmp_path / "stranger.key", tmp_path / "stranger.pub", "stranger")
    create(KitPlan("127.0.0.1", ["a"]), tmp_path / "other")
    own_key = ("--auth-supernode-private-key", str(federation.kit / "sites/a/site.key"))
    stranger = ("--auth-supernode-private-key", str(tmp_path / "stranger.key"))
    other = ("--root-certificates", str(tmp_path / "other/authority/ca.crt"))
    cases = {"no key": authority, "unregistered key": (*authority, *stranger), "other CA": (*other, *own_key), "plaintext": ("--insecure",)}
    with ExitStack() as stack:
        ports = free_ports(len(cases))
        tried = {
            name: stack.enter_context(supernode(federation, tmp_path / name, port, *options))
            for (name, options), port in zip(cases.items(), ports, strict=True)
        }
        time.sleep(WAIT)
        assert [name for name, let_in in tried.items() if let_in()] == []


def test_a_site_that_claims_another_s_place_is_refused_by_its_key(federation: Federation, tmp_path: Path) -> None:
    """Site b calls itself client 0, which is site a."""
    config = {**SMALL, "method": "fedavg", "rounds": 1, "evaluate-every": 1, "clients-at-start": 1, "name": "claims"}
    federation.stop("sites/b")
    folder = federation.kit / "sites/b"
    key = ("--auth-supernode-private-key", str(folder / "site.key"), "--root-certificates", str(folder / "ca.crt"))
    claim = (*free_ports(1), *key, "--node-config", "partition-id=0 num-partitions=3")
    with supernode(federation, tmp_path / "liar", *claim, isolation="subprocess") as let_in:  # type: ignore[arg-type]
        wait_until("site b is connected", let_in, 120)
        log = federation.run(config)
    federation.start_again("sites/b")
    assert "it calls itself site a, but its key belongs to site b: correct its partition-id" in log
    assert "2/2 clients" in log


def test_ports_of_the_server_s_own_machine_are_closed_to_others_and_none_speaks_plaintext(federation: Federation) -> None:
    """127.0.0.2 is this machine, too, but an address that only a program which listens on all of them answers."""
    assert (federation.kit / "server/state").stat().st_mode & 0o777 == 0o700
    for port in (federation.control, federation.runtime):
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)
    for port in (federation.control, federation.fleet):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
            plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            plain.settimeout(10)
            with suppress(ConnectionError):
                assert plain.recv(9)[:3] in (b"", b"\x15\x03\x01", b"\x15\x03\x03"), "nothing, or an alert of TLS"


def test_a_run_goes_on_after_the_server_s_death(federation: Federation, tmp_path: Path) -> None:
    config = {**SMALL, "method": "fedavg", "checkpoint-every": 1, "name": "died"}
    submitted = federation.submit(config)
    try:
        checkpoints = federation.result("died") / "checkpoints"  # written after the lines of the round
        wait_until("a checkpoint", lambda: list(checkpoints.glob("round-*")), 600)
        federation.stop("server", signal.SIGKILL)
    finally:
        submitted.kill()
        submitted.communicate()
    federation.start("server")
    wait_until("the server is back", federation.online, 180)
    assert "going on after round " in federation.command("resume", timeout=1200)
    reference = in_process({**config, "name": "reference"}, tmp_path / "reference")
    assert differing(federation.result("died") / "model.safetensors", reference / "model.safetensors") == []
