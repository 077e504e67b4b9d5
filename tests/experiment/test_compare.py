"""Comparisons: variants from text, runs that are not repeated, failures that are reported, and a table checked by hand."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fl_bn.report import write_report
from fl_bn.sweep import cells as cells_module
from fl_bn.sweep.cells import Cell, run_cells
from fl_bn.sweep.compare import check_metric, comparison
from fl_bn.sweep.file import Sweep, parse
from tests.experiment.inside import kebab, parse_overrides, refusing, to_toml
from tests.listed import listed

DECIDED = ("output='x'", "name='mine'", "resume='latest'", "pictures=true", "method='gn'", "early-stop=2")
"""Keys that the comparison sets itself."""


@listed(
    ("text", "method", "overrides"),
    [
        ("fbn", "fbn", {}),
        (" centralised ", "centralised", {}),
        ("fbn:learning-rate=0.01;local-steps=1", "fbn", {"learning-rate": 0.01, "local-steps": 1}),
        ("gn:model='resnet18';deterministic=false", "gn", {"model": "resnet18", "deterministic": False}),
    ],
)
def test_a_variant_from_text(text: str, method: str, overrides: dict[str, Any]) -> None:
    assert compared(text).axes["method"] == {text.strip(): {"method": method, **overrides}}


def compared(*variants: str, seeds: Sequence[int] = (0,), **base: Any) -> Sweep:
    return comparison(variants, seeds, kebab(base), "a comparison")


def test_a_variants_config_is_the_base_with_its_own_keys(tmp_path: Path) -> None:
    (cell,) = compared("fbn:rounds=7;batch-size=8", seeds=[4], rounds=3, clients=2).cells(tmp_path)
    config = cell.config
    assert (config.method, config.rounds, config.batch_size, config.clients, config.seed) == ("fbn", 7, 8, 2, 4)
    assert (config.output, config.pictures) == (str(tmp_path / "runs"), False)
    assert "/" not in config.name
    (cell,) = compared("centralised").cells(tmp_path)
    assert (cell.config.method, cell.centralised) == ("fedavg", True)
    cells = compared("fbn", "gn", seeds=[3, 4], rounds=2).cells(tmp_path)
    assert [(cell.config.method, cell.config.seed) for cell in cells] == [("fbn", 3), ("gn", 3), ("fbn", 4), ("gn", 4)]
    assert len({cell.path for cell in cells}) == 4


@listed(
    ("variants", "base", "about"),
    [
        (["fbn:round=7"], {}, "'round'"),
        (["fbn", "fbn"], {}, "fbn"),
        (["fbn:rounds=1;clients=2", "fbn:rounds=1 clients=2"], {}, "folder"),  # they differ in punctuation alone
        (["fbn:seed=3"], {}, "seed"),
        (["fedavg", "gn:validation-share=0.3"], {"clients": 2}, "validation"),  # they would be tested on other samples
        (["fedavg", "gn:evaluate-on='training'"], {"clients": 2}, "training"),
        *((["fbn"], parse_overrides(key), key.partition("=")[0]) for key in DECIDED),
        *(([f"fbn:{key}"], {}, key.partition("=")[0]) for key in DECIDED),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(variants: list[str], base: dict[str, Any], about: str, tmp_path: Path) -> None:
    with refusing(about):
        check_metric(compared(*variants, **base).cells(tmp_path))


def test_control_other_keys_are_taken(tmp_path: Path) -> None:
    assert compared("fbn", rounds=3).keys == {"rounds": 3}
    check_metric(compared("fedavg", "gn", clients=2, validation_share=0.3).cells(tmp_path))
    assert [cell.centralised for cell in compared("fedavg", "centralised", client_weights="uniform").cells(tmp_path)] == [False, True]


def finish(cell: Cell, accuracies: list[float | None]) -> None:
    """What a run that reached these accuracies leaves behind; one of too few rounds was killed."""
    cell.path.mkdir(parents=True, exist_ok=True)
    (cell.path / "config.toml").write_text(to_toml(cell.config.to_mapping()))
    lines = [json.dumps({"round": number, "accuracy": value}) + "\n" for number, value in enumerate(accuracies, 1)]
    (cell.path / "rounds.jsonl").write_text("".join(lines))
    if len(accuracies) == cell.config.rounds:
        cell.write_outcome("finished", 1.0)


def cells(folder: Path, *variants: str, seeds: int = 2, rounds: int = 3) -> list[Cell]:
    return compared(*variants, seeds=range(seeds), rounds=rounds, evaluate_every=2).cells(folder)


class Threads(ThreadPoolExecutor):
    def __init__(self, jobs: int, mp_context: object, initializer: object) -> None:
        super().__init__(jobs)


def test_finished_cells_are_not_repeated_and_failing_ones_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run_cell(cell: Cell) -> None:
        ran.append(cell.config.name)
        if cell.config.method == "gn" and cell.config.seed == 1:
            raise ValueError("the disk is full")
        finish(cell, [None, 0.5, 0.6])

    monkeypatch.setattr(cells_module, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(cells_module, "run_cell", run_cell)
    planned, told = cells(tmp_path, "fbn", "gn"), list[tuple[int, int]]()
    finish(planned[0], [None, 0.1, 0.2])
    finish(planned[1], [None])
    assert run_cells(planned, 1, lambda done, total: told.append((done, total))) == {"gn-seed1": "ValueError: the disk is full"}
    assert ran == ["gn-seed0", "fbn-seed1", "gn-seed1"]
    assert told[-1] == (9, 12)
    run_cells(planned, 1, lambda done, total: None)
    assert ran[3:] == ["gn-seed1"]
    assert [cell.finished() for cell in planned] == [True, True, True, False]


def test_a_cell_that_another_process_runs_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "ProcessPoolExecutor", Threads)
    planned = cells(tmp_path, "fbn", seeds=1)
    with planned[0].held():
        assert run_cells(planned, 1, lambda done, total: None) == {}
    assert not planned[0].outcome()


def test_the_report_of_a_comparison_by_hand(tmp_path: Path) -> None:
    sweep = compared("fbn", "fedavg", "hbn", seeds=range(2), rounds=3, evaluate_every=2)
    (tmp_path / "sweep.toml").write_text(sweep.to_toml())
    values = {("fbn", 0): [0.2, 0.9, 0.7], ("fbn", 1): [0.2, 0.6, 0.8], ("fedavg", 0): [None, 0.5, 0.9], ("fedavg", 1): [None, 0.1, 0.8]}
    for cell in sweep.cells(tmp_path):
        if (key := (cell.config.method, cell.config.seed)) in values:
            finish(cell, values[key])  # type: ignore[arg-type]
        else:
            cell.write_outcome("failed", 1.0, "the disk is full")
    write_report(tmp_path)
    text = (tmp_path / "table.md").read_text()
    for line in ("| fbn | 75.0 (7.1) |", "| fedavg | **85.0** (7.1) |", "| hbn | failed |", "hbn-seed1: failed: the disk is full"):
        assert line in text  # fbn: 70, 80: mean 75, deviation 7.07
    with (tmp_path / "runs.csv").open() as file:
        rows = [(row["run"], row["status"], row["round"], row["accuracy"]) for row in csv.DictReader(file)]
    assert len(rows) == 4 * 3 + 2
    assert rows[:2] == [("fbn-seed0", "finished", "1", "0.2"), ("fbn-seed0", "finished", "2", "0.9")]
    assert ("hbn-seed1", "failed", "", "") in rows


def test_a_report_has_a_metric_that_its_runs_measure_or_may_measure() -> None:
    def reported(metric: str, **run: Any) -> Sweep:
        return parse({"run": {"rounds": 1, **run}, "report": {"metric": metric}}, "a sweep", "", "", {})

    with refusing("'acuracy'", "accuracy"):
        reported("acuracy")
    for metric in ("accuracy", "test-loss", "gigabytes", "accuracy-std", "mean-iou", "drift"):
        assert reported(metric)
    assert reported("acuracy", task="package.module:function"), "a task of one's own may have any metric"
