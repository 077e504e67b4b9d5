"""Runs of a Flower app of one's own on real processes: their rounds, their exchange, a site that refuses, and an early end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deployment.federation import FL_BN, ROOT, Federation, wait_until
from tests.deployment.inner import ServerFolder, SiteFolder, lines_in, status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
AGAIN = "a run of a Flower app of your own is not resumed by fl-bn after an early end, so submit it again"
OTHER_SERVER = """
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from .task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    FedAvg().start(grid, ArrayRecord(Net().state_dict()), num_rounds=1)
"""
OTHER_CLIENT = """
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    return Message(RecordDict({"arrays": msg.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)
"""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("own"), ("east", "west")) as running:
        running.start_all()
        yield running


def with_fedtan(own_app: Path, settings: str = "") -> None:
    """Let the app train by FedTAN, whose clients exchange vectors with the server layer by layer."""
    server, client = own_app / "myapp/server_app.py", own_app / "myapp/client_app.py"
    made = f"FedTAN(Net(){settings})"
    text = server.read_text().replace("import FBN", "import FedTAN").replace("FBN(Net())", made)
    server.write_text(text.replace("from .task", "from fl_bn.exchange.settings import ExchangeSettings\n\nfrom .task"))
    client.write_text(client.read_text().replace("fbn", "fedtan"))


def submitting(federation: Federation, own_app: Path, rounds: int, *words: str) -> subprocess.Popen[str]:
    config = f"num-server-rounds={rounds} local-epochs=1 {' '.join(words)}"
    typed = [*FL_BN, "submit", str(federation.kit / "server"), "--app", str(own_app), "--run-config", config]
    return subprocess.Popen(typed, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def submitted(federation: Federation, own_app: Path, rounds: int, *words: str, code: int = 0) -> str:
    process = submitting(federation, own_app, rounds, *words)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == code, out
    return out


def asked(federation: Federation, *words: str, code: int = 0) -> str:
    typed = [*FL_BN, words[0], str(federation.kit / "server"), *words[1:]]
    done = subprocess.run(typed, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def state_of(federation: Federation, name: str) -> dict[str, Any]:
    runs = json.loads(asked(federation, "status", "--json"))["runs"]
    return next((dict(run) for run in runs if run["name"] == name), {"round": 0})  # it may not have begun


def rounds_of(federation: Federation, name: str) -> int:
    """Return how many rounds the run has done, without a process for the question. 0: it may not have begun."""
    found = status(ServerFolder.read(federation.kit / "server")).runs
    return next((run.round or 0 for run in found if run.name == name), 0)


def test_an_exchange_of_an_own_app_has_the_kit_s_address_and_tls(federation: Federation, own_app: Path) -> None:
    with_fedtan(own_app)
    out = submitted(federation, own_app, 1, "name='fedtan'")
    assert f"exchange: listening on 127.0.0.1:{federation.exchange} (TLS)" in out
    assert "plaintext" not in out
    assert "2/2 clients" in out
    assert "goes on with replay" not in out
    run = state_of(federation, "fedtan")
    assert (run["round"], run["rounds"], run["accepted"], run["note"]) == (1, 1, 2, "")
    assert run["loss"] is not None
    assert 0 <= run["value"] <= 1
    sent = [line.values for line in lines_in(SiteFolder.read(federation.kit / "sites/east").audit_log)]
    assert any(line and line["message"] == "exchange" and line["name"] == "fedtan" for line in sent), "vectors went over the exchange"


@pytest.mark.nightly
def test_an_app_that_does_not_tell_its_rounds_is_said_to(federation: Federation, own_app: Path) -> None:
    (own_app / "myapp/server_app.py").write_text(OTHER_SERVER)
    (own_app / "myapp/client_app.py").write_text(OTHER_CLIENT)
    submitted(federation, own_app, 1, "name='other'")
    run = state_of(federation, "other")
    assert (run["round"], run["rounds"]) == (None, 1)
    note = "its app has reported no rounds: only the strategies of fl_bn.flower report them"
    assert run["note"] == note
    shown = " ".join(asked(federation, "status").split())  # lines are as wide as the terminal
    assert "?/1" in shown
    assert f"other: {note}" in shown


def test_a_site_s_refusal_is_known_within_seconds_and_logged_there(federation: Federation, own_app: Path) -> None:
    site = SiteFolder.read(federation.kit / "sites/west")
    before = site.policy.read_text()
    site.policy.write_text('allow-code = "installed"\n')
    try:
        begin = time.monotonic()
        out = submitted(federation, own_app, 1, "name='refused'", code=1)
        seconds = time.monotonic() - begin
    finally:
        site.policy.write_text(before)
    print(f"told after {seconds:.1f} s")
    assert seconds < 60, "before: 130"
    assert "site west is refused: its policy refuses the run: this site's policy has allow-code = installed" in out
    assert "Its owner may change policy.toml" in out
    assert "lower min_available_nodes" in out
    (line,) = [line.values for line in lines_in(site.audit_log) if line.values and line.values["name"] == "refused"]
    assert (line["message"], line["decision"]) == ("query.hello", "refused")
    assert (line["tensors"], line["bytes"], line["sections"]) == (0, 0, {})
    assert "allow-code = installed" in line["reason"]
    assert len(line["code"]) == 64
    typed = [*FL_BN, "audit", str(site.path), "--run", "refused", "--json"]
    shown = subprocess.run(typed, cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    (told,) = json.loads(shown.stdout)["refused"]
    assert (told["decision"], told["reason"]) == ("refused", line["reason"])


@pytest.mark.nightly
def test_an_interrupted_run_ends_and_is_to_be_submitted_again(federation: Federation, own_app: Path) -> None:
    process = submitting(federation, own_app, 50, "name='killed'")
    wait_until("round 1", lambda: rounds_of(federation, "killed") >= 1, 300, 0.5)
    assert state_of(federation, "killed")["rounds"] == 50
    for pid in federation.find("serverapp"):
        os.kill(pid, signal.SIGKILL)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 1, out
    assert f"if it is interrupted: {AGAIN}" in out
    assert f"the output of `fl-bn start` says why it ended; {AGAIN}: fl-bn submit {federation.kit / 'server'} --app FOLDER" in out
    run = state_of(federation, "killed")
    assert run["status"] == "finished:failed"
    assert run["round"] >= 1
    assert "so submit it again" in run["note"]
    assert f"killed cannot be resumed: {AGAIN}" in asked(federation, "resume", "killed", code=2)
