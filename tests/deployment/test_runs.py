"""``fl-bn runs``, ``abort`` and ``resume``, and what a failure tells to type."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_bn.run.run_directory import to_toml
from tests.deployment.inner import ConfigError, FolderError, RunConfig, ServerFolder, Submitted, app, list_runs, resume
from tests.deployment.superlink import THEN


def interrupted_run(server: ServerFolder, superlink: Any) -> Path:
    """A folder as a run leaves it whose server died after round 4."""
    folder = server.results / "died"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints/round-000004.safetensors").write_bytes(b"")
    given = {"rounds": 9, "clients": 2, "client-nodes": "1,2", "client-names": "a,b", "checkpoint-every": 2, "method": "hbn"}
    config = RunConfig.from_mapping({**given, "name": "died", "output": str(server.results)})
    (folder / "config.toml").write_text(to_toml(config.to_mapping()))
    (folder / "rounds.jsonl").write_text('{"round": 1}\n{"round": 2}\n')
    superlink.known = [Submitted(1, "finished:failed", {"name": "died"}, THEN, THEN + timedelta(seconds=7), THEN)]
    return folder


def test_resume_reads_the_stored_config_and_the_sites_as_they_are_now(server: ServerFolder, superlink: Any) -> None:
    folder = interrupted_run(server, superlink)
    (row,) = list_runs(server)
    assert (row.id, row.name, row.state, row.round, row.rounds, row.seconds) == ("1", "died", "failed", 2, 9, 7.0)
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
    assert [(run.id, run.state, run.round) for run in list_runs(server)] == [("2", "running", 2), ("1", "resumed", None)]


def test_what_people_and_programs_read(server: ServerFolder, superlink: Any) -> None:
    interrupted_run(server, superlink)
    shown = CliRunner().invoke(app, ["runs", str(server.path)], env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    assert all(word in shown.output for word in ("died", "failed", "2/9", "2026-11-22"))
    told = CliRunner().invoke(app, ["runs", str(server.path), "--json"])
    assert json.loads(told.output)[0]["seconds"] == 7.0
    assert CliRunner().invoke(app, ["abort", str(server.path), "died"]).output == "died had ended already: failed\n"
    assert CliRunner().invoke(app, ["abort", str(server.path), "other"]).exit_code == 2
