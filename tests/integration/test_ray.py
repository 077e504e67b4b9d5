"""Flower's simulation on Ray, started as a user starts it: the same bits as in process, and failures that say what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fl_bn.app.config import RunConfig
from fl_bn.methods import METHODS
from tests.experiment.inside import override
from tests.integration.runs import LIE, ROOT, TINY, bits, differences, environment, tiny

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment(tmp_path_factory.mktemp("flower"))


def command(*args: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(args, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=200, check=False)


def as_on_ray(method: str) -> dict[str, str]:
    """Return what a simulation does of itself where statistics are made exact: the same numbers, but other messages than in process."""
    setup = {"setup": "experiments.papers:Papers"}
    measured = "recalibration" not in RunConfig.from_mapping({**TINY, **setup, "method": method}).without_effect
    return {**setup, "recalibration": "passes"} if measured else {}


@pytest.fixture(scope="module")
def on_ray(variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one run per method."""
    folder = tmp_path_factory.mktemp("ray")
    done = command(sys.executable, str(Path(__file__).with_name("every_method_on_ray.py")), str(folder), variables=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_ray_and_in_process_give_the_same_bits(method: str, on_ray: Path, tmp_path: Path) -> None:
    here, there = bits(tiny(tmp_path, method, **as_on_ray(method))), bits(on_ray / method)
    assert differences(here, there) == []
    other = bits(tiny(tmp_path / "other", method, seed=1, **as_on_ray(method)))  # control
    assert differences(other, there) != []


def test_flwr_run_as_a_user_does(variables: dict[str, str], tmp_path: Path) -> None:
    config = override({**TINY, "method": "hbn", "output": str(tmp_path), "name": "user", "pictures": True})
    done = command("flwr", "run", ".", "--run-config", config, "--federation-config", "options.num-supernodes=3", variables=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert "[round 3/3] 3/3 clients" in said
    assert "\033[" not in said[said.index("[round 1/3]") :].splitlines()[0]
    assert "statistics for the evaluation" in (tmp_path / "user" / "run.log").read_text()
    assert {"accuracy.png", "labels.png", "summary.md"} <= {file.name for file in (tmp_path / "user").iterdir()}
    assert differences(bits(tiny(tmp_path, "hbn", **as_on_ray("hbn"))), bits(tmp_path / "user")) == []


def test_byzantine_clients_on_ray_give_the_same_bits(on_ray: Path, tmp_path: Path) -> None:
    there = bits(on_ray / "lied")
    assert differences(bits(tiny(tmp_path / "here", "fbn", **LIE)), there) == []
    assert differences(bits(tiny(tmp_path / "honest", "fbn", **{**LIE, "attack": "none"})), there) != []  # control


SCARCE = ("--backend-config", json.dumps({"init_args": {"num_cpus": 2}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}))


def test_with_too_few_workers_auto_falls_back_to_replay_and_gives_the_same_model(variables: dict[str, str], tmp_path: Path) -> None:
    config = override({**TINY, "method": "fedtan", "output": str(tmp_path), "name": "scarce"})
    done = command("flower-simulation", "--app", ".", "--num-supernodes", "3", *SCARCE, "--run-config", config, variables=variables)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "exchange='auto' goes on with replay" in said
    here, there = bits(tiny(tmp_path, "fedtan")), bits(tmp_path / "scarce")
    assert [name for name in differences(here, there) if not name.startswith("round ")] == []  # the rounds differ in their bytes
    assert differences(here, there) == ["round 1", "round 2", "round 3"]  # control: it was not the same carrier
