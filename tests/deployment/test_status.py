"""``fl-bn status``: sites by name, and how far runs are; a real SuperLink is asked in ``test_federation``."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from typer.testing import CliRunner

from fl_bn_site.control import Control
from fl_bn_site.registered import Node
from tests.deployment.inner import KitPlan, ServerFolder, Submitted, app, create, status

SEEN = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerFolder:
    create(KitPlan("127.0.0.1", ["north", "south", "east"]), tmp_path / "kit")
    folder = ServerFolder.read(tmp_path / "kit/server")

    def pem(site: str) -> bytes:
        return load_ssh_public_key(folder.public_key(site).read_bytes()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    nodes = [Node(11, pem("south"), False, SEEN), Node(12, pem("north"), True, SEEN)]
    config = {"name": "first", "rounds": 10, "output": str(folder.results), "client-nodes": "12,11"}
    runs = [Submitted(5, "running", config, SEEN, None), Submitted(4, "finished:failed", {"name": "old"}, SEEN, SEEN)]
    monkeypatch.setattr(Control, "all_nodes", lambda self: nodes)
    monkeypatch.setattr(Control, "runs", lambda self: runs)
    return folder


def write_rounds(folder: Path, rounds: int, **last: Any) -> None:
    folder.mkdir(parents=True)
    usual = {"seconds": 2.0, "accepted": 2, "cohort": 2, "loss": 1.5, "accuracy": None, "clients": []}
    rows: list[dict[str, Any]] = [{"round": n, **usual} for n in range(1, rounds + 1)]
    rows[-1] |= last
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rounds.jsonl").write_text(text + '{"round": 99, "sec')  # being written


def test_sites_have_their_names_and_runs_their_round(server: ServerFolder) -> None:
    refused = [{"client": 0, "refused": ""}, {"client": 1, "refused": "loss is nan"}]
    write_rounds(server.results / "first", 4, accepted=1, accuracy=0.5, clients=refused)
    found = status(server)
    assert [(site.name, site.node, site.state) for site in found.sites] == [
        ("north", 12, "online"),
        ("south", 11, "offline"),
        ("east", None, "not registered"),
    ]
    running, old = found.runs
    assert (running.name, running.status, running.round, running.rounds) == ("first", "running", 4, 10)
    assert (running.accepted, running.cohort, running.metric, running.value, running.left) == (1, 2, "accuracy", 0.5, 12.0)
    assert running.refused == {"south": "loss is nan"}
    assert (old.name, old.status, old.round, old.left) == ("old", "finished:failed", 0, None)
    assert found.expires in (89, 90)
    assert json.loads(found.to_json())["sites"][0]["name"] == "north"


@pytest.mark.parametrize("columns", [80, 0])
def test_no_width_cuts_a_name_or_a_state(server: ServerFolder, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """0: a pipe, which has no width."""
    name = "20261122-235100-fedbn-digits-seed0-resumed"
    write_rounds(server.results / name, 4, accuracy=0.5)
    config = {"name": name, "rounds": 10, "output": str(server.results), "client-nodes": "12,11"}
    monkeypatch.setattr(Control, "runs", lambda self: [Submitted(5, "finished:completed", config, SEEN, SEEN)])
    environment = {"COLUMNS": str(columns)} if columns else {"COLUMNS": None}
    output = CliRunner().invoke(app, ["status", str(server.path)], env=environment).output
    assert ("\N{HORIZONTAL ELLIPSIS}" in output, "completed" in output) == (False, True)
    if columns:
        assert max(map(len, output.splitlines())) <= columns
        rows = output[output.index("status") :].splitlines()[1:]
        assert name in "".join(row.split()[0] for row in rows if row.strip())
    else:
        assert name in output
