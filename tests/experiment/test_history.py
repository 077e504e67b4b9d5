"""The run's folder: rows of the right numbers, names that never collide, summary, disclosures."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from fl_bn.app.disclosure_report import COLUMNS, DisclosureTotals, disclosure_csv, disclosure_table
from fl_bn.app.history import client_rows, record_of, round_columns, round_line, round_row
from fl_bn.app.pictures import course
from fl_bn.app.summary import summary
from fl_bn.federation.gradients import PATH
from fl_bn.federation.record import named_series
from fl_bn.task import CLASS, CLASSIFICATION
from tests.experiment.inside import ClientRecord, Disclosure, Drift, RoundRecord, RunDirectory, config
from tests.listed import listed


def records() -> list[RoundRecord]:
    """Three rounds: a usual one, a failed one, one evaluated at clients after the statistics froze."""
    first = RoundRecord(
        1, "train", 0.1, [ClientRecord(0, 10, 2, 1.0, 100, 60), ClientRecord(2, 30, 2, 2.0, 100, 60)], Drift(0.5, "norm", 0.01, 1.0)
    )
    first = replace(first, aggregated=True, bytes_down={"weights": 80, "statistics": 20}, bytes_up={"weights": 60}, seconds=0.25)
    failed = RoundRecord(2, "train", 0.1, [ClientRecord(0, bytes_down=100, refused="no reply, before the deadline")])
    last = RoundRecord(3, "frozen", 0.01, [ClientRecord(1, 10, 2, 0.5, 100, 60)], Drift(math.nan, "", math.inf, 1.0), aggregated=True)
    together = {"accuracy": 0.5, "accuracy-std": 0.1, "accuracy-min": 0.4, "loss": 1.5, **named_series(CLASS, [0.25, math.nan])}
    own = {0: {"accuracy": 0.4, "loss": 1.0}, 1: {"accuracy": 0.6, "loss": math.inf}}
    return [first, failed, replace(last, evaluation=together, client_evaluation=own)]


def test_the_rows_of_rounds_and_of_clients() -> None:
    first, failed, last = (round_row(record) for record in records())
    assert all(set(row) == set(round_columns(CLASSIFICATION)) for row in (first, failed, last))
    assert first["loss"] == 1.75  # (10 * 1 + 30 * 2) / 40
    assert (first["cohort"], first["accepted"], first["aggregated"], first["seconds"]) == (2, 2, True, 0.25)
    assert [first[f"bytes-{way}"] for way in ("down-weights", "down-statistics", "up-weights", "up-moments")] == [80, 20, 60, 0]
    assert (first["drift"], first["min-var"], first["accuracy"]) == (0.5, 0.01, None)
    assert (failed["accepted"], failed["aggregated"], failed["loss"], failed["drift"]) == (0, False, None, None)
    assert (last["accuracy"], last["accuracy-std"], last["accuracy-min"], last["test-loss"]) == (0.5, 0.1, 0.4, 1.5)
    assert (last["drift"], last["min-var"]) == (None, None)  # JSON knows no NaN
    of_clients = [client_rows(record) for record in records()]
    assert [row["client"] for row in of_clients[0]] == [0, 2]
    (refused,) = of_clients[1]
    assert (refused["loss"], refused["bytes-down"], refused["refused"]) == (None, 100, "no reply, before the deadline")
    assert [(row["client"], row.get("samples"), row["accuracy"], row["test-loss"]) for row in of_clients[2]] == [
        (0, None, 0.4, 1.0), (1, 10, 0.6, None),
    ]  # fmt: skip
    for record in records():
        line = json.dumps(round_line(record), allow_nan=False)  # as rounds.jsonl has it
        assert json.dumps(round_line(record_of(json.loads(line)))) == line


def test_folders_without_a_name_never_collide(tmp_path: Path) -> None:
    paths = set()
    for _ in range(3):
        with RunDirectory.create(config(output=str(tmp_path), pictures=False, method="hbn")) as directory:
            paths.add(directory.path)
    assert len(paths) == 3
    assert all("hbn-digits-seed0" in str(path) for path in paths)


OF_SITES = {"dataset": "sites", "classes": 2, "channels": 1, "image_size": 8}


@listed(
    ("values", "said"),
    [
        ({"method": "silobn"}, "accuracy after round 3: **50.0%** (mean over clients with models of their own; std 10.0%, min 40.0%)"),
        (OF_SITES, "clients, each site's own data, model"),
        ({}, "in all 580 B of arrays in 0.2 s of rounds"),  # 160 + 160 + 100 + 160
        ({}, "smallest running variance 0.01; largest drift of a mean after round 1: 0.5 sd (norm)"),
        ({"method": "hbn"}, f"gradients clipped (round, {PATH:g})"),
    ],
)
def test_the_summary_counts_by_hand_and_says_how_the_run_was_made(values: dict[str, Any], said: str) -> None:
    assert said in summary(config({"rounds": 3, **values}), records())


def test_the_course_of_a_run_has_a_panel_per_measurement_and_numbers_at_its_ticks() -> None:
    first, failed, last = records()
    figure = course(config({"rounds": 3}), [first, failed, replace(last, drift=Drift(0.02, "norm", 0.001, 1.0))]).figure
    figure.canvas.draw()
    labels = [[label.get_text() for label in axes.get_yticklabels()] for axes in figure.axes]
    assert [axes.get_ylabel().split()[0] for axes in figure.axes] == ["test", "training", "largest", "smallest"]
    bands = [(len(axes.collections), len(axes.patches)) for axes in figure.axes]
    assert bands == [(1, 1), (0, 1), (0, 1), (0, 1)]  # of clients, of frozen rounds
    shown = [label for label in labels[3] if label]
    assert len({*map(float, shown)}) == len(shown) > 0
    assert "$" not in str(labels)


# disclosure.csv, and its table in the summary


def test_kinds_add_up_and_keep_the_smallest() -> None:
    left, moments = DisclosureTotals(), Disclosure(0, "moments", "m", 3, 10, 5, 50)
    for round, disclosures in enumerate(([replace(moments, samples=9)] * 2, [moments, Disclosure(1, "weights", "w", 2, 7)], [moments]), 1):
        left.add(RoundRecord(round, "train", 0.1, disclosures=disclosures))
    found = left.kinds({0: (1, 2), 1: ()})
    assert disclosure_csv(found).splitlines() == [
        ",".join(COLUMNS),
        "0,introduction,samples per class,1,1,1,6,,,,",
        "0,moments,m,3,4,3,40,5,50,2,fewer than 8 samples",
        "1,weights,w,2,1,1,7,,,,",
    ]
    text = "\n".join(disclosure_table(found))
    assert "| moments | m | 1 | 3 | 40 B | 3 | 5 (client 0, round 2) |" in text
    assert text.count("**warning**") == 1
    assert "client 0 revealed statistics of 5 samples in round 2" in text
