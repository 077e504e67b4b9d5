"""What a run gets from the server's folder when it is submitted: sites, a name, a port; and what keeps it from starting."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_bn_site.launch import NameTaken
from tests.deployment.inner import (
    ControlError,
    Package,
    ServerFolder,
    Submitted,
    app,
    launch,
    list_runs,
    submit,
)
from tests.deployment.superlink import THEN, named

PACKAGE = Package(b"a package")


def launched(server: ServerFolder, superlink: Any, name: str, rename: bool = True) -> str:
    return launch(server, named(name), superlink, PACKAGE, rename)[0]


def test_a_run_has_its_sites_and_what_the_folder_says(server: ServerFolder, superlink: Any) -> None:
    assert launch(server, named("one"), superlink, PACKAGE, True) == ("one", "1")
    sent = superlink.known[0].config
    assert (sent["clients"], sent["client-nodes"], sent["client-names"], sent["checkpoint-every"]) == (2, "197,198", "a,b", 5)
    superlink.unknown = {superlink_key(server)}
    with pytest.raises(ControlError, match="does not know the key"):
        launched(server, superlink, "two")
    superlink.unknown, superlink.away = set(), True
    with pytest.raises(ControlError, match="away"):
        launched(server, superlink, "two")


def superlink_key(server: ServerFolder) -> bytes:
    from fl_bn_site.control import key_of

    return key_of(server.public_key("b"))


def test_runs_beside_each_other_are_no_more_than_ports(server: ServerFolder, superlink: Any) -> None:
    for name in ("one", "two", "three", "four"):
        launched(server, superlink, name)
    with pytest.raises(ControlError, match="all ports of the exchange"):
        launched(server, superlink, "five")
    superlink.end(2)
    launched(server, superlink, "five")


def test_names_are_not_given_twice(server: ServerFolder, superlink: Any) -> None:
    (server.results / "old").mkdir(parents=True)
    assert [launched(server, superlink, name) for name in ("x", "x", "old")] == ["x", "x-2", "old-2"]
    superlink.end(1)
    assert launched(server, superlink, "x") == "x-3"
    with pytest.raises(NameTaken, match="fl-bn resume"):
        launched(server, superlink, "old", rename=False)
    with pytest.raises(NameTaken, match="still going on"):
        launch(server, {"resume": "x-2", "rounds": 1}, superlink, PACKAGE, False)


def test_a_full_disk_is_said_before_anything_is_submitted(server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SuperLink whose disk is full says only that it could not start the run."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=5 << 20))
    shown = CliRunner().invoke(app, ["submit", str(server.path), "--run-config", "rounds=1"])
    assert shown.exit_code == 1
    assert "5 MiB are free on the disk of" in shown.output
    assert superlink.known == []


def test_submit_says_for_whom_and_what_ends_it(server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    superlink.known = [Submitted(1, "running", {"name": "other"}, THEN, None)]
    said: list[str] = []
    assert submit(server, "name='mine' rounds=1", say=said.append)
    assert any("as mine, for sites a, b" in line for line in said)
    assert [(run.name, run.state, run.submitter) for run in list_runs(server)] == [
        ("mine", "completed", "submitter"),
        ("other", "running", ""),
    ]

    def interrupted(run: str, after: float) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(superlink, "log", interrupted)
    with pytest.raises(KeyboardInterrupt):
        submit(server, "name='later' rounds=1", say=said.append)
    assert said[-1] == f"  fl-bn abort {server.path} later"
