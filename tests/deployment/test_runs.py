"""What a run gets from the server's folder when it is submitted, and what keeps it from starting; ``status``, ``abort`` and ``resume``."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from fl_bn.support.flower_config import PROGRESS
from fl_bn_site.launch import NameTaken
from tests.deployment.inner import (
    ConfigError,
    ControlError,
    FolderError,
    Package,
    RunConfig,
    Scalar,
    ServerFolder,
    Submitted,
    app,
    launch,
    resume,
    status,
    submit,
)
from tests.deployment.superlink import THEN

PACKAGE = Package(b"a package")


def named(name: str, **more: Scalar) -> dict[str, Scalar]:
    return {"name": name, "rounds": 1, **more}


def launched(server: ServerFolder, superlink: Any, name: str, rename: bool = True) -> str:
    return launch(server, named(name), superlink, PACKAGE, rename)[0]


def test_a_run_has_its_sites_and_what_the_folder_says(server: ServerFolder, superlink: Any) -> None:
    assert launch(server, named("one"), superlink, PACKAGE, True) == ("one", "1", "a,b")
    sent = superlink.known[0].config
    assert (sent["clients"], sent["client-nodes"], sent["client-names"], sent["checkpoint-every"]) == (2, "197,198", "a,b", 5)
    superlink.away = True
    with pytest.raises(ControlError, match="away"):
        launched(server, superlink, "two")
    superlink.away = False
    server.keys_file.unlink()
    with pytest.raises(ControlError, match="does not know the key of a"):
        launched(server, superlink, "two")


def test_a_site_that_is_offline_or_not_named_does_not_stop_the_others(server: ServerFolder, superlink: Any) -> None:
    superlink.offline = {"b"}
    said: list[str] = []
    for config, sites in (("min-sites=1", ""), ("wait-timeout=9.0", ""), ("rounds=1", "a")):
        assert submit(server, config, say=said.append, sites=sites)
    sent = [(run.config["clients"], run.config["client-names"], run.config["client-nodes"]) for run in superlink.known]
    assert sent == [(1, "a", "197"), (2, "a,b", "197,198"), (1, "a", "197")]
    for config, sites in (("min-sites=2", ""), ("rounds=1", ""), ("rounds=1", "b")):
        with pytest.raises(ControlError, match="offline: b"):
            submit(server, config, say=said.append, sites=sites)
    assert sum(line.startswith("site b is offline") for line in said) == 5
    assert len(superlink.known) == 3
    with pytest.raises(FolderError, match="no site c"):
        submit(server, "rounds=1", sites="a,c")


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
    assert any("as mine, for sites a,b" in line for line in said)
    assert said.count("a line") == 1
    found = [(run.name, run.status, run.submitter) for run in status(server).runs]
    assert found == [("mine", "finished:completed", "submitter"), ("other", "running", "")]

    def interrupted(run: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(superlink, "log", interrupted)
    with pytest.raises(KeyboardInterrupt):
        submit(server, "name='later' rounds=1", say=said.append)
    assert said[-1] == f"  fl-bn abort {server.path} later"


def interrupted_run(server: ServerFolder, superlink: Any) -> Path:
    """A folder as a run leaves it whose server died after round 4."""
    folder = server.results / "died"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints/round-000004.safetensors").write_bytes(b"")
    given = {"rounds": 9, "clients": 2, "client-nodes": "1,2", "client-names": "a,b", "checkpoint-every": 2, "method": "hbn"}
    config = RunConfig.from_mapping({**given, "name": "died", "output": str(server.results)})
    (folder / "config.toml").write_text(tomli_w.dumps(config.to_mapping()))
    (folder / "rounds.jsonl").write_text('{"round": 1, "seconds": 2}\n{"round": 2, "seconds": 2}\n')
    superlink.known = [Submitted(1, "finished:failed", {"name": "died"}, THEN, THEN + timedelta(seconds=7), THEN)]
    return folder


def test_resume_reads_the_stored_config_and_the_sites_as_they_are_now(server: ServerFolder, superlink: Any) -> None:
    folder = interrupted_run(server, superlink)
    for name in ("died", ""):
        assert resume(server, name, say=lambda line: None)
    sent = superlink.known[-1].config
    assert (sent["resume"], sent["rounds"], sent["method"], sent["client-nodes"], "name" in sent) == ("died", 9, "hbn", "197,198", False)
    stored = folder / "config.toml"
    stored.write_text(stored.read_text().replace("a,b", "a,gone"))
    with pytest.raises(FolderError, match="gone"):
        resume(server, "died")
    (folder / "checkpoints/round-000004.safetensors").unlink()
    for name in ("died", ""):
        with pytest.raises(ConfigError):
            resume(server, name)


def test_a_run_that_flower_counts_as_going_on_is_resumed_when_it_is_over(
    server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the minute after the server's death."""
    interrupted_run(server, superlink)
    superlink.known = [Submitted(1, "running", {"name": "died"}, THEN, None, THEN)]
    monkeypatch.setattr("fl_bn_site.submit.time.sleep", lambda seconds: superlink.end(1, "finished:failed"))
    said: list[str] = []
    assert resume(server, "died", say=said.append)
    assert said[0] == "died waits, since Flower does not count it as ended yet"
    assert [run.status for run in superlink.known] == ["finished:failed", "finished:completed"]


def test_a_run_with_whose_folder_another_went_on_has_not_that_one_s_rounds(server: ServerFolder, superlink: Any) -> None:
    interrupted_run(server, superlink)
    superlink.known.append(Submitted(2, "running", {"resume": "died"}, THEN + timedelta(seconds=60), None, THEN + timedelta(seconds=60)))
    found = [(run.id, run.status, run.round, run.rounds) for run in status(server).runs]
    assert found == [(2, "running", 2, 9), (1, "finished:resumed", None, 9)]


def test_a_run_of_a_user_s_own_app_may_tell_its_rounds_and_is_not_resumed(server: ServerFolder, superlink: Any) -> None:
    config = {"name": "mine", "num-server-rounds": 5}
    superlink.known = [Submitted(1, "finished:failed", config, THEN, THEN, THEN, app="you/myapp")]
    (run,) = status(server).runs
    assert (run.round, run.rounds, len(run.note.split("; "))) == (None, 5, 3)
    (server.results / "mine").mkdir(parents=True)
    (server.results / "mine" / PROGRESS).write_text('{"round": 2, "rounds": 5, "seconds": 1.0}\n')
    (run,) = status(server).runs
    assert (run.round, run.rounds, len(run.note.split("; "))) == (2, 5, 2)
    with pytest.raises(ConfigError):
        resume(server, "mine")


@pytest.mark.parametrize("columns", [80, 0])
def test_what_people_and_programs_read(server: ServerFolder, superlink: Any, columns: int) -> None:
    """0: a pipe, which has no width, and cuts nothing."""
    folder, name = interrupted_run(server, superlink), "20261122-235100-fedbn-digits-seed0-resumed"
    refused = [{"client": 0, "refused": ""}, {"client": 1, "refused": "loss is nan"}]
    last = {"round": 3, "seconds": 2.0, "accepted": 1, "cohort": 2, "loss": 1.5, "accuracy": 0.5, "clients": refused}
    (folder / "rounds.jsonl").write_text(json.dumps(last) + '\n{"round": 99, "sec')  # being written
    folder.rename(server.results / name)
    superlink.known = [Submitted(1, "running", {"name": name, "client-names": "a,b", "client-nodes": "197,198"}, THEN, None)]
    superlink.offline = {"b"}

    def typed(*words: str) -> str:
        done = CliRunner().invoke(app, [words[0], str(server.path), *words[1:]], env={"COLUMNS": str(columns) if columns else None})
        assert done.exit_code == (2 if words[-1] == "other" else 0), done.output
        return str(done.output)

    shown, told = typed("status"), json.loads(typed("status", "--all", "--json"))
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert all(word in shown for word in ("running", "3/9", "1/2", "online", "offline"))
    assert not columns or max(map(len, shown.splitlines())) <= columns
    assert columns or name in shown
    assert [(site["name"], site["state"]) for site in told["sites"]] == [("a", "online"), ("b", "offline")]
    (run,) = told["runs"]
    assert (run["refused"], run["left"], run["metric"], run["value"]) == ({"b": "loss is nan"}, 12.0, "accuracy", 0.5)
    assert typed("abort", name).startswith(f"{name} is stopped; resume it from its checkpoint after round 4: fl-bn resume ")
    assert typed("abort", name) == f"{name} had ended already: stopped\n"
    typed("abort", "other")
