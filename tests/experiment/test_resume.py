"""A run that was stopped and gone on with is the run itself, bit for bit, whatever it was and wherever it stopped."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.flower import BatchNormClient
from fl_bn.methods import METHODS
from fl_bn.run.checkpoints import Checkpoints
from tests.costs import COMMON, slow
from tests.experiment.resuming import ROUNDS, Stopped, Values, in_pieces, results, run, small_run, stopped
from tests.integration.runs import differences

BYZANTINE = {"clients": 5, "byzantine": 1, "statistics_rule": "nnm+median", "update_rule": "nnm+median"}
CASES: dict[str, Values] = {
    **{name: {"method": name} for name in METHODS},
    "server momentum": {"method": "fedavg", "server_optimizer": "fedavgm", "server_momentum": 0.5},
    "server adam": {"method": "fedbn", "server_optimizer": "fedadam", "server_learning_rate": 0.05},
    "server yogi": {"method": "silobn", "server_optimizer": "fedyogi", "server_learning_rate": 0.05},
    "gradients, server momentum": {
        "method": "fedbn", "update": "gradients", "local_steps": 1, "momentum": 0.9, "server_optimizer": "fedavgm", "server_momentum": 0.5
    },
    "accelerated": {"method": "hbn", "server_optimizer": "fedacg", "objective": "fedprox"},
    "control variates": {"method": "fedbn", "objective": "scaffold", "momentum": 0.0, "clients": 5, "fraction": 0.4},
    "contrast": {"method": "silobn", "objective": "moon"},
    "local momentum": {"method": "fedbn", "maintain_momentum": "local"},
    "global momentum": {"method": "fixbn", "maintain_momentum": "global"},
    "global adam": {"method": "hbn", "optimizer": "adam", "momentum": 0.0, "maintain_momentum": "global"},
    "a few of the clients": {"method": "fedbn", "clients": 5, "fraction": 0.4, "partition": "dirichlet"},
    "calibrated": {"method": "fbn", "calibrate": 2},
    "frozen": {"method": "hbn", "freeze_after": 2},
    "robust, gaussian": {"method": "fedavg", "attack": "gaussian", **BYZANTINE},
    "epochs": {"method": "fixbn", "local_epochs": 1, "local_steps": 0, "client_weights": "uniform"},
    "joining, hbn, a few": {"method": "hbn", "clients": 5, "fraction": 0.5, "join_rounds": "0:3"},
    "mixed precision": {"method": "silobn", "precision": "mixed"},
}  # fmt: skip
Whole = Callable[[str], dict[str, bytes]]
QUICK = {  # the others keep the same kinds of tensors in the same places
    *COMMON, "server momentum", "server yogi", "control variates", "global momentum", "gradients, server momentum",
    "a few of the clients", "calibrated", "robust, gaussian", "joining, hbn, a few",
}  # fmt: skip
SEVERAL = ("fedbn", "server adam", "gradients, server momentum", "a few of the clients")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The results of a case that nobody stopped, and that made no checkpoints either."""

    @lru_cache
    def made(case: str) -> dict[str, bytes]:
        return results(run(small_run(tmp_path_factory.mktemp("whole"), **CASES[case], checkpoint_every=0)))

    return made


@pytest.mark.parametrize("case", [case if case in QUICK else slow(case) for case in CASES])
def test_a_run_in_pieces_is_the_run_itself(case: str, tmp_path: Path, whole: Whole) -> None:
    """Twice interrupted, once killed and once with its results written; a checkpoint after every round, or every other."""
    number = list(CASES).index(case)
    values = small_run(tmp_path / "pieces", **CASES[case], checkpoint_every=1 + number % 2)
    path = in_pieces(values, [(3, 4), (3, 5), (4, 5)][number // 2 % 3])
    assert differences(whole(case), results(path)) == []
    assert f"rounds.csv {ROUNDS} None" in whole(case)
    assert "failed" not in (path / "summary.md").read_text()
    assert [file.name for file in path.parent.iterdir() if file.is_dir()] == ["run"]  # and nothing beside it


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_wherever_it_stops(case: str, tmp_path: Path, whole: Whole) -> None:
    for stops in ([2], [3], [4], [5], range(2, ROUNDS + 1)):
        values = small_run(tmp_path / f"at-{stops[0]}-{len(stops)}", **CASES[case])
        assert differences(whole(case), results(in_pieces(values, stops))) == [], stops


def test_a_run_that_stops_in_the_middle_of_a_round(whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three clients have trained and kept what they keep; the third is where it ends."""
    values, compute = small_run(tmp_path / "pieces", method="fedbn"), BatchNormClient.compute

    def stop(self: BatchNormClient, request: Any, pack: Callable[[Any], object]) -> object:
        if self.site.client == 2 and request.header.round == 4:
            raise Stopped
        return compute(self, request, pack)

    with monkeypatch.context() as patch:
        patch.setattr(BatchNormClient, "compute", stop)
        with pytest.raises(Stopped):
            run(values)
    kept = {path.parent.name: path.name for path in sorted((tmp_path / "pieces" / "run").glob("state-*/client-*/round-*"))}
    assert [name.split("-")[1][:6] for name in kept.values()] == ["000004", "000004", "000003"]  # control: so it was
    assert differences(whole("fedbn"), results(run(values, resume="latest"))) == []


PLAY = "import json, sys; from fl_bn.flower import run_in_process; run_in_process(json.loads(sys.argv[1]))"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fedbn", "server adam"])
def test_a_process_that_is_killed_goes_on_as_if_nothing_had_happened(case: str, tmp_path: Path) -> None:
    """SIGKILL at moments that nobody chose, again and again, until a process lives long enough to finish."""
    rounds, draw, kills = 40, random.Random(case), 0
    values = small_run(tmp_path / "runs", **CASES[case], rounds=rounds)
    path, deadline = tmp_path / "runs" / "run", time.monotonic() + 280
    while not (path / "model.safetensors").exists() or (path / "checkpoints").exists():
        assert time.monotonic() < deadline
        resume = {"resume": "run"} if list((path / "checkpoints").glob("round-*")) else {}
        if not resume and path.exists():
            shutil.rmtree(path)
        process = subprocess.Popen([sys.executable, "-c", PLAY, json.dumps(values | resume)], stderr=subprocess.DEVNULL)
        size, patience = lines(path), draw.randint(1, 12)
        while process.poll() is None and (kills >= 3 or lines(path) < size + patience):
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.1))
        if process.poll() is None:
            process.kill()
            kills += 1
        process.wait()
    assert kills == 3
    whole = results(run(small_run(tmp_path / "whole", **CASES[case], rounds=rounds, checkpoint_every=0)))
    assert differences(whole, results(path)) == []


def lines(path: Path) -> int:
    return (path / "rounds.jsonl").read_bytes().count(b"\n") if (path / "rounds.jsonl").exists() else 0


# Controls: what a checkpoint holds is needed


def forget_the_optimizer(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerOptimizer, "restore", lambda self, buffers: None)


def forget_the_clients(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    (states,) = Path(str(values["output"]), "run").glob("state-*")
    shutil.rmtree(states)


def forget_one_client(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    (state,) = Path(str(values["output"]), "run").glob("state-*/client-1")
    shutil.rmtree(state)


def forget_the_arrays(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_bn.federation.shared_model.SharedModel.restore", lambda self, tensors, auxiliary: None)


def go_on_elsewhere(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = Checkpoints.newest

    def another(self: Checkpoints) -> Any:
        found = newest(self)
        return found and replace(found, round=found.round - 1)

    monkeypatch.setattr(Checkpoints, "newest", another)


@pytest.mark.parametrize(
    ("case", "forget"),
    [
        ("server yogi", forget_the_optimizer),
        ("fedbn", forget_the_clients),
        ("hbn", forget_one_client),
        ("a few of the clients", forget_the_clients),
        ("gn", forget_the_arrays),
        ("gn", go_on_elsewhere),
    ],
)
def test_without_any_of_it_the_run_would_be_another(
    case: str, forget: Callable[[Values, pytest.MonkeyPatch], None], whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = small_run(tmp_path / "pieces", **CASES[case])
    stopped(values, 4)
    forget(values, monkeypatch)
    other = differences(whole(case), results(run(values, resume="run")))
    assert any(name.startswith("model.safetensors/") and name.endswith(".weight") for name in other)


@pytest.mark.parametrize("case", ["gn", "fixbn"])
def test_methods_without_anything_at_their_clients_need_nothing_there(case: str, tmp_path: Path) -> None:
    assert not list(stopped(small_run(tmp_path / "pieces", **CASES[case]), 4).glob("state-*"))


# Damage


def checkpoints(path: Path) -> list[Path]:
    return sorted((path / "checkpoints").glob("round-*.safetensors"))


@pytest.mark.parametrize(
    ("case", "damage"), [*((case, "flipped") for case in SEVERAL), *(("fedbn", damage) for damage in ("short", "empty", "of another kind"))]
)
def test_a_damaged_checkpoint_costs_the_rounds_since_the_one_before_and_no_more(
    case: str, damage: str, whole: Whole, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fl_bn.flower.log.LOGGER.propagate", True)
    values = small_run(tmp_path / "pieces", **CASES[case])
    path = stopped(values, 4, dies=True)
    before, newest = checkpoints(path)
    data = newest.read_bytes()
    state = next(iter(path.glob("state-*/client-*/round-*")), None)
    other = {"short": data[:-1], "empty": b"", "of another kind": state.read_bytes() if state else b"x"}
    newest.write_bytes(other.get(damage, data[:-1] + bytes([data[-1] ^ 1])))
    assert differences(whole(case), results(run(values, resume="latest"))) == []
    assert f"It was renamed to {newest.name}.set-aside-1; trying the checkpoint before it" in caplog.text
    assert "going on after round 2 of 5" in caplog.text
    assert before.name == "round-000002.safetensors"
