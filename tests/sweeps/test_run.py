"""Sweeps that run: what fails is left until it is asked for again, what is wrong is said first, what is interrupted goes on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fl_bn.models import build
from tests.experiment.inside import ends_with_a_sentence
from tests.refusals import naming
from tests.sweeps.finished_cells import Threads, checkpoint, finish
from tests.sweeps.inner import Cell, ConfigError, cells, parse, run

TINY = {
    "dataset": "digits-plain", "image-size": 8, "model": "mlp", "clients": 2, "rounds": 2, "local-steps": 1, "batch-size": 8,
    "partition": "iid", "evaluate-every": 1,
}  # fmt: skip
METHODS = {"BN": {"method": "fedavg"}, "GN": {"method": "gn"}}


def tables(**more: Any) -> dict[str, Any]:
    return {"title": "tiny", "run": {**TINY, **more}, "axes": {"method": METHODS}}


def test_a_failed_cell_is_left_until_a_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, told = list[str](), list[tuple[int, int]]()

    def run_cell(cell: Cell) -> None:
        ran.append(str(cell.axes["method"]))
        if cell.axes["method"] == "GN" and len(ran) < 3:
            cell.write_outcome("failed", 0.0, "ValueError: the disk is full")
            raise ValueError("the disk is full")
        finish(cell, [0.5, 0.6])

    monkeypatch.setattr(cells, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(cells, "run_cell", run_cell)
    made = parse(tables(), "x", "", "", {})
    finish(made.cells(tmp_path)[0], [0.5])  # killed after one of two rounds, and so begun again

    def again(retry: bool = False) -> dict[str, str]:
        return run.run(made, run.plan(made, tmp_path, retry=retry), tmp_path, 1, lambda done, total: told.append((done, total)))

    assert again() == {"GN": "ValueError: the disk is full"}
    checkpoint(made.cells(tmp_path)[1])
    assert again() == {"GN": "ValueError: the disk is full"}
    assert ran == ["BN", "GN"]  # neither what finished nor what failed is done again
    assert (tmp_path / "runs" / "GN" / "checkpoints").exists()
    assert again(retry=True) == {}
    assert (ran, told[-1]) == (["BN", "GN", "GN"], (4, 4))
    assert json.loads((tmp_path / "runs" / "GN" / "cell.json").read_text())["axes"] == {"method": "GN"}
    assert run.plan(made, tmp_path).todo == []


def test_what_cannot_be_run_is_said_before_anything_runs(tmp_path: Path) -> None:
    """The same checks as before a single run, which has tests of all of them."""
    for keys, message in (({"dataset": "npz", "data-path": "nowhere.npz"}, "nowhere.npz"), ({"model": "resnet19"}, "'resnet19'")):
        with naming(message, ConfigError):
            run.check(run.plan(parse(tables(**keys), "x", "", "", {}), tmp_path).todo)
    (tmp_path / "wrong.toml").write_text("[run]\nround = 3\n")
    ends_with_a_sentence("sweep", tmp_path / "wrong.toml", "--output", tmp_path / "out", about="round")
    assert not (tmp_path / "out").exists()


# The command, in processes of its own


def suicide(**arguments: Any) -> Any:
    """Kill the worker process of a sweep that builds this network, as the kernel does when memory is short."""
    if multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return build("mlp", **arguments)


def begin(folder: Path, rounds: int, out: str, jobs: int = 2, gn: str = "") -> subprocess.Popen[str]:
    """Run a sweep of two methods and two seeds. ``gn`` are further keys of the second method."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in {**TINY, "rounds": rounds, "seed": [0, 1]}.items()]
    methods = ["[axes.method]", 'BN = { method = "fedavg" }', f'GN = {{ method = "gn"{gn} }}', ""]
    (folder / "tiny.toml").write_text("\n".join(["[run]", *lines, *methods]))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "fl_bn.cli.main", "sweep", str(folder / "tiny.toml"), "--jobs", str(jobs), "--output", str(folder / out)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # of tests in a shell's background it would be ignored
    )  # fmt: skip


def ends(process: subprocess.Popen[str], status: int = 0) -> str:
    """Wait for the command's end with this status, and return what it printed."""
    said = process.communicate(timeout=250)[0]
    assert process.returncode == status, said
    return said


def models(folder: Path) -> dict[str, dict[str, bytes]]:
    """The bits of every tensor; the file's own bytes have their metadata in any order."""
    files = folder.glob("runs/*/model.safetensors")
    return {file.parent.name: {name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()} for file in files}


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)])
def test_an_interrupted_sweep_goes_on_where_it_was(how: signal.Signals, tmp_path: Path) -> None:
    process, limit = begin(tmp_path, 60, "cut"), time.monotonic() + 200
    while not (finished := [path.parent for path in tmp_path.glob("cut/runs/*/cell.json")]) or not any(
        path.stat().st_size for path in tmp_path.glob("cut/runs/*seed1*/rounds.jsonl")
    ):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.05)
    process.send_signal(how)
    ends(process, 130 if how is signal.SIGINT else -signal.SIGKILL)
    workers_gone(tmp_path)
    before = {path: (path / "cell.json").stat().st_mtime_ns for path in finished}
    for out in ("cut", "whole"):
        ends(begin(tmp_path, 60, out))
    assert {path: (path / "cell.json").stat().st_mtime_ns for path in finished} == before  # not done again
    assert models(tmp_path / "cut") == models(tmp_path / "whole")
    assert len({bits["head.weight"] for bits in models(tmp_path / "cut").values()}) == 4  # control: they are four models
    assert (tmp_path / "cut" / "report.html").exists()


def workers_gone(folder: Path, seconds: float = 20.0) -> None:
    """Wait until nobody writes into the folder any more."""
    limit = time.monotonic() + seconds
    while True:
        sizes = [path.stat().st_size for path in folder.rglob("rounds.jsonl")]
        time.sleep(1.5)
        if sizes == [path.stat().st_size for path in folder.rglob("rounds.jsonl")]:
            return
        assert time.monotonic() < limit, "a worker outlives its sweep"


@pytest.mark.slow
def test_a_worker_that_dies_fails_its_cell_alone(tmp_path: Path) -> None:
    said = ends(begin(tmp_path, 2, "out", gn=', model = "tests.sweeps.test_run:suicide"'), 1)
    status = {path.parent.name: json.loads(path.read_text())["status"] for path in tmp_path.glob("out/runs/*/cell.json")}
    assert status == {"BN-seed0": "finished", "BN-seed1": "finished", "GN-seed0": "failed", "GN-seed1": "failed"}
    assert "its process died" in said
