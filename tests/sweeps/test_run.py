"""Sweeps that run: what fails is left until it is asked for again, what is wrong is said first, what is interrupted goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.experiment.test_compare import Threads, finish
from tests.refusals import naming
from tests.sweeps.inner import Cell, ConfigError, app, cells, parse, run

TINY = {
    "dataset": "digits-plain", "image-size": 8, "model": "mlp", "clients": 2, "rounds": 2, "local-steps": 1, "batch-size": 8,
    "partition": "iid", "evaluate-every": 1,
}  # fmt: skip
METHODS = {"BN": {"method": "fedavg"}, "GN": {"method": "gn"}}


def tables(**more: Any) -> dict[str, Any]:
    return {"title": "tiny", "run": {**TINY, **more}, "axes": {"method": METHODS}}


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_a_failed_cell_is_left_until_a_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run_cell(cell: Cell) -> None:
        ran.append(str(cell.axes["method"]))
        if cell.axes["method"] == "GN" and len(ran) < 3:
            cell.write_outcome("failed", 0.0, "ValueError: the disk is full")
            raise ValueError("the disk is full")
        finish(cell, [0.5, 0.6])
        cell.write_outcome("finished", 1.0)

    monkeypatch.setattr(cells, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(cells, "run_cell", run_cell)
    made = parse(tables(), "x", "", "", {})

    def again(retry: bool = False) -> dict[str, str]:
        return run.run(made, run.plan(made, tmp_path, retry=retry), tmp_path, 1, lambda done, total: None)

    assert again() == {"GN": "ValueError: the disk is full"}
    (checkpoint := tmp_path / "runs" / "GN" / "checkpoints" / "round-000001.safetensors").parent.mkdir()
    checkpoint.touch()
    assert again() == {"GN": "ValueError: the disk is full"}
    assert checkpoint.exists()
    assert ran == ["BN", "GN"]  # neither what finished nor what failed is done again
    assert again(retry=True) == {}
    assert ran == ["BN", "GN", "GN"]
    assert json.loads((tmp_path / "runs" / "GN" / "cell.json").read_text())["axes"] == {"method": "GN"}
    assert run.plan(made, tmp_path).todo == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dataset": "npz", "data-path": "nowhere.npz"}, "nowhere.npz"),
        ({"dataset": "nothing:load"}, "'nothing'"),
        ({"model": "resnet19"}, "'resnet19'"),
        ({"partition": "classes", "partition-parameter": 11.0}, "classes per client"),
        ({"clients": 100_000}, "clients"),
    ],
)
def test_what_cannot_be_read_built_or_divided_is_said_before_anything_runs(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with naming(message, ConfigError):
        run.check(run.plan(parse(tables(**keys), "x", "", "", {}), tmp_path).todo)


def test_the_command_refuses_with_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text("[run]\nround = 3\n")
    result = command("sweep", str(file), "--output", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert not (tmp_path / "out").exists()


def write_sweep(folder: Path, rounds: int) -> Path:
    lines = [f"{key} = {json.dumps(value)}" for key, value in {**TINY, "rounds": rounds, "seed": [0, 1]}.items()]
    file = folder / "tiny.toml"
    file.write_text("\n".join(["[run]", *lines, "[axes.method]", 'BN = { method = "fedavg" }', 'GN = { method = "gn" }', ""]))
    return file


def models(folder: Path) -> dict[str, dict[str, bytes]]:
    """The bits of every tensor; the file's own bytes have their metadata in any order."""
    files = folder.glob("runs/*/model.safetensors")
    return {file.parent.name: {name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()} for file in files}


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)])
def test_an_interrupted_sweep_goes_on_where_it_was(how: signal.Signals, tmp_path: Path) -> None:
    file = write_sweep(tmp_path, 60)
    arguments = [sys.executable, "-m", "fl_bn.cli.main", "sweep", str(file), "--jobs", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*arguments, "--output", str(tmp_path / "cut")], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # of tests in a shell's background it would be ignored
    )  # fmt: skip
    limit = time.monotonic() + 200
    while not (finished := [path.parent for path in tmp_path.glob("cut/runs/*/cell.json")]) or not any(
        path.stat().st_size for path in tmp_path.glob("cut/runs/*seed1*/rounds.jsonl")
    ):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.05)
    process.send_signal(how)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == (130 if how is signal.SIGINT else -signal.SIGKILL), said
    workers_gone(str(tmp_path))
    before = {path: (path / "cell.json").stat().st_mtime_ns for path in finished}
    for name in ("cut", "whole"):
        done = subprocess.run(
            [*arguments, "--output", str(tmp_path / name)], env=environment, capture_output=True, text=True, timeout=250, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert {path: (path / "cell.json").stat().st_mtime_ns for path in finished} == before  # not done again
    assert models(tmp_path / "cut") == models(tmp_path / "whole")
    assert len(models(tmp_path / "cut")) == 4
    assert len({bits["head.weight"] for bits in models(tmp_path / "cut").values()}) == 4  # control: they are four models
    assert (tmp_path / "cut" / "report.html").exists()


def workers_gone(marker: str, seconds: float = 20.0) -> None:
    """Nobody writes into the folder any more."""
    limit = time.monotonic() + seconds
    while True:
        sizes = [path.stat().st_size for path in Path(marker).rglob("rounds.jsonl")]
        time.sleep(1.5)
        if sizes == [path.stat().st_size for path in Path(marker).rglob("rounds.jsonl")]:
            return
        assert time.monotonic() < limit, "a worker outlives its sweep"


@pytest.mark.slow
def test_a_worker_that_dies_fails_its_cell_alone(tmp_path: Path) -> None:
    file = tmp_path / "tiny.toml"
    write_sweep(tmp_path, 2)
    text = file.read_text().replace('GN = { method = "gn" }', 'GN = { method = "gn", model = "tests.sweeps.suicide:build" }')
    file.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    arguments = [sys.executable, "-m", "fl_bn.cli.main", "sweep", str(file), "--jobs", "2", "--output", str(tmp_path / "out")]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 1
    status = {path.parent.name: json.loads(path.read_text())["status"] for path in tmp_path.glob("out/runs/*/cell.json")}
    assert status == {"BN-seed0": "finished", "BN-seed1": "finished", "GN-seed0": "failed", "GN-seed1": "failed"}
    assert "its process died" in done.stdout


@pytest.mark.slow
def test_two_commands_on_one_folder_divide_the_runs(tmp_path: Path) -> None:
    """As on several machines that share a disk: each run is computed once, and both commands end well."""
    file = write_sweep(tmp_path, 20)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}

    def begin(folder: str) -> subprocess.Popen[str]:
        arguments = [sys.executable, "-m", "fl_bn.cli.main", "sweep", str(file), "--jobs", "1", "--output", str(tmp_path / folder)]
        return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    both = [begin("shared"), begin("shared")]
    for process in [*both, begin("alone")]:
        said = process.communicate(timeout=250)[0]
        assert process.returncode == 0, said
    assert {path.parent.name: len(path.read_text().splitlines()) for path in tmp_path.glob("shared/runs/*/rounds.jsonl")} == {
        f"{method}-seed{seed}": 20 for method in ("BN", "GN") for seed in (0, 1)
    }
    assert models(tmp_path / "shared") == models(tmp_path / "alone")
