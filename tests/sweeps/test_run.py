"""Sweeps that run: what fails is left until it is asked for again, what is wrong is said first, what is interrupted goes on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from experiments.kept import finished
from fl_bn.app.assembly import client_samples
from fl_bn.app.config import ConfigError, RunConfig
from fl_bn.app.sweep import run
from fl_bn.app.sweep.cells import Cell, run_cell
from fl_bn.app.sweep.file import parse, read
from fl_bn.flower import RunFailed
from fl_bn.models import build
from tests.experiment.inside import COMMAND, ENVIRONMENT, ends_well, ends_with_a_sentence
from tests.experiment.resuming import small_run, stopped
from tests.integration.runs import bits, differences
from tests.listed import listed
from tests.refusals import naming
from tests.sweeps.evidence_runs import finish

TINY = {
    "dataset": "digits-plain", "image-size": 8, "model": "mlp", "clients": 2, "rounds": 2, "local-steps": 1, "batch-size": 8,
    "partition": "iid", "evaluate-every": 1,
}  # fmt: skip


def a_cell(folder: Path, **keys: Any) -> Cell:
    return Cell(RunConfig.from_mapping({"output": str(folder), "name": "a", "rounds": 2, **keys}))


def test_what_another_process_runs_is_left_alone(tmp_path: Path) -> None:
    cell = Cell(RunConfig.from_mapping(small_run(tmp_path, method="gn")))
    with cell.held(), naming("another", RunFailed):
        run_cell(cell)
    assert not cell.path.exists()
    run_cell(cell)  # control: held by nobody
    assert cell.finished()
    assert not client_samples.cache_info().currsize  # copies of the data would pile up, cell by cell
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".npz") == ["run", "run.log"]


@listed("what", ["interrupted", "failed", "without a config"])
def test_what_was_interrupted_goes_on_and_what_failed_begins_anew(what: str, tmp_path: Path) -> None:
    values = small_run(tmp_path, method="gn")
    cell, path = Cell(RunConfig.from_mapping(values)), stopped(values, 3)
    if what == "failed":
        cell.write_outcome("failed", 1.0)
    if what == "without a config":  # a crash has emptied it
        (path / "config.toml").write_bytes(b"rounds = ")
    assert not cell.finished()
    run_cell(cell)
    assert cell.finished()
    assert ("going on after round 2" in path.with_name("run.log").read_text()) == (what == "interrupted")
    whole = replace(cell, config=replace(cell.config, name="whole"))
    run_cell(whole)
    assert differences(bits(whole.path), bits(path)) == []


def test_a_cell_that_ran_on_another_device_and_engine_is_finished_and_kept_as_it_ran(tmp_path: Path) -> None:
    """What changes last digits alone is no other run; what the file says of it does not hide how it was run."""
    there = a_cell(tmp_path, engine="vectorised", **{"memory-format": "channels-last", "data-path": "here"})
    finish(there, [0.5, 0.6])
    (tmp_path / "a" / "environment.json").write_text('{"commit": "abc"}')
    here = a_cell(tmp_path, device="cpu", **{"data-path": "here"})
    assert here.finished()
    (kept,) = finished([here], [a_cell(tmp_path, device="cpu", **{"data-path": "{data}"})])
    told = [kept.config.get(key) for key in ("engine", "memory-format", "device", "data-path")]
    assert told == ["vectorised", "channels-last", None, "{data}"]
    with naming("learning-rate", ConfigError):  # control
        a_cell(tmp_path, **{"learning-rate": 0.1, "data-path": "here"}).finished()
    with naming("centralised", ConfigError):
        replace(here, centralised=True).finished()


def test_what_cannot_be_run_is_said_before_anything_runs(tmp_path: Path) -> None:
    tables = {"run": {**TINY, "model": "resnet19"}, "axes": {"method": {"GN": {"method": "gn"}}}}
    with naming("'resnet19'", ConfigError):
        run.check(run.plan(parse(tables, "x", "", "", {}), tmp_path).todo)
    for key, output, about in (("round", "out", "round"), ("rounds", "wrong.toml", "/wrong.toml")):
        (tmp_path / "wrong.toml").write_text(f"[run]\n{key} = 3\n")
        ends_with_a_sentence("sweep", tmp_path / "wrong.toml", "--output", tmp_path / output, about=about)
    assert not (tmp_path / "out").exists()


# In processes of their own


def ailing() -> bool:
    return multiprocessing.parent_process() is not None


def dies(**arguments: Any) -> nn.Module:
    """Kill the worker process that builds this network, as the kernel does when memory is short."""
    if ailing():
        os.kill(os.getpid(), signal.SIGKILL)
    return build("mlp", **arguments)


def raises(**arguments: Any) -> nn.Module:
    assert not ailing(), "no such luck"
    return build("mlp", **arguments)


@pytest.mark.slow
def test_a_cell_that_fails_or_whose_worker_dies_is_left_until_a_retry(tmp_path: Path) -> None:
    models = {"whole": "mlp", "raises": f"{__name__}:raises", "dies": f"{__name__}:dies"}
    made = parse({"run": TINY, "axes": {"model": {name: {"model": model} for name, model in models.items()}}}, "x", "", "", {})

    def again() -> dict[str, str]:
        return run.run(made, run.plan(made, tmp_path), tmp_path, 1, lambda done, total: None)

    def ended() -> dict[str, int]:
        return {file.parent.name: file.stat().st_mtime_ns for file in tmp_path.glob("runs/*/cell.json")}

    failed, times = again(), ended()
    assert failed.keys() == {"raises", "dies"}
    assert "no such luck" in failed["raises"]
    assert "its process died" in failed["dies"]
    assert (again(), ended()) == (failed, times)  # neither what finished nor what failed is done again
    for cell in run.plan(made, tmp_path, retry=True).todo:  # in this process, in which nothing ails
        run_cell(cell)
    assert run.plan(made, tmp_path).todo == []
    assert {name for name, time in ended().items() if time != times[name]} == {"raises", "dies"}


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    lines = [f"{key} = {json.dumps(value)}" for key, value in {**TINY, "rounds": 30, "seed": [0, 1]}.items()]
    methods = ["[axes.method]", 'BN = { method = "fedavg" }', 'GN = { method = "gn" }', ""]
    (tmp_path / "tiny.toml").write_text("\n".join(["[run]", *lines, *methods]))
    command = ("sweep", str(tmp_path / "tiny.toml"), "--jobs", "2", "--output")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process would inherit that it is ignored
    process = subprocess.Popen(
        [*COMMAND, *command, str(tmp_path / "cut")], env=ENVIRONMENT,
    )  # fmt: skip
    while not (ended := [*tmp_path.glob("cut/runs/*/cell.json")]) or not any(
        path.stat().st_size for path in tmp_path.glob("cut/runs/*seed1*/rounds.jsonl")
    ):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(250) == 130
    before = {path: path.stat().st_mtime_ns for path in ended}
    ends_well(*command, tmp_path / "cut")
    for cell in read(tmp_path / "tiny.toml").cells(tmp_path / "whole"):
        run_cell(cell)
    assert {path: path.stat().st_mtime_ns for path in ended} == before  # not done again
    found, whole = ({path.name: bits(path) for path in tmp_path.glob(f"{out}/runs/*") if path.is_dir()} for out in ("cut", "whole"))
    assert found == whole
    assert len({one["model.safetensors/head.weight"] for one in found.values()}) == 4  # control: they are four models
    assert (tmp_path / "cut" / "report.html").exists()
