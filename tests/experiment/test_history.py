"""The run's folder: rows of the right numbers, files that grow by whole lines, names that never collide, summary, disclosures, pictures."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from fl_bn.federation.gradients import PATH, STEP
from fl_bn.federation.record import named_series, series
from fl_bn.run.disclosure_report import COLUMNS, DisclosureTotals, disclosure_csv, disclosure_table
from fl_bn.run.history import SECTIONS, History, client_rows, record_of, round_columns, round_line, round_row
from fl_bn.run.pictures import draw_labels, draw_run
from fl_bn.run.summary import summary
from fl_bn.task import CLASS, CLASSIFICATION
from tests.experiment.inside import ClientRecord, Disclosure, Drift, RoundRecord, RunConfig, RunDirectory, config, refusing
from tests.listed import listed


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
    return [first, failed, replace(last, evaluation=together, client_evaluation=own)]


# Rows by hand, and lines that are read back


def test_the_rows_of_rounds_and_of_clients() -> None:
    first, failed, last = (round_row(record) for record in records())
    assert all(set(row) == set(round_columns(CLASSIFICATION)) for row in (first, failed, last))
    assert first["loss"] == 1.75  # (10 * 1 + 30 * 2) / 40
    assert (first["cohort"], first["accepted"], first["aggregated"], first["seconds"]) == (2, 2, True, 0.25)
    assert [first[f"bytes-{way}"] for way in ("down-weights", "down-statistics", "up-weights", "up-moments")] == [80, 20, 60, 0]
    assert (first["drift"], first["drift-layer"], first["min-var"], first["accuracy"]) == (0.5, "norm", 0.01, None)
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


def line_of(record: RoundRecord) -> dict[str, object]:
    """As rounds.jsonl has it."""
    return json.loads(json.dumps(round_line(record), allow_nan=False))  # type: ignore[no-any-return]


NUMBERS = st.one_of(st.floats(0, 1e6), st.floats(allow_nan=True, allow_infinity=True))
BESIDE = dict.fromkeys(["accuracy-std", "loss", "mean-iou", *named_series(CLASS, [0.0] * 3)], NUMBERS)
CLIENTS = st.builds(
    ClientRecord,
    client=st.integers(0, 5),
    samples=st.integers(0, 99),
    steps=st.integers(0, 9),
    loss=NUMBERS,
    bytes_down=st.integers(0, 10**9),
    exchanges=st.integers(0, 20),
    waited=st.floats(0, 100),
    distance=NUMBERS,
    refused=st.sampled_from(["", 'no "reply", before\nthe deadline', "ünï"]),
)
RECORDS = st.builds(
    RoundRecord,
    round=st.integers(1, 10**6),
    phase=st.sampled_from(["train", "frozen", "exchange"]),
    learning_rate=st.floats(1e-9, 10),
    clients=st.lists(CLIENTS, max_size=4, unique_by=lambda c: c.client).map(lambda cs: sorted(cs, key=lambda c: c.client)),
    drift=st.none() | st.builds(Drift, NUMBERS, st.sampled_from(["", "norm"]), NUMBERS, NUMBERS),
    bytes_up=st.dictionaries(st.sampled_from(SECTIONS), st.integers(0, 10**9)),
    carrier=st.sampled_from(["", "grpc", "local"]),
    aggregated=st.booleans(),
    seconds=st.floats(0, 1e5),
    evaluation=st.just({}) | st.fixed_dictionaries({"accuracy": st.floats(0, 1)}, optional=BESIDE),
    client_evaluation=st.dictionaries(st.integers(0, 5), st.fixed_dictionaries({"accuracy": st.floats(0, 1), "loss": NUMBERS}), max_size=4),
)


@settings(max_examples=120)
@given(record=RECORDS)
@example(RoundRecord(1, "train", 0.1, [ClientRecord(n, 1, 1, loss, 0, 0, 0, 0.0, 1.5) for n, loss in enumerate([0.5, math.inf])]))
def test_a_line_read_back_says_the_same_line_again(record: RoundRecord) -> None:
    line = line_of(record)
    assert line_of(record_of(line)) == line
    assert (line["per-class"] is None) == (not series(record.evaluation, CLASS))


# Growing, and cutting


def written(folder: Path, records: Sequence[RoundRecord], history: History | None = None) -> History:
    folder.mkdir(exist_ok=True)
    made = history or History(folder)
    if history is None:
        made.begin()
    for record in records:
        made.add(record)
        assert all((folder / file).read_bytes().endswith(b"\n") for file in History.FILES if (folder / file).stat().st_size)
    return made


def contents(folder: Path) -> dict[str, str]:
    return {file: (folder / file).read_text() for file in History.FILES}


@settings(max_examples=25)
@given(records=st.lists(RECORDS, min_size=1, max_size=5), back_to=st.integers(0, 4), torn=st.booleans())
def test_a_cut_forgets_the_rounds_since_and_the_next_are_written_in_their_place(
    records: list[RoundRecord], back_to: int, torn: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    records = [replace(record, round=number) for number, record in enumerate(records, 1)]
    whole, parts = (tmp_path_factory.mktemp(name) for name in ("whole", "parts"))
    written(whole, records)
    made = written(parts, records[:back_to])
    with pytest.MonkeyPatch.context() as patch:  # a disk that fails to sync: no line is written twice
        patch.setattr("fl_bn.run.history.os.fsync", lambda descriptor: os.close(-1) if torn else None)
        with suppress(OSError):
            made.lengths()
    lengths = made.lengths()
    written(parts, records[back_to : back_to + 2], made)
    for file in History.FILES if torn else ():
        with (parts / file).open("a") as tail:
            tail.write('99,"half a li')
    again = History(parts)
    assert [line_of(record) for record in again.cut(lengths)] == [line_of(record) for record in records[:back_to]]
    written(parts, records[back_to:], again)
    assert contents(parts) == contents(whole)


# The folder


def test_folders_without_a_name_never_collide(tmp_path: Path) -> None:
    def made(name: str = "") -> Path | None:
        with RunDirectory.create(config(output=str(tmp_path), pictures=False, method="hbn", name=name)) as directory:
            return directory.path

    paths = {made() for _ in range(3)}
    assert len(paths) == 3
    assert all("hbn-digits-seed0" in str(path) for path in paths)
    assert made("mine") == (tmp_path / "mine").resolve()
    with refusing("mine", by=FileExistsError):
        made("mine")


OF_SITES = {"dataset": "sites", "classes": 2, "channels": 1, "image_size": 8}


@listed(
    ("values", "said"),
    [
        ({"method": "silobn"}, "accuracy after round 3: **50.0%** (mean over clients with models of their own; std 10.0%, min 40.0%)"),
        (OF_SITES, "(mean over clients on test data of their own; std 10.0%, min 40.0%)"),
        (OF_SITES, "clients, each site's own data, model"),
        ({}, "in all 580 B of arrays in 0.2 s of rounds"),  # 160 + 160 + 100 + 160
        ({}, "smallest running variance 0.01; largest drift of a mean after round 1: 0.5 sd (norm)"),
        ({}, "1 replies could not be used"),
        ({"validation_share": 0.2}, "tested on validation samples"),
        ({"method": "hbn"}, f"gradients clipped (round, {PATH:g})"),
        ({"method": "fbn", "local_steps": 1}, f"gradients clipped (round, {STEP:g})"),
        ({"clip": "norm", "clip_limit": 0.5}, "gradients clipped (norm, 0.5)"),
    ],
)
def test_the_summary_counts_by_hand_and_says_how_the_run_was_made(values: dict[str, Any], said: str) -> None:
    assert said in summary(config({"rounds": 3, **values}), records())
    assert not {"clipped", "validation"} & {*summary(config(method="fedavg"), records()).split()}  # control


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


# Pictures


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that would be saved."""
    figures = list[Figure]()
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: figures.append(figure))
    return figures


def record(round: int, rate: float, phase: str = "train") -> RoundRecord:
    made = RoundRecord(round, phase, rate, [ClientRecord(0, 10, 2, 1.0 / round)], Drift(0.5 / round, "norm", 0.1, 1.0), aggregated=True)
    return replace(made, evaluation={"accuracy": 0.1 * round})


def test_every_line_and_area_of_a_run_says_what_it_is(drawn: list[Figure], tmp_path: Path) -> None:
    records = [*(record(n, 0.1) for n in (1, 2, 3)), *(record(n, 0.01, "frozen") for n in (4, 5, 6))]
    draw_run(RunConfig(), records, tmp_path / "accuracy.png")
    draw_run(RunConfig(), records[:3], tmp_path / "plain.png")  # control
    top = [figure.axes[0] for figure in drawn]
    assert [axes.get_ylabel().replace("\n", " ") for axes in drawn[0].axes] == [
        "test accuracy (%)", "training loss (clients)", "largest drift of a mean (sd)", "smallest variance"
    ]  # fmt: skip
    assert [axes.get_title(loc="right") for axes in top] == ["grey: statistics frozen", ""]
    assert [[text.get_text() for text in axes.texts] for axes in top] == [["60.0%"], ["30.0%"]]
    places = [axes.get_position().bounds[:2] for axes in drawn[0].axes]
    assert len({round(y, 3) for _, y in places}) == 4  # no axes upon others


def test_labels_are_bars_one_upon_the_other(drawn: list[Figure], tmp_path: Path) -> None:
    draw_labels({0: (3, 0, 5), 1: (0, 0, 2)}, RunConfig(), tmp_path / "labels.png")
    (axes,) = drawn[0].axes
    bars = [(bar.get_y(), bar.get_height()) for container in axes.containers for bar in container]  # type: ignore[attr-defined]
    assert bars == [(0, 3), (0, 0), (3, 0), (0, 0), (3, 5), (0, 2)]  # class by class, client by client
