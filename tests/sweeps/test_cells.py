"""Cells of a sweep: how many run at a time, by whom, and what counts as finished."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.kept import finished
from fl_bn.flower import RunFailed
from tests.refusals import naming
from tests.sweeps.finished_cells import Threads, checkpoint, finish
from tests.sweeps.inner import LOGGER, Cell, ConfigError, RunConfig, cells, run_cell


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The configs of runs that were begun; each leaves a finished folder."""
    begun: list[dict[str, Any]] = []

    def run(config: dict[str, Any]) -> None:
        begun.append(config)
        finish(Cell(RunConfig.from_mapping({**config, "resume": ""})), [0.5, 0.6])

    monkeypatch.setattr(LOGGER, "handlers", [])
    monkeypatch.setattr(cells, "run_in_process", run)
    return begun


def a_cell(folder: Path, **keys: Any) -> Cell:
    return Cell(RunConfig.from_mapping({"output": str(folder), "name": "a", "rounds": 2, **keys}))


def test_a_cell_that_another_process_runs_is_left_alone(
    tmp_path: Path, ran: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = a_cell(tmp_path)
    finish(cell, [0.5])  # so far
    (tmp_path / "a.log").write_text("the other's")
    monkeypatch.setattr(cells, "ProcessPoolExecutor", Threads)
    with cell.held():
        with naming("another", RunFailed):
            run_cell(cell)
        assert cells.run_cells([cell], 1, lambda done, total: None) == {}
    assert ran == []
    assert len(cell.rows()) == 1
    assert cell.outcome() == {}
    assert (tmp_path / "a.log").read_text() == "the other's"
    run_cell(cell)  # control: held by nobody
    assert len(ran) == 1
    assert cell.outcome()["status"] == "finished"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.log"]


@pytest.mark.parametrize("setup", ["", "experiments.papers:Papers"])
def test_a_cell_that_ran_on_another_device_and_engine_is_finished_and_kept_as_it_ran(setup: str, tmp_path: Path) -> None:
    """What changes last digits alone is no other run; what the file says of it does not hide how it was run."""
    there = a_cell(tmp_path, engine="vectorised", **{"memory-format": "channels-last", "data-path": "here", "setup": setup})
    finish(there, [0.5, 0.6])
    (tmp_path / "a" / "environment.json").write_text('{"commit": "abc"}')
    made = tmp_path / "a" / "config.toml"
    made.write_text(made.read_text().replace("learning-rate-decay = ", "learning-rate-decay = 0.1  # it had no effect, was "))
    here = a_cell(tmp_path, device="cpu", **{"data-path": "here", "setup": setup})
    assert here.finished()
    (kept,) = finished([here], [a_cell(tmp_path, device="cpu", **{"data-path": "{data}", "setup": setup})])
    told = [kept.config.get(key) for key in ("engine", "memory-format", "device", "data-path")]
    assert told == ["vectorised", "channels-last", None, "{data}"]
    with naming("learning-rate", ConfigError):  # control
        a_cell(tmp_path, **{"learning-rate": 0.1, "data-path": "here", "setup": setup}).finished()


def test_a_centralised_run_is_not_taken_for_a_federated_one(tmp_path: Path) -> None:
    federated = a_cell(tmp_path)
    centralised = replace(federated, centralised=True)
    for one, other in ((centralised, federated), (federated, centralised)):
        finish(one, [0.5, 0.6])
        assert one.finished()
        with naming("centralised", ConfigError):
            other.finished()


def test_a_row_that_a_crash_has_torn_is_left_out(tmp_path: Path) -> None:
    cell = a_cell(tmp_path)
    finish(cell, [0.5, 0.6])
    whole = (cell.path / "rounds.jsonl").read_text()
    (cell.path / "rounds.jsonl").write_text(whole[:-5])
    assert [row["round"] for row in cell.rows()] == [1]
    assert not cell.finished()
    (cell.path / "rounds.jsonl").write_text(whole)
    assert cell.finished()  # control


@pytest.mark.parametrize("left", [b"", b"rounds = ", b"\xff"])
def test_a_config_that_a_crash_has_emptied_is_no_other_run(left: bytes, tmp_path: Path, ran: list[dict[str, Any]]) -> None:
    cell = a_cell(tmp_path)
    finish(cell, [0.5])
    (cell.path / "config.toml").write_bytes(left)
    checkpoint(cell)
    assert not cell.finished()
    run_cell(cell)
    assert [config["resume"] for config in ran] == [""]  # not gone on with, as its config is unknown
    finish(replace(cell, config=replace(cell.config, rounds=3)), [0.5])
    with naming("another", ConfigError):  # control
        cell.finished()


def test_what_is_retried_is_begun_anew_and_not_from_its_checkpoint(tmp_path: Path, ran: list[dict[str, Any]]) -> None:
    for name, status in (("failed", "failed"), ("interrupted", "")):
        cell = a_cell(tmp_path, name=name)
        finish(cell, [0.5])
        checkpoint(cell)
        if status:
            cell.write_outcome(status, 1.0)
        run_cell(cell)
    assert [config["resume"] for config in ran] == ["", "interrupted"]
