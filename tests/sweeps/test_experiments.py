"""The papers' experiments: all of them are there, every variant is a sweep that could be run, the small ones stay small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.catalogue import FOLDER, Experiment, data_of, find, perform_program, program_of
from fl_bn.app.config import ConfigError
from fl_bn.app.sweep.cells import Cell
from fl_bn.app.sweep.file import read
from tests.listed import listed
from tests.refusals import naming

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


def test_names_a_paper_and_one_that_is_not_there() -> None:
    assert [e.name for e in find(["003-f1", "004-T3"])] == ["003-F1", "004-T3"]
    assert [e.name for e in find(["001-T1"])] == ["001-T1"]  # and not 001-T1-ABIDE, 001-T11
    assert [e.name for e in find(["003"])] == [e.name for e in ALL if e.name.startswith("003-")]
    assert all("small" in e.variants for e in ALL)
    with naming("'003-F99'", ConfigError):
        find(["003-F99"])


@pytest.mark.slow
def test_a_program_is_a_function_in_a_file_beside_its_experiment_and_runs_once(tmp_path: Path) -> None:
    assert all(callable(program_of(experiment)) for experiment in ALL if experiment.program)
    (experiment,) = find(["003-F1"])
    for wrong in ("../outside.py:run", "os:system"):
        with naming("FILE", ConfigError):
            perform_program(replace(experiment, program=wrong), "small", "", tmp_path / "out")
    with naming("'big'", ConfigError):
        perform_program(experiment, "big", "data", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    perform_program(experiment, "small", "data", tmp_path / "out")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()}
    assert tmp_path / "out" / "report.html" in before
    perform_program(experiment, "small", "data", tmp_path / "out")
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()} == before


def test_made_data_are_made_once_and_whole(tmp_path: Path) -> None:
    (experiment,) = find(["001-T1-ABIDE"])
    folder = data_of(experiment, "small", "elsewhere", tmp_path)
    before = {file: file.stat().st_mtime_ns for file in Path(folder).rglob("*.npz")}
    assert len(before) == 4
    assert data_of(experiment, "small", "elsewhere", tmp_path) == folder
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert data_of(experiment, "", "elsewhere", tmp_path) == "elsewhere"  # control: the paper's own data are not made
