"""Real processes on loopback, TLS, authenticated nodes: the same model as in one process, and strangers stay out."""

from __future__ import annotations

import io
import os
import signal
import sqlite3
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from fl_bn.exchange.call import ExchangeFailed
from fl_bn_site.submitters import trust
from tests.deployment.federation import SMALL, Federation, check_bits, differing, farewell, free_ports, in_process, wait_until
from tests.deployment.inner import (
    GrpcExchange,
    KitPlan,
    Package,
    ServerFolder,
    SiteFolder,
    build,
    create,
    environment,
    lines_in,
    status,
    write_site_key,
    write_submitter_key,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
WAIT = 45.0  # seconds for a node to be refused
LINE = '\nimport os, pathlib\nif "sites" in os.environ["FLWR_HOME"]: pathlib.Path(os.environ["FLWR_HOME"], "..", {!r}).resolve().touch()\n'
PLANTING = """
import os, pathlib, py_compile, shutil
from torch import nn

def build(classes, channels, image_size):
    here = pathlib.Path(__file__).parent
    if "sites" in here.parts:
        for name in {names!r}:
            if not (here.parent / name).exists():
                shutil.copytree(here, here.parent / name)
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


RUNS: dict[str, dict[str, Any]] = {  # test_audit_totals.py has others
    "fedbn, secure": {"method": "fedbn", "secure-aggregation": True},
    "fedbn, scaffold": {"method": "fedbn", "objective": "scaffold", "momentum": 0.0, "server-optimizer": "fedyogi", "unseen-client": True},
}


@pytest.mark.nightly
@pytest.mark.parametrize("run", RUNS)
def test_a_deployed_run_ends_with_the_bits_of_one_in_process(run: str, federation: Federation, tmp_path: Path) -> None:
    config: dict[str, Any] = {**SMALL, **RUNS[run], "name": run.replace(", ", "-")}
    check_bits(federation, config, federation.run(config), tmp_path)


@pytest.mark.nightly
def test_a_site_s_policy_bounds_its_evaluations(federation: Federation) -> None:
    """In each process of a message anew: what is spent is in the site's state."""
    policy = federation.kit / "sites/a/policy.toml"
    before = policy.read_text() if policy.exists() else ""
    policy.write_text("max-evaluations = 1\n")
    try:
        log = federation.run({**SMALL, "method": "fedbn", "evaluate-every": 1, "name": "budget"})
    finally:
        policy.write_text(before)
    assert log.count("did not evaluate") == 1, log
    assert "this site has answered the 1 evaluations that it allows in a run (max-evaluations)" in said(log, "did not evaluate")
    assert log.count("3/3 clients") == SMALL["rounds"]
    (counted,) = (federation.kit / "sites/a/state/evaluations").iterdir()
    assert counted.read_text() == "1\n"


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


def test_the_server_chooses_neither_where_a_package_is_unpacked_nor_what_runs_from_there(federation: Federation) -> None:
    """Its database names a version that leads from the folder of each site to code of the server's own."""
    server = ServerFolder.read(federation.kit / "server")
    package, escaped = Package(build(server)), federation.kit.parent / "escaped"
    for name in names_of(package):
        zipfile.ZipFile(io.BytesIO(package.content)).extractall(escaped / name)
        with (escaped / name / "fl_bn/__init__.py").open("a") as file:
            file.write(LINE.format("escaped"))
    before = sorted(escaped.rglob("*"))
    lie = "UPDATE run SET fab_version = 'x/../../../../../../../escaped/fl-bn.fl-bn.0.1.0' WHERE run_id = NEW.run_id"
    database = sqlite3.connect(server.state / "superlink.db", timeout=60, isolation_level=None)
    database.execute(f"CREATE TRIGGER lie AFTER INSERT ON run BEGIN {lie}; END")
    try:
        log = federation.run({**SMALL, "method": "fedavg", "rounds": 1, "name": "escaped"})
    finally:
        database.execute("DROP TRIGGER lie")
    assert database.execute("SELECT count(*) FROM run WHERE fab_version LIKE 'x/..%'").fetchall() == [(1,)]
    assert "3/3 clients" in log
    assert ran(federation, "escaped") == []
    assert sorted(escaped.rglob("*")) == before
    assert codes(federation, "escaped") == {(site, "submitter", package.code) for site in federation.sites}


def test_what_the_code_of_a_removed_submitter_has_left_is_not_run(federation: Federation, tmp_path: Path) -> None:
    """It has changed all packages that it found, and made folders with the names that the next one could have."""
    package, own = Package(build(ServerFolder.read(federation.kit / "server"))), tmp_path / "own"
    own.mkdir()
    (own / "planting.py").write_text(PLANTING.format(names=names_of(package), line=LINE.format("left")))
    mallory = write_submitter_key(tmp_path / "mallory", "mallory")
    policies = [SiteFolder.read(federation.kit / f"sites/{site}").policy for site in federation.sites]
    for policy in policies:
        trust(SiteFolder.read(policy.parent), mallory)
    config = {**SMALL, "method": "fedavg", "rounds": 1}
    process = federation.submit(
        {**config, "name": "planting", "model": "planting:build"}, "--app", str(own), "--key", str(tmp_path / "mallory/submitter.key")
    )
    out, _ = process.communicate(timeout=600)
    assert "3/3 clients" in out
    ((_, _, code),) = {(0, 0, of[2]) for of in codes(federation, "planting") if of[1] == "mallory"}
    packages = [federation.kit / f"sites/{site}/packages" for site in federation.sites]
    assert all((folder / name).exists() for folder in packages for name in names_of(package)), "control: it was run at each site"

    for policy in policies:
        (policy.parent / "submitters/mallory.pub").unlink()
    assert "3/3 clients" in federation.run({**config, "name": "afterwards"})
    assert ran(federation, "left") == []
    assert not [path for folder in packages for path in folder.rglob(f"*{code[:8]}*")], "nothing of a name that is not trusted stays"
    assert codes(federation, "afterwards") == {(site, "submitter", package.code) for site in federation.sites}


# Strangers


def supernode(
    federation: Federation, folder: Path, *options: str, isolation: str = "process", over: Event | None = None, port: int = 0
) -> tuple[int | None, str]:
    """A node of one's own: its exit code (None: it still ran when it was ended, after 45 s or when it was ``over``), and what it said."""
    argv = ["flower-supernode", "--superlink", f"127.0.0.1:{federation.fleet}", "--max-retries", "2", "--isolation", isolation]
    folder.mkdir(exist_ok=True)
    output = folder / "out.txt"
    with output.open("wb") as target:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name(argv[0])),
                *argv[1:],
                "--clientappio-api-address",
                f"127.0.0.1:{port or free_ports(1)[0]}",
                *options,
            ],
            stdout=target,
            stderr=target,
            start_new_session=True,
            env=environment({"FLWR_HOME": str(folder), "FLWR_TELEMETRY_ENABLED": "0", "PYTHONUNBUFFERED": "1"}),
        )
        try:
            if over is not None:
                over.wait()
            code: int | None = process.wait(WAIT if over is None else 0)
        except subprocess.TimeoutExpired:
            code = None
            farewell(process)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it had started
    return code, output.read_text(errors="replace")


def said_in(file: Path, words: str) -> bool:
    return file.exists() and words in file.read_text(errors="replace")


def said(text: str, *words: str) -> str:
    """The line with one of ``words``."""
    lines = [line.strip() for line in text.splitlines() if any(word in line for word in words)]
    assert lines, f"none of {words} in:\n{text}"
    return lines[0]


def test_strangers_are_refused(federation: Federation, tmp_path: Path) -> None:
    authority = ("--root-certificates", str(federation.kit / "sites/a/ca.crt"))
    write_site_key(tmp_path / "stranger.key", tmp_path / "stranger.pub", "stranger")
    create(KitPlan("127.0.0.1", ["a"]), tmp_path / "other")
    own_key = ("--auth-supernode-private-key", str(federation.kit / "sites/a/site.key"))
    stranger = ("--auth-supernode-private-key", str(tmp_path / "stranger.key"))
    other = ("--root-certificates", str(tmp_path / "other/authority/ca.crt"))
    cases = {
        "without a key": (authority, ("public key", "UNAUTHENTICATED", "authentication")),
        "with an unregistered key": ((*authority, *stranger), ("public key", "UNAUTHENTICATED")),
        "that trusts another CA": ((*other, *own_key), ("CERTIFICATE_VERIFY_FAILED", "certificate")),
        "in plaintext": (("--insecure",), ("details =",)),
    }
    with ThreadPoolExecutor(len(cases)) as pool:  # they mostly wait
        tried = {
            name: pool.submit(supernode, federation, tmp_path / name.replace(" ", "-"), *options, port=port)
            for (name, (options, _)), port in zip(cases.items(), free_ports(len(cases)), strict=True)
        }
    for name, (_, words) in cases.items():
        code, out = tried[name].result()
        print(f"node {name}: exit code {code}: {said(out, *words)}")
        assert "SuperNode ID" not in out
        assert code != 0


def test_a_site_that_claims_another_s_place_is_refused_by_its_key(federation: Federation) -> None:
    """Site b calls itself client 0, which is site a."""
    config = {**SMALL, "method": "fedavg", "rounds": 1, "evaluate-every": 1, "clients-at-start": 1}
    federation.stop("sites/b")
    folder = federation.kit / "sites/b"
    key = ("--auth-supernode-private-key", str(folder / "site.key"))
    claim = ("--root-certificates", str(folder / "ca.crt"), "--node-config", "partition-id=0 num-partitions=3")
    with ThreadPoolExecutor(1) as pool:
        over = Event()
        liar = pool.submit(supernode, federation, folder / "liar", *key, *claim, isolation="subprocess", over=over)
        try:
            wait_until("site b is connected", lambda: said_in(folder / "liar/out.txt", "SuperNode ID"), 80)
            log = federation.run({**config, "name": "claims"})
        finally:
            over.set()
            liar.result()
            before = federation.log("sites/b", "supernode").count("SuperNode ID")
            federation.start("sites/b")
    wait_until("site b is back", lambda: federation.log("sites/b", "supernode").count("SuperNode ID") > before, 180)
    assert "it calls itself site a, but its key belongs to site b: correct its partition-id" in log
    assert "2/2 clients" in log


@pytest.mark.nightly
def test_sites_come_and_go_while_the_others_stay(federation: Federation) -> None:
    """A fourth site comes while a run goes on; the next run has it; then it is removed in the midst of a run, and gets nothing more."""
    config: dict[str, Any] = {**SMALL, "method": "fedavg", "evaluate-every": 2, "retry-timeout": 5.0}
    pids = {site: wait_until(f"site {site} runs", partial(federation.find, "supernode", site)) for site in ("a", "b", "c")}
    process = federation.submit({**config, "name": "three", "rounds": 4})
    wait_until("round 1", lambda: (federation.result("three") / "rounds.jsonl").exists(), 180)
    federation.add_site("d")
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    assert out.count("3/3 clients") == 4

    process = federation.submit({**config, "name": "four", "rounds": 6, "clients": 4})
    try:
        rounds = federation.result("four") / "rounds.jsonl"
        wait_until("round 2", lambda: rounds.exists() and rounds.read_bytes().count(b"\n") >= 2, 240)
        found = status(ServerFolder.read(federation.kit / "server"))
        assert {site.name: site.state for site in found.sites} == dict.fromkeys("abcd", "online")
        (running,) = (run for run in found.runs if not run.status.startswith("finished"))
        assert (running.name, running.status, running.rounds) == ("four", "running", 6)
        assert running.round >= 2
        said = federation.membership("remove-site", "d")
        assert "d: shut out: no site of server.toml has this key" in said
        seen = federation.log("sites/d", "supernode").count("Receiving: train message")
    finally:
        out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    assert "4/4 clients" in out
    assert "3/3 clients" in out
    time.sleep(5)
    assert federation.log("sites/d", "supernode").count("Receiving: train message") <= seen + 1  # one may have been on its way
    assert "d: registered" not in federation.membership("remove-site", "nobody", code=2)
    federation.stop("sites/d")
    assert {site: federation.find("supernode", site) for site in pids} == pids  # none of the others started again


def test_a_join_without_token_is_refused_and_harms_nobody(federation: Federation, tmp_path: Path) -> None:
    config: dict[str, Any] = {**SMALL, "method": "fedtan", "name": "strangers", "rounds": 2}
    before = federation.log("server", "serverapp").count("exchange: listening")
    process = federation.submit(config)
    try:
        wait_until("the exchange", lambda: federation.log("server", "serverapp").count("exchange: listening") > before, 180)
        ca = (federation.kit / "server/ca.crt").read_bytes()
        for token in ("", "0" * 32):
            with pytest.raises(ExchangeFailed) as refused:
                GrpcExchange(f"127.0.0.1:{federation.exchange}", token, 4, ca, 20.0, 20.0)
            print(f"join with token {token!r}: {refused.value}")
        time.sleep(1)
        out, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, out
    print(said(federation.log("server", "serverapp"), "refused"))
    reference = in_process(config, tmp_path / "reference")
    assert differing(federation.result("strangers") / "model.safetensors", reference / "model.safetensors") == []
