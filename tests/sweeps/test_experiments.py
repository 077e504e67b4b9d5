"""The papers' experiments: all of them are there, every variant is a sweep that could be run, the small ones stay small."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments import catalogue as sweep_experiments
from experiments.catalogue import FOLDER, Experiment, data_of, find, perform_program, program_of
from experiments.cli import experiments as app
from experiments.definitions.programs import recalibration_study
from experiments.pages import write_index, write_program_page
from tests.integration.runs import TINY, tiny
from tests.listed import listed
from tests.refusals import naming
from tests.sweeps.inner import Cell, ConfigError, DataNotFound, RunConfig, read

EXPECTED = {
    "000": "T1 T2 T3 T4 T5 TH TI F1 F2 F2c F3 F3-TinyImageNet FD FE FG FH FI FJ FK FL FM S33",
    "001": "F1 F2 F3 F4a F4c F7 F9 T1 T1-ABIDE T11 T12 T13 T14 T15 T16 T17",
    "002": "T1 T2 T3 T4 T5 T6 F5 F6",
    "003": "F1 F2 F3 F4 F5 F6 F7 F8 F9 F10 F11 F12 F13",
    "004": "T1 T2 T3 T4 F4 F5 F6 F7 F8 F10 F11 F12 F14",
    "own": "fedtan gradient-deviation local-steps loss-curves pretrained recalibration robust-updates similarity unseen-domain what-stays",
}
ALL = find()
SWEEPS = [experiment for experiment in ALL if not experiment.program]
BUNDLED = ("digits", "digits-plain", "cityscapes", "abide")  # the last two are made: experiments/data/made.py


def cells(name: str, variant: str, folder: Path) -> list[Cell]:
    return read(FOLDER / f"{name}.toml", variant).cells(folder)


def test_every_table_and_figure_has_its_file() -> None:
    wanted = {f"{paper}-{name}" for paper, names in EXPECTED.items() for name in names.split()}
    assert {experiment.name for experiment in ALL} == wanted
    assert all("small" in experiment.variants for experiment in ALL)


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
    assert {e.name for e in find(["own"])} == {f"own-{name}" for name in EXPECTED["own"].split()}
    assert [e.name for e in find(["003"])] == sorted(f"003-{name}" for name in EXPECTED["003"].split())
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


@listed("error", [DataNotFound("no digits in nowhere"), PermissionError("no digits in nowhere")])
def test_a_program_whose_data_are_not_there_is_refused_in_a_sentence(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: Path) -> None:
        raise error

    monkeypatch.setattr(importlib.import_module("experiments.definitions.programs.unseen_domain"), "run", run)
    result = CliRunner().invoke(app, ["run", "own-unseen-domain", "--variant", "small", "--output", str(tmp_path)])
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert "own-unseen-domain: no digits in nowhere" in result.output


@listed("given", [("--run-config", "rounds=1"), ("--only", "*seed0"), ("--results", "experiments"), ("--retry",)])
def test_options_of_sweeps_are_refused_for_a_program(given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(sweep_experiments, "perform_program", lambda experiment, *others: ran.append(experiment.name))
    command = ["run", "own-unseen-domain", "--variant", "small", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, [*command, *given])
    assert (result.exit_code, ran) == (2, [])
    assert f"{given[0]} can be given for sweeps" in " ".join(result.output.split())
    assert CliRunner().invoke(app, [*command, "--jobs", "0"]).exit_code == 0  # control: the default, written out
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


def test_the_page_of_a_program_has_its_pictures_and_links_to_its_tables(tmp_path: Path) -> None:
    source = tmp_path / "x.toml"
    source.write_text('# What <it> is.\ntitle = "A & B"\n')
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "some_picture.png").write_bytes(b"")
    (folder / "numbers.csv").write_text("n\n")
    page = write_program_page(folder, source).read_text()
    for said in ("A &amp; B", "What &lt;it&gt; is.", 'src="some_picture.png"', 'href="numbers.csv"'):
        assert said in page
    assert 'href="out/report.html"' in write_index([folder], tmp_path / "index.html").read_text()


def test_a_recalibration_that_was_interrupted_is_done_anew(tmp_path: Path) -> None:
    source = tiny(tmp_path, "fedavg", rounds=1)
    cell = Cell(RunConfig.from_mapping({**TINY, "rounds": 1, "output": str(tmp_path), "name": source.name}), {"split": "IID", "seed": 0})
    whole = recalibration_study.recalibrated(cell)
    assert len(whole) > 1
    again = tmp_path / "fedavg-recalibrated"
    rounds, ended = again / "rounds.jsonl", (again / "cell.json").stat().st_mtime_ns
    assert recalibration_study.recalibrated(cell) == whole
    assert (again / "cell.json").stat().st_mtime_ns == ended  # control: it is not repeated
    for summary in (True, False):  # Ctrl-C writes one, a power cut does not
        rounds.write_text(rounds.read_text().splitlines(keepends=True)[0])
        (again / "cell.json").unlink()
        if not summary:
            (again / "summary.md").unlink()
        assert recalibration_study.recalibrated(cell) == whole
