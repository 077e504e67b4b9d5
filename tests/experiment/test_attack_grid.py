"""The attack grid: its cells, its tables checked by hand, its pictures, and one of it from the command line."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fl_bn.flower.compat import LOGGER
from fl_bn.sweep import cells as cells_module
from fl_bn.sweep.attack_grid import (
    COLUMNS,
    Grid,
    Score,
    Scores,
    Setting,
    grid_sweep,
    read_scores,
    run_grid,
    table,
)  # fmt: skip
from fl_bn.sweep.cells import Cell
from fl_bn.sweep.file import Sweep
from fl_bn.sweep.run import Place, plan, run
from tests.experiment.inside import RunConfig, ends_well, ends_with_a_sentence, override, refusing
from tests.experiment.small_data import small_config
from tests.experiment.test_compare import Threads, finish
from tests.listed import listed

GRID = Grid(["fbn"], [1.0, 0.1], [2], ["mean", "nnm+median"], ["sign-flip", "foe"])


def grid_cells(settings: list[Setting], folder: Path, seeds: Sequence[int] = (0,), **base: Any) -> list[Cell]:
    return grid_sweep(settings, seeds, base, "a grid").cells(folder)


def score(last: float, best: float = 90.0, std: float = 1.0, seeds: int = 2) -> Score:
    return Score(last, std, best, seeds)


# The axes


# The cells


@listed("key", ["output", "method", "attack", "update-rule", "max-failed-rounds"])
def test_a_key_that_the_grid_decides_is_refused(key: str) -> None:
    with refusing(key):
        grid_sweep(GRID.settings(), [0], {key: "x"}, "a grid")
    assert grid_sweep(GRID.settings(), [0], {"rounds": 3}, "a grid").keys["rounds"] == 3  # control


def test_every_row_has_its_clean_run_its_defence_alone_and_all_attacks_and_no_run_is_made_twice() -> None:
    settings = GRID.settings()
    assert len(set(settings)) == len(settings)
    for h in GRID.heterogeneity:
        expected = [
            Setting("fbn", h, 2, 0, "mean", "none"),
            Setting("fbn", h, 2, 2, "mean", "none"),
            Setting("fbn", h, 2, 2, "nnm+median", "none"),
        ]
        expected += [Setting("fbn", h, 2, 2, rule, attack) for rule in GRID.rules for attack in GRID.attacks]
        assert {s for s in settings if s.heterogeneity == h} == set(expected)
    assert len(settings) == 2 * 7
    assert len(Grid(["fbn", "fedavg"], [0.0], [1, 2], ["mean"], ["foe"]).settings()) == 2 * 2 * 3


@listed(("rule", "statistics", "updates"), [("mean", "mean", "mean"), ("nnm+median/krum", "nnm+median", "krum")])
def test_a_settings_config(rule: str, statistics: str, updates: str, tmp_path: Path) -> None:
    (cell,) = grid_cells([Setting("fbn", 0.1, 2, 1, rule, "foe")], tmp_path, [5], **{"rounds": 7, "learning-rate": 0.2})
    made = cell.config
    assert (made.method, made.partition, made.partition_parameter, made.seed) == ("fbn", "similarity", 0.1, 5)
    assert (made.byzantine, made.declared_byzantine, made.attack) == (2, 1, "foe")
    assert (made.statistics_rule, made.update_rule) == (statistics, updates)
    assert (made.rounds, made.max_failed_rounds, made.learning_rate) == (7, 7, 0.2)
    assert made.name == f"fbn-0.1-f2_told1_{rule.replace('/', '_')}_foe-seed5"
    assert (made.output, made.pictures) == (str((tmp_path / "runs").resolve()), False)
    (cell,) = grid_cells([Setting("fbn", 0.1, 0, 0, "mean", "none")], tmp_path, partition="dirichlet")
    assert cell.config.partition == "dirichlet"


# The scores


def test_scores_are_means_over_finished_seeds_in_percent(tmp_path: Path) -> None:
    setting, other = GRID.settings()[:2]
    cells = grid_cells([setting, other], tmp_path, [0, 1, 2], rounds=3)
    of = {(cell.axes["attackers"], cell.config.seed): cell for cell in cells}
    finish(of[setting.place["attackers"], 0], [0.2, 0.9, 0.7])
    finish(of[setting.place["attackers"], 1], [0.6, None, 0.5])
    finish(of[setting.place["attackers"], 2], [0.1])  # was interrupted
    scores = read_scores([setting, other], cells)
    assert list(scores) == [setting]
    got = scores[setting]
    assert (got.last, got.best, got.seeds) == (pytest.approx(60), pytest.approx(75), 2)
    assert got.std == pytest.approx(math.sqrt(200))  # of 70 and 50
    finish(of[other.place["attackers"], 1], [None, 0.25, 0.25])
    finish(of[other.place["attackers"], 2], [None, None, None])  # every client failed to evaluate its own model, say
    assert read_scores([setting, other], cells)[other] == Score(25.0, 0.0, 25.0, 1)


BY_HAND: Scores = {
    Setting("fbn", 1.0, 2, 0, "mean", "none"): score(95),
    Setting("fbn", 1.0, 2, 2, "mean", "none"): score(94),
    Setting("fbn", 1.0, 2, 2, "nnm+median", "none"): score(91),
    Setting("fbn", 1.0, 2, 2, "mean", "sign-flip"): score(30, best=70, std=5.0),
    Setting("fbn", 1.0, 2, 2, "mean", "foe"): score(10, best=75, std=2.0, seeds=1),
    Setting("fbn", 1.0, 2, 2, "nnm+median", "sign-flip"): score(80, best=85),
    Setting("fbn", 1.0, 2, 2, "nnm+median", "foe"): score(84, best=84.5),
    Setting("fbn", 1.0, 2, 1, "nnm+median", "sign-flip"): score(44),
    Setting("fbn", 1.0, 2, 1, "nnm+median", "foe"): score(1),  # not the worst one's: not shown
}


def test_the_table_by_hand() -> None:
    values = [tuple(row.values()) for row in table(GRID, BY_HAND)]
    assert values == [
        ("fbn", 1.0, 2, "mean", 95, 94, 20, "foe", 10, 2.0, 70, None, 1),
        ("fbn", 1.0, 2, "nnm+median", 95, 91, 82, "sign-flip", 80, 1.0, 84.5, 44, 2),
        ("fbn", 0.1, 2, "mean", None, None, None, None, None, None, None, None, 0),
        ("fbn", 0.1, 2, "nnm+median", None, None, None, None, None, None, None, None, 0),
    ]
    assert all(tuple(row) == COLUMNS for row in table(GRID, BY_HAND))


def read(file: Path) -> list[list[str]]:
    with file.open(newline="") as source:
        return list(csv.reader(source))


# Running it


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs in this process; what a worker's end would close is closed here."""
    made: list[logging.Handler] = []

    class Kept(logging.FileHandler):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(cells_module, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(cells_module.logging, "FileHandler", Kept)
    monkeypatch.setattr(LOGGER, "handlers", [])
    yield
    for handler in made:
        handler.close()


@pytest.mark.parametrize("too_few", [True, False])
def test_a_run_of_the_grid(too_few: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_threads: None) -> None:
    """Seed by seed; then the rules told of one too few; a cell that fails is reported and missing from the scores."""
    ran: list[RunConfig] = []

    def run_cell(cell: Cell) -> None:
        ran.append(cell.config)
        if cell.config.attack == "foe" and cell.config.seed == 1:
            cell.write_outcome("failed", 0.0, "ValueError: the disk is full")
            raise ValueError("the disk is full")
        finish(cell, [0.5 if cell.config.attack == "none" else 0.3 if cell.config.attack == "sign-flip" else 0.1])

    monkeypatch.setattr(cells_module, "run_cell", run_cell)
    grid = Grid(["fbn"], [1.0], [2], ["mean", "nnm+median"], ["sign-flip", "foe"])

    def perform(sweep: Sweep, retry: bool) -> dict[str, str]:
        return run(sweep, plan(sweep, tmp_path, retry=retry), tmp_path, Place(jobs=1), lambda done, total: None)

    scores, errors = run_grid(grid, [0, 1], {"rounds": 1}, "a grid", tmp_path, perform, too_few)
    few = [Setting("fbn", 1.0, 2, 1, "nnm+median", "foe")] if too_few else []
    assert [config.seed for config in ran] == [0] * 7 + [1] * 7 + [0, 1] * len(few)
    assert set(scores) == {*grid.settings(), *few}
    foes = [f"fbn-1-f2_told2_{rule}_foe-seed1" for rule in grid.rules] + ["fbn-1-f2_told1_nnm+median_foe-seed1"] * len(few)
    assert errors == dict.fromkeys(foes, "ValueError: the disk is full")
    assert scores[Setting("fbn", 1.0, 2, 2, "mean", "foe")] == Score(10.0, 0.0, 10.0, 1)
    count = len(ran)
    run_grid(grid, [0, 1], {"rounds": 1}, "a grid", tmp_path, perform, too_few)
    assert len(ran) - count == len(errors)  # what finished is not repeated


def test_a_tiny_grid_from_the_command_line(tmp_path: Path, in_threads: None) -> None:
    args = ["--methods", "fbn", "--heterogeneity", "1", "--byzantine", "1", "--rules", "mean,nnm+median", "--attacks", "foe,nan"]
    where = ["--seeds", "1", "--jobs", "1", "--output", tmp_path / "out", "--run-config", override(small_config(tmp_path))]
    assert "Test accuracy in percent" in ends_well("attack-grid", *args, *where)
    rows = read(tmp_path / "out" / "table.csv")
    assert [row[3] for row in rows[1:]] == ["mean", "nnm+median"]
    assert all("-" not in row[4:11] for row in rows[1:])
    assert [row[11] == "-" for row in rows[1:]] == [True, False]
    assert len(read(tmp_path / "out" / "cells.csv")) == 1 + 3 + 4 + 1
    runs = tmp_path / "out" / "runs"
    defended = read(runs / "fbn-1-f1_told1_nnm+median_foe-seed0" / "clients.csv")
    distance = defended[0].index("distance")
    assert all(float(row[distance]) > 0 for row in defended[1:])
    refused = read(runs / "fbn-1-f1_told1_nnm+median_nan-seed0" / "clients.csv")
    assert "not finite" in ",".join(refused[-1])
    with Image.open(tmp_path / "out" / "heat-map-f1-best.png") as image:
        assert min(image.size) > 100


@listed(
    ("args", "about"),
    [
        (["--methods", ""], "methods"),
        (["--methods", "nope"], "method"),
        (["--rules", " , "], "rules"),
        (["--attacks", ","], "attacks"),
        (["--heterogeneity", "0.1,few"], "heterogeneity"),
        (["--byzantine", "1.5"], "byzantine"),
        (["--byzantine", ""], "byzantine"),
        (["--byzantine", "0"], "byzantine=0"),
        (["--byzantine", "5"], "n=10"),
        (["--rules", "medain"], "statistics-rule"),
        (["--run-config", "roundz=3"], "'roundz'"),
    ],
)
def test_bad_input_ends_with_a_sentence_before_anything_runs(args: list[str], about: str, tmp_path: Path) -> None:
    ends_with_a_sentence("attack-grid", "--output", tmp_path / "out", *args, about=about)
    assert not (tmp_path / "out").exists()
