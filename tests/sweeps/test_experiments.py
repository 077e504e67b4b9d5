"""The papers' experiments: all of them are there, every variant is a sweep that could be run, the small ones stay small."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from experiments import catalogue as sweep_experiments
from experiments.catalogue import FOLDER, Experiment, data_of, find, perform_program, program_of
from experiments.cli import experiments as app
from tests.listed import listed
from tests.refusals import naming
from tests.sweeps.inner import Cell, ConfigError, DataNotFound, read

ALL = find()
SWEEPS = [experiment for experiment in ALL if not experiment.program]
BUNDLED = ("digits", "digits-plain", "cityscapes", "abide")  # the last two are made: experiments/data/made.py


def cells(name: str, variant: str, folder: Path) -> list[Cell]:
    return read(FOLDER / f"{name}.toml", variant).cells(folder)


@pytest.mark.slow
@listed("experiment", SWEEPS, ids=lambda experiment: experiment.name)
def test_every_variant_is_a_sweep(experiment: Experiment, tmp_path: Path) -> None:
    full = cells(experiment.name, "", tmp_path)
    assert len(full) > 2
    of = {variant: cells(experiment.name, variant, tmp_path) for variant in experiment.variants}
    assert [variant for variant, found in of.items() if not found] == []
    for cell in of["small"]:
        assert cell.config.dataset in BUNDLED
        assert cell.config.rounds * cell.config.clients * cell.config.fraction <= 800
    assert max(cell.config.rounds for cell in full) >= max(cell.config.rounds for cell in of["small"])


PROGRAMS = ["../outside.py:run", "programs/fedbn_synthetic.py:nothing", "programs/none.py:run", "os:system", "torch.hub:load", "os"]


def test_a_program_is_a_function_in_a_file_beside_its_experiment(tmp_path: Path) -> None:
    for experiment in ALL:
        assert not experiment.program or callable(program_of(experiment))
    for wrong in PROGRAMS:
        with naming("FILE" if "programs" not in wrong else "programs", ConfigError):
            perform_program(replace(find(["001-F9"])[0], program=wrong), "small", "", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_names_a_paper_and_one_that_is_not_there() -> None:
    assert [e.name for e in find(["003-f1", "004-T3"])] == ["003-F1", "004-T3"]
    assert [e.name for e in find(["001-T1"])] == ["001-T1"]  # and not 001-T1-ABIDE, 001-T11
    assert [e.name for e in find(["003"])] == [e.name for e in ALL if e.name.startswith("003-")]
    assert all("small" in e.variants for e in ALL)
    with naming("'003-F99'", ConfigError):
        find(["003-F99"])


def test_a_program_runs_once_and_its_variant_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (experiment,) = find(["003-F1"])
    module = importlib.import_module("experiments.definitions.programs.normalisation_error")
    called: list[bool] = []
    monkeypatch.setattr(module, "run", lambda folder, small: called.append(small))
    for _ in range(2):
        perform_program(experiment, "small", "data", tmp_path / "out")
    assert called == [True]
    assert (tmp_path / "out" / "report.html").exists()
    with naming("'big'", ConfigError):
        perform_program(experiment, "big", "data", tmp_path / "other")


def on_command(folder: Path, *options: str) -> Result:
    """Run the small variant of an experiment that is a program."""
    return CliRunner().invoke(app, ["run", "own-unseen-domain", "--variant", "small", "--output", str(folder), *options])


@listed("error", [DataNotFound("no digits in nowhere"), PermissionError("no digits in nowhere")])
def test_a_program_whose_data_are_not_there_is_refused_in_a_sentence(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: Path) -> None:
        raise error

    monkeypatch.setattr(importlib.import_module("experiments.definitions.programs.unseen_domain"), "run", run)
    result = on_command(tmp_path)
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert "own-unseen-domain: no digits in nowhere" in result.output


@listed("given", [("--run-config", "rounds=1"), ("--only", "*seed0"), ("--results", "experiments"), ("--retry",)])
def test_options_of_sweeps_are_refused_for_a_program(given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(sweep_experiments, "perform_program", lambda experiment, *others: ran.append(experiment.name))
    result = on_command(tmp_path, *given)
    assert (result.exit_code, ran) == (2, [])
    assert f"{given[0]} can be given for sweeps" in " ".join(result.output.split())
    assert on_command(tmp_path, "--jobs", "0").exit_code == 0  # control: the default, written out
    assert ran == ["own-unseen-domain"]


def test_made_data_are_made_once_and_whole(tmp_path: Path) -> None:
    (experiment,) = find(["001-T1-ABIDE"])
    folder = data_of(experiment, "small", "elsewhere", tmp_path)
    files = sorted(Path(folder).rglob("*.npz"))
    assert len(files) == 4
    before = [file.stat().st_mtime_ns for file in files]
    assert data_of(experiment, "small", "elsewhere", tmp_path) == folder
    assert [file.stat().st_mtime_ns for file in files] == before
    assert data_of(experiment, "", "elsewhere", tmp_path) == "elsewhere"  # control: the paper's own data are not made
