"""The run's folder: rows of the right numbers, names that never collide, environment and summary."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_bn.federation.aggregation import Drift
from fl_bn.federation.clipping import PATH, STEP
from fl_bn.federation.record import ClientRecord, RoundRecord
from fl_bn.run.config import RunConfig
from fl_bn.run.environment import environment
from fl_bn.run.history import client_columns, client_rows, round_columns, round_row
from fl_bn.run.run_directory import RunDirectory
from fl_bn.run.summary import summary
from fl_bn.task import CLASSIFICATION


def records() -> list[RoundRecord]:
    """Three rounds: a usual one, a failed one, one evaluated at clients after the statistics froze."""
    first = RoundRecord(
        1, "train", 0.1, [ClientRecord(0, 10, 2, 1.0, 100, 60), ClientRecord(2, 30, 2, 2.0, 100, 60)], Drift(0.5, "norm", 0.01, 1.0)
    )
    first = replace(first, aggregated=True, bytes_down={"weights": 80, "statistics": 20}, bytes_up={"weights": 60}, seconds=0.25)
    failed = RoundRecord(2, "train", 0.1, [ClientRecord(0, bytes_down=100, refused="no reply, before the deadline")])
    last = RoundRecord(3, "frozen", 0.01, [ClientRecord(1, 10, 2, 0.5, 100, 60)], Drift(math.nan, "", math.inf, 1.0), aggregated=True)
    together = {"accuracy": 0.5, "accuracy-std": 0.1, "accuracy-min": 0.4, "loss": 1.5}
    own = {0: {"accuracy": 0.4, "loss": 1.0}, 1: {"accuracy": 0.6, "loss": math.inf}}
    last = replace(last, evaluation=together, client_evaluation=own)
    return [first, failed, last]


def test_the_row_of_a_round() -> None:
    first, failed, last = (round_row(record) for record in records())
    assert all(set(row) == set(round_columns(CLASSIFICATION)) for row in (first, failed, last))
    assert first["loss"] == 1.75  # (10 * 1 + 30 * 2) / 40
    assert (first["cohort"], first["accepted"], first["aggregated"], first["seconds"]) == (2, 2, True, 0.25)
    assert (first["bytes-down-weights"], first["bytes-down-statistics"], first["bytes-up-weights"], first["bytes-up-moments"]) == (
        80,
        20,
        60,
        0,
    )
    assert (first["drift"], first["drift-layer"], first["min-var"], first["accuracy"]) == (0.5, "norm", 0.01, None)
    assert (failed["accepted"], failed["aggregated"], failed["loss"], failed["drift"]) == (0, False, None, None)
    assert (last["accuracy"], last["accuracy-std"], last["accuracy-min"], last["test-loss"]) == (0.5, 0.1, 0.4, 1.5)
    assert (last["drift"], last["min-var"]) == (None, None)  # JSON knows no NaN
    for row in (first, failed, last):
        json.dumps(row, allow_nan=False)


def test_the_rows_of_clients() -> None:
    first, failed, last = (client_rows(record) for record in records())
    assert all(set(row) <= set(client_columns(CLASSIFICATION)) for rows in (first, failed, last) for row in rows)
    assert [row["client"] for row in first] == [0, 2]
    assert failed == [
        {
            "round": 2,
            "client": 0,
            "samples": 0,
            "steps": 0,
            "loss": None,
            "bytes-down": 100,
            "bytes-up": 0,
            "exchanges": 0,
            "waited": 0.0,
            "distance": None,
            "refused": "no reply, before the deadline",
        }
    ]
    assert [(row["client"], row.get("samples"), row["accuracy"], row["test-loss"]) for row in last] == [
        (0, None, 0.4, 1.0),
        (1, 10, 0.6, None),
    ]


def written(folder: Path, **values: object) -> RunDirectory:
    config = RunConfig.from_mapping({"output": str(folder), "pictures": False, "rounds": 3, "method": "hbn", **values})
    with RunDirectory.create(config) as directory:
        for record in records():
            directory.on_round(record, 3)
    return directory


def test_lines_are_there_as_soon_as_they_are_known(tmp_path: Path) -> None:
    config = RunConfig.from_mapping({"output": str(tmp_path), "name": "x", "pictures": False})
    with RunDirectory.create(config) as directory:
        for number, record in enumerate(records(), 1):
            directory.on_round(record, 3)
            assert len((tmp_path / "x" / "rounds.jsonl").read_text().splitlines()) == number
            assert len((tmp_path / "x" / "rounds.csv").read_text().splitlines()) == number + 1
    assert '"no reply, before the deadline"' in (tmp_path / "x" / "clients.csv").read_text()


def test_folders_without_a_name_never_collide(tmp_path: Path) -> None:
    names = [written(tmp_path).name for _ in range(3)]
    assert len(set(names)) == 3
    assert all("hbn-digits-seed0" in name for name in names)
    assert written(tmp_path, name="mine").path == (tmp_path / "mine").resolve()
    with pytest.raises(FileExistsError, match="mine exists already"):
        written(tmp_path, name="mine")


def test_the_error_that_ended_a_run_is_in_its_summary(tmp_path: Path) -> None:
    directory = RunDirectory.create(RunConfig.from_mapping({"output": str(tmp_path), "name": "x", "rounds": 60}))
    with pytest.raises(KeyboardInterrupt), directory:
        raise KeyboardInterrupt
    assert "**The run was interrupted** after 0 of 60 rounds." in (tmp_path / "x" / "summary.md").read_text()


def test_the_summary_counts_by_hand() -> None:
    text = summary(RunConfig.from_mapping({"rounds": 3, "method": "silobn"}), records())
    assert (
        "- accuracy after round 3: **50.0%** (mean over clients with models of their own; std 10.0%, min 40.0%); best 50.0% in round 3"
        in text
    )
    assert "- in all 580 B of arrays in 0.2 s of rounds" in text  # 160 + 160 + 100 + 160
    assert "smallest running variance 0.01; largest drift of a mean after round 1: 0.5 sd (norm)" in text
    assert "- 1 replies could not be used" in text


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, f"gradients clipped (round, {PATH:g})"),  # hbn
        ({"method": "fedavg"}, ""),
        ({"method": "fbn", "local-steps": 1}, f"gradients clipped (round, {STEP:g})"),
        ({"local-steps": 1}, ""),  # hbn
        ({"method": "fbn", "local-steps": 2}, f"gradients clipped (round, {PATH:g})"),
        ({"clip": "norm", "clip-limit": 0.5}, "gradients clipped (norm, 0.5)"),
        ({"method": "fixbn"}, ""),
    ],
)
def test_the_summary_says_how_gradients_were_clipped(values: dict[str, Any], said: str) -> None:
    text = summary(RunConfig.from_mapping({"method": "hbn", **values}), records())
    assert said in text
    assert ("clipped" in text) == bool(said)


def test_the_summary_says_what_the_run_was_tested_on() -> None:
    said = "tested on validation samples, 0.2 of every client's training data, and not on the test data"
    assert said in summary(RunConfig.from_mapping({"validation-share": 0.2}), records())
    assert "validation" not in summary(RunConfig(), records())


def test_the_environment_names_versions_and_commit() -> None:
    found = environment()
    assert found["packages"]["torch"][0].isdigit()
    assert found["cpus"] >= 1
    assert isinstance(found["commit"], str)
