"""The run's folder: rows of the right numbers, files that grow by whole lines whatever the disk does, names that never collide, summary."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fl_bn.federation.gradients import PATH, STEP
from fl_bn.federation.record import named_series, series
from fl_bn.run.disclosure_report import COLUMNS, DisclosureTotals, Kind, disclosure_csv, disclosure_table
from fl_bn.run.history import SECTIONS, History, client_rows, record_of, round_columns, round_line, round_row
from fl_bn.run.summary import summary
from fl_bn.task import CLASS, CLASSIFICATION
from tests.experiment.inside import ClientRecord, Disclosure, Drift, RoundRecord, RunDirectory, config, refusing
from tests.experiment.resuming import run, small_run
from tests.integration.runs import table
from tests.listed import listed

LINES = "rounds.jsonl"


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


def rich() -> list[RoundRecord]:
    """Every kind of round: those of ``records``, one of an exchange, one that diverged, and one without any client."""
    clients = [ClientRecord(n, 5, 2, 0.3, 100, 60, 4, 0.25, 1.5) for n in range(2)]
    exchange = replace(
        RoundRecord(4, "exchange", 0.02, clients, Drift(0.25, "norm", 0.5, 1.0)),
        **{"carrier": "grpc", "exchanges": 4, "aggregated": True, "seconds": 1.25, "bytes_up": {"weights": 10, "exchange": 20}},
        evaluation={"accuracy": 0.75, "loss": 0.5},
    )
    diverged = RoundRecord(5, "train", 0.02, [ClientRecord(0, 5, 2, math.inf)], Drift(math.inf, "norm", math.nan, math.inf))
    diverged = replace(diverged, aggregated=True, evaluation={"accuracy": 0.1, "loss": math.nan})
    return [*records(), exchange, diverged, RoundRecord(6, "train", 0.001)]


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_bn.flower.compat.LOGGER.propagate", True)


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
    evaluation=st.just({}) | st.fixed_dictionaries({"accuracy": st.floats(0, 1)}, optional={"accuracy-std": NUMBERS, "loss": NUMBERS}),
    client_evaluation=st.dictionaries(st.integers(0, 5), st.fixed_dictionaries({"accuracy": st.floats(0, 1), "loss": NUMBERS}), max_size=4),
)


@settings(max_examples=120)
@given(record=RECORDS)
@example(RoundRecord(1, "train", 0.1, [ClientRecord(n, 1, 1, loss, 0, 0, 0, 0.0, 1.5) for n, loss in enumerate([0.5, math.inf])]))
def test_a_line_read_back_says_the_same_line_again(record: RoundRecord) -> None:
    line = line_of(record)
    assert line_of(record_of(line)) == line


def test_mean_iou_and_accuracies_per_class_are_in_the_lines_and_read_back() -> None:
    evaluation = {"accuracy": 0.75, "loss": 1.0, "mean-iou": 0.5, **named_series(CLASS, [1.0, math.nan, 0.25])}
    segmented = RoundRecord(1, "train", 0.1, aggregated=True, evaluation=evaluation)
    line = line_of(segmented)
    assert (line["mean-iou"], line["per-class"], round_row(segmented)["mean-iou"]) == (0.5, [1.0, None, 0.25], 0.5)
    back = record_of(line).evaluation
    assert (back["mean-iou"], series(back, CLASS)[::2]) == (0.5, [1.0, 0.25])
    assert math.isnan(series(back, CLASS)[1])
    assert (line_of(records()[2])["mean-iou"], line_of(records()[2])["per-class"]) == (None, None)


# Growing, and cutting


def history(folder: Path, entries: list[RoundRecord]) -> History:
    folder.mkdir(exist_ok=True)
    made = History(folder)
    made.begin()
    for entry in entries:
        made.add(entry)
    return made


def contents(folder: Path) -> dict[str, str]:
    return {file: (folder / file).read_text() for file in History.FILES}


@pytest.mark.parametrize("back_to", [0, 3])
@pytest.mark.parametrize("torn", [False, True])
def test_a_cut_forgets_the_rounds_since_and_the_next_are_written_in_their_place(back_to: int, torn: bool, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    history(whole, rich())
    made = history(parts, rich()[:back_to])
    lengths = made.lengths()
    assert not back_to or lengths == {file: (parts / file).stat().st_size for file in History.FILES}
    for record in rich()[back_to : back_to + 2]:
        made.add(record)
    if torn:
        for file in History.FILES:
            with (parts / file).open("a") as tail:
                tail.write('99,"half a li')
    again = History(parts)
    before = again.cut(lengths)
    assert [line_of(record) for record in before] == [line_of(record) for record in rich()[:back_to]]
    for record in rich()[back_to:]:
        again.add(record)
    assert contents(parts) == contents(whole)


# A full disk


def whole_lines(folder: Path) -> int:
    """How many rounds there are; every line of every file is whole."""
    assert all((folder / file).read_bytes().endswith(b"\n") for file in History.FILES if (folder / file).stat().st_size)
    assert all(None not in row.values() and None not in row for file in ("rounds.csv", "clients.csv") for row in table(folder / file))
    return len([json.loads(line) for line in (folder / LINES).read_text().splitlines()])


def test_a_disk_that_fails_to_sync_writes_no_line_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    history(whole, rich())
    made = history(parts, rich()[:2])
    made.lengths()
    made.add(rich()[2])

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("fl_bn.run.history.os.fsync", fail)
        with refusing("Input/output error", by=OSError):
            made.lengths()
    for record in rich()[3:]:
        made.add(record)
    made.lengths()
    assert contents(parts) == contents(whole)


# The folder


def written(folder: Path, **values: Any) -> RunDirectory:
    with RunDirectory.create(config({"output": str(folder), "pictures": False, "rounds": 3, "method": "hbn"}, **values)) as directory:
        for number, record in enumerate(records(), 1):
            directory.on_round(record, 3)
            assert directory.path is not None
            assert whole_lines(directory.path) == number  # lines are there as soon as they are known
    return directory


def test_folders_without_a_name_never_collide(tmp_path: Path) -> None:
    names = [written(tmp_path).name for _ in range(3)]
    assert len(set(names)) == 3
    assert all("hbn-digits-seed0" in name for name in names)
    path = written(tmp_path, name="mine").path
    assert path == (tmp_path / "mine").resolve()
    assert json.loads((path / "environment.json").read_text())["packages"]["torch"][0].isdigit()
    with refusing("mine", by=FileExistsError):
        written(tmp_path, name="mine")


def test_the_error_that_ended_a_run_is_in_its_summary(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), RunDirectory.create(config(output=str(tmp_path), name="x", rounds=60)):
        raise KeyboardInterrupt
    assert "**The run was interrupted** after 0 of 60 rounds." in (tmp_path / "x" / "summary.md").read_text()


@listed(
    ("values", "said"),
    [
        ({"method": "silobn"}, "accuracy after round 3: **50.0%** (mean over clients with models of their own; std 10.0%, min 40.0%)"),
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


def recorded(round: int, *disclosures: Disclosure) -> RoundRecord:
    return RoundRecord(round, "train", 0.1, disclosures=list(disclosures))


def kinds(records: Sequence[RoundRecord], label_counts: Mapping[int, Sequence[int]]) -> dict[tuple[int, str, str], Kind]:
    left = DisclosureTotals()
    for one in records:
        left.add(one)
    return left.kinds(label_counts)


def test_kinds_add_up_and_keep_the_smallest() -> None:
    found = kinds(
        [
            recorded(1, Disclosure(0, "moments", "m", 3, 10, 9, 90), Disclosure(0, "moments", "m", 3, 10, 9, 90)),
            recorded(2, Disclosure(0, "moments", "m", 3, 10, 5, 50), Disclosure(1, "weights", "w", 2, 7)),
            recorded(3, Disclosure(0, "moments", "m", 3, 10, 5, 50)),
        ],
        {0: (1, 2), 1: ()},
    )
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


def test_a_run_writes_them(tmp_path: Path) -> None:
    path = run(small_run(tmp_path, method="fedavg", batch_size=4, local_steps=1, checkpoint_every=0))
    rows = table(path / "disclosure.csv")
    sent = {row["section"]: row for row in rows if row["client"] == "2"}
    assert sent.keys() == {"weights", "statistics", "metrics", "introduction"}
    assert (sent["statistics"]["smallest-samples"], sent["statistics"]["warning"]) == ("4", "fewer than 8 samples")
    up = sum(int(row["bytes-up"]) for row in table(path / "clients.csv") if row["client"] == "2")
    assert int(sent["weights"]["bytes"]) + int(sent["statistics"]["bytes"]) == up
    text = (path / "summary.md").read_text()
    assert "## What left each client" in text
    assert "client 2 revealed statistics of 4 samples in round 1" in text
    quiet = run(small_run(tmp_path / "more", method="gn", batch_size=8, local_steps=2))
    assert "**warning**" not in (quiet / "summary.md").read_text()
