"""The files that grow by a round at a time: whole lines whatever the disk does, cut for a resume, and read back as they were."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_bn.federation.aggregation import Drift
from fl_bn.federation.metrics import named_series, series
from fl_bn.federation.record import ClientRecord, RoundRecord
from fl_bn.run.config import RunConfig
from fl_bn.run.history import SECTIONS, History, record_of, round_columns, round_line, round_row
from fl_bn.support.durable import Damaged
from fl_bn.task import CLASS, CLASSIFICATION
from tests.experiment.test_run_directory import records
from tests.integration.runs import table
from tests.test_durable import room_for


def history(folder: Path, entries: list[RoundRecord]) -> History:
    made = History(folder)
    made.begin()
    for entry in entries:
        made.add(entry)
    return made


def contents(folder: Path) -> dict[str, str]:
    return {file: (folder / file).read_text() for file in History.FILES}


# Read back


def line_of(record: RoundRecord) -> dict[str, object]:
    """As rounds.jsonl has it."""
    return json.loads(json.dumps(round_line(record)))  # type: ignore[no-any-return]


SPREAD = ("accuracy-std", "loss")
NUMBERS = st.one_of(st.floats(0, 1e6), st.floats(allow_nan=True, allow_infinity=True))
CLIENTS = st.builds(
    ClientRecord,
    client=st.integers(0, 5),
    samples=st.integers(0, 99),
    steps=st.integers(0, 9),
    loss=NUMBERS,
    bytes_down=st.integers(0, 10**9),
    bytes_up=st.integers(0, 10**9),
    exchanges=st.integers(0, 20),
    waited=st.floats(0, 100),
    distance=NUMBERS,
    refused=st.sampled_from(["", 'no "reply", before\nthe deadline', "ünï"]),
)
EVALUATION = st.fixed_dictionaries({"accuracy": st.floats(0, 1), "loss": NUMBERS})
RECORDS = st.builds(
    RoundRecord,
    round=st.integers(1, 10**6),
    phase=st.sampled_from(["train", "frozen", "exchange"]),
    learning_rate=st.floats(1e-9, 10),
    clients=st.lists(CLIENTS, max_size=4, unique_by=lambda c: c.client).map(lambda cs: sorted(cs, key=lambda c: c.client)),
    drift=st.none() | st.builds(Drift, NUMBERS, st.sampled_from(["", "norm"]), NUMBERS, NUMBERS),
    bytes_down=st.dictionaries(st.sampled_from(SECTIONS), st.integers(0, 10**9)),
    bytes_up=st.dictionaries(st.sampled_from(SECTIONS), st.integers(0, 10**9)),
    exchanges=st.integers(0, 20),
    carrier=st.sampled_from(["", "grpc", "local"]),
    aggregated=st.booleans(),
    seconds=st.floats(0, 1e5),
    evaluation=st.just({}) | st.fixed_dictionaries({"accuracy": st.floats(0, 1)}, optional=dict.fromkeys(SPREAD, NUMBERS)),
    client_evaluation=st.dictionaries(st.integers(0, 5), EVALUATION, max_size=4),
)


@settings(max_examples=120)
@given(record=RECORDS)
def test_a_line_read_back_says_the_same_line_again(record: RoundRecord) -> None:
    line = line_of(record)
    assert line_of(record_of(line)) == line


def rounded(record: RoundRecord) -> RoundRecord:
    """Times as the files have them."""
    return replace(record, seconds=round(record.seconds, 4), clients=[replace(c, waited=round(c.waited, 4)) for c in record.clients])


def rich() -> list[RoundRecord]:
    """Every kind of round: those of ``records``, one of an exchange, one that diverged, and one without any client."""
    exchange = RoundRecord(
        4,
        "exchange",
        0.02,
        [
            ClientRecord(0, 5, 2, 0.3, 100, 60, 4, 0.123456, 1.5, before=0.25, after=0.5),
            ClientRecord(1, 5, 2, 0.4, 100, 60, 4, 0.2, 30.0, before=0.5, after=0.75),
        ],
    )
    exchange = replace(
        exchange,
        carrier="grpc",
        exchanges=4,
        aggregated=True,
        seconds=1.25,
        bytes_up={"weights": 10, "exchange": 20},
        drift=Drift(0.25, "norm", 0.5, 1.0),
        evaluation={"accuracy": 0.75, "loss": 0.5},
    )
    diverged = RoundRecord(
        5, "train", 0.02, [ClientRecord(0, 5, 2, math.inf)], Drift(math.inf, "norm", math.nan, math.inf), aggregated=True
    )
    diverged = replace(diverged, evaluation={"accuracy": 0.1, "loss": math.nan})
    return [*records(), exchange, diverged, RoundRecord(6, "train", 0.001)]


@pytest.mark.parametrize("several", [slice(None), slice(1, 4), slice(3, 5), slice(2, 3)])
def test_the_summary_of_what_is_read_back_is_the_same(several: slice) -> None:
    config, found = RunConfig.from_mapping({"method": "fedtan"}), rich()[several]
    back = [record_of(line_of(record)) for record in found]
    assert told_of(config, back) == told_of(config, [rounded(record) for record in found])
    assert told_of(config, back[:-1]) != told_of(config, found)  # control


# Growing, and cutting


@pytest.mark.parametrize("back_to", [0, 1, 2, 3])
@pytest.mark.parametrize("torn", [False, True])
def test_a_cut_forgets_the_rounds_since_and_the_next_are_written_in_their_place(back_to: int, torn: bool, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    history(whole, rich())
    made = history(parts, rich()[:back_to])
    lengths = made.lengths()
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


@pytest.mark.parametrize("file", History.FILES)
def test_a_file_that_is_shorter_than_it_was_is_named_and_no_other_is_cut(file: str, tmp_path: Path) -> None:
    made = history(tmp_path, records())
    lengths = made.lengths()
    made.add(rich()[3])
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[: lengths[file] - 1])
    before = contents(tmp_path)
    with pytest.raises(Damaged, match=rf"{file}: the file had {lengths[file]} bytes at the checkpoint, but has {lengths[file] - 1} now"):
        History(tmp_path).cut(lengths)
    assert contents(tmp_path) == before


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    lengths = history(tmp_path, records()).lengths()
    data = (tmp_path / "rounds.jsonl").read_bytes()
    for wrong in (data.replace(b'"clients"', b'"cleints"', 1), data.replace(b"{", b"[", 1), b"\xff" + data[1:]):
        (tmp_path / "rounds.jsonl").write_bytes(wrong)
        with pytest.raises(Damaged, match=r"rounds.jsonl: expected one round per line, but a line cannot be read as a round"):
            History(tmp_path).cut(lengths)


# A full disk


def whole_lines(folder: Path) -> list[int]:
    """How many rounds each file has; every line of it is whole."""
    lines = [json.loads(line)["round"] for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert all((folder / file).read_bytes().endswith(b"\n") for file in History.FILES if (folder / file).stat().st_size)
    assert all(None not in row.values() and None not in row for file in History.FILES[:2] for row in table(folder / file))
    return [len(table(folder / "rounds.csv")), len({row["round"] for row in table(folder / "clients.csv")}), len(lines)]


@pytest.mark.parametrize("more", [0, 1, 40, 60])
def test_what_does_not_fit_on_the_disk_is_written_with_a_later_round(more: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``more`` bytes are left in each file: at most half a line."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    history(whole, rich())
    made = history(parts, rich()[:2])
    fits = (parts / "rounds.csv").stat().st_size + more
    with room_for(fits):
        for number, record in enumerate(rich()[2:5], 3):
            made.add(record)
            assert whole_lines(parts)[0] == 2
            assert f"round {number} could not be written to {parts}" in caplog.text
            assert "The next round tries again" in caplog.text
        with pytest.raises(OSError, match=r"disk is full|File too large"):
            made.lengths()
    made.add(rich()[5])
    assert contents(parts) == contents(whole)
    assert caplog.text.count("could not be written") == 3


def test_a_disk_that_fails_to_sync_writes_no_line_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    history(whole, rich())
    made = history(parts, rich()[:2])
    made.lengths()
    made.add(rich()[2])

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("fl_bn.run.history.os.fsync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            made.lengths()
    assert whole_lines(parts)[0] == 2  # round 3 may be on the disk or not, so it is written again
    for record in rich()[3:]:
        made.add(record)
    made.lengths()
    assert contents(parts) == contents(whole)


# Mean IoU and accuracies per class, and files from before they were kept


def segmented() -> RoundRecord:
    evaluation = {"accuracy": 0.75, "loss": 1.0, "mean-iou": 0.5, **named_series(CLASS, [1.0, math.nan, 0.25])}
    return RoundRecord(1, "train", 0.1, aggregated=True, evaluation=evaluation)


def test_mean_iou_and_accuracies_per_class_are_in_the_lines_and_read_back() -> None:
    line = line_of(segmented())
    assert (line["mean-iou"], line["per-class"]) == (0.5, [1.0, None, 0.25])
    assert round_row(segmented())["mean-iou"] == 0.5
    back = record_of(line).evaluation
    assert back["mean-iou"] == 0.5
    assert series(back, CLASS)[::2] == [1.0, 0.25]
    assert math.isnan(series(back, CLASS)[1])
    assert line_of(record_of(line)) == line
    classified = line_of(records()[2])
    assert (classified["mean-iou"], classified["per-class"]) == (None, None)


def test_a_run_begun_before_there_was_mean_iou_goes_on_in_its_own_columns(tmp_path: Path) -> None:
    history(tmp_path, rich()[:2])
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        del line["mean-iou"], line["per-class"]
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [[v for k, v in row.items() if k != "mean-iou"] for row in table(tmp_path / "rounds.csv")]
    columns = [name for name in round_columns(CLASSIFICATION) if name != "mean-iou"]
    (tmp_path / "rounds.csv").write_text("".join(",".join(row) + "\r\n" for row in [columns, *rows]))
    begun = History(tmp_path)
    before = begun.cut(begun.lengths())
    assert [record.round for record in before] == [1, 2]
    begun.add(rich()[3])
    last = table(tmp_path / "rounds.csv")[-1]
    assert list(last) == columns
    assert (last["accuracy"], last["test-loss"], last["carrier"]) == ("0.75", "0.5", "grpc")


def test_diagnostics_are_cut_with_the_rounds(tmp_path: Path) -> None:
    made = History(tmp_path, diagnostics=True)
    made.begin()
    made.add(rich()[0], [{"round": 1, "layer": "norm", "client": None, "quantity": "mean-moved", "value": 0.5}])
    lengths = made.lengths()
    before = (tmp_path / "diagnostics.csv").read_text()
    assert before.splitlines() == ["round,layer,client,quantity,value", "1,norm,,mean-moved,0.5"]
    made.add(rich()[1], [{"round": 2, "layer": "", "client": 3, "quantity": "gradient-deviation", "value": 1.0}])
    assert (tmp_path / "diagnostics.csv").read_text() == before + "2,,3,gradient-deviation,1.0\n"
    again = History(tmp_path, diagnostics=True)
    again.cut(lengths)
    assert (tmp_path / "diagnostics.csv").read_text().splitlines() == before.splitlines()
    (tmp_path / "other").mkdir()
    history(tmp_path / "other", rich()[:1])
    assert not (tmp_path / "other" / "diagnostics.csv").exists()  # control: none where none are wanted


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_bn.flower.log.LOGGER.propagate", True)
