"""A server's daily work on real processes: runs beside each other, ended, and gone on with; who refuses whom; what a status says."""

from __future__ import annotations

import csv
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fl_bn_site.status import RunStatus
from tests.deployment.federation import FL_BN, ROOT, SMALL, Federation, differing, in_process, wait_until
from tests.deployment.inner import ServerFolder, status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
RUN: dict[str, Any] = {**SMALL, "method": "fedavg", "rounds": 3, "evaluate-every": 3, "retry-timeout": 20.0, "checkpoint-every": 1}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("federation"), ("east", "west", "north")) as running:
        running.start_all()
        yield running


def server(federation: Federation) -> ServerFolder:
    return ServerFolder.read(federation.kit / "server")


def command(*words: str, timeout: float = 900.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FL_BN, *words], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


def runs(federation: Federation, *states: str) -> list[RunStatus]:
    return [run for run in status(server(federation)).runs if run.status in states]


def rounds_done(federation: Federation, name: str) -> int:
    file = federation.result(name) / "rounds.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def typed(line: str) -> list[str]:
    """The command that a message tells to type."""
    found = re.search(r"fl-bn (resume .*)", line)
    assert found, line
    return shlex.split(found[1])


@pytest.mark.nightly
def test_two_submits_at_once_an_abort_and_a_resume(federation: Federation, tmp_path: Path) -> None:
    run = {**RUN, "rounds": 8, "evaluate-every": 8}  # so many that the first is not over when it is aborted
    submits = {name: federation.submit({**run, "name": name}) for name in ("one", "two")}
    second, first = wait_until("both go on", lambda: len(both := runs(federation, "running")) == 2 and both, 240)
    assert {first.name, second.name} == {"one", "two"}
    assert {first.submitter, second.submitter} == {"submitter"}
    wait_until("round 1", lambda: rounds_done(federation, first.name), 300)
    seen = json.loads(command("status", str(federation.kit / "server"), "--json").stdout)
    assert [(site["name"], site["state"]) for site in seen["sites"]] == [(site, "online") for site in ("east", "west", "north")]
    assert [run["name"] for run in seen["runs"]] == [second.name, first.name]
    going = seen["runs"][1]
    assert going["round"] >= 1
    assert min(going["sent"], going["received"], seen["expires"]) > 0
    said = command("abort", str(federation.kit / "server"), first.name).stdout
    assert said.startswith(f"{first.name} is stopped; resume it from round ")
    out, _ = submits[first.name].communicate(timeout=120)
    assert submits[first.name].returncode == 1
    assert typed(out.splitlines()[-1]) == typed(said) == ["resume", str(federation.kit / "server"), first.name]
    out, _ = submits[second.name].communicate(timeout=900)
    assert submits[second.name].returncode == 0, out
    assert "for sites east,west,north" in out
    resumed = command(*typed(said))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    reference = in_process({**run, "name": "reference"}, tmp_path / "reference")
    for name in ("one", "two"):
        assert differing(federation.result(name) / "model.safetensors", reference / "model.safetensors") == []
    with (federation.result(first.name) / "clients.csv").open(newline="") as file:
        assert [row["site"] for row in csv.DictReader(file)] == ["east", "west", "north"] * run["rounds"]


def test_a_run_goes_on_after_the_server_s_death(federation: Federation, tmp_path: Path) -> None:
    submitted = federation.submit({**RUN, "name": "died"})
    try:
        checkpoints = federation.result("died") / "checkpoints"  # written after the lines of the round
        wait_until("a checkpoint", lambda: list(checkpoints.glob("round-*")), 600)
        federation.stop("server", signal.SIGKILL)
    finally:
        submitted.kill()
        submitted.communicate()
    federation.start("server")
    wait_until("the server is back", lambda: command("status", str(federation.kit / "server")).returncode == 0, 120)
    done = command("resume", str(federation.kit / "server"), timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on after round " in done.stdout
    reference = in_process({**RUN, "name": "reference"}, tmp_path / "reference")
    assert differing(federation.result("died") / "model.safetensors", reference / "model.safetensors") == []


@pytest.mark.nightly
def test_a_site_that_comes_back_with_an_old_version_is_refused_by_name(federation: Federation, tmp_path: Path) -> None:
    old = tmp_path / "fl_bn-0.0.9.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: fl-bn\nVersion: 0.0.9\n")
    federation.stop("sites/west")
    before = federation.log("sites/west", "supernode").count("SuperNode ID")
    usual = federation.environment["sites/west"]
    federation.environment["sites/west"] = {**usual, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    assert subprocess.run(
        [sys.executable, "-c", "from fl_bn.flower.wire.messages import here; print(here())"],
        cwd=tmp_path,  # not where an editable install left its metadata
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, capture_output=True, text=True, check=True,
    ).stdout.strip() == "0.0.9"  # fmt: skip
    federation.start("sites/west")
    wait_until("west is back", lambda: federation.log("sites/west", "supernode").count("SuperNode ID") > before, 240)
    refused = federation.submit({**RUN, "rounds": 1, "name": "versions"})
    out, _ = refused.communicate(timeout=600)
    assert refused.returncode == 1
    assert "site west refused: " in out
    assert re.search(r"this site has fl-bn 0\.0\.9, and the server \d", out), out
    federation.stop("sites/west")
    federation.environment["sites/west"] = usual
    federation.start("sites/west")
