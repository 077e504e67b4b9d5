"""CSV files per site: the numbers are those of a plain reading, and everything that can be wrong is refused by file, line and column."""

from __future__ import annotations

import csv
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from typer.testing import CliRunner

from fl_bn.cli.main import app
from fl_bn.data.columns import columns_of, read_columns
from fl_bn.data.csv_files import TableData, load_csv, place, read_rows, split
from fl_bn.data.draft_columns import draft
from fl_bn.data.record import DataError, DataNotFound
from tests.listed import listed
from tests.refusals import wrong_data

SCHEME: dict[str, Any] = {
    "target": "outcome",
    "classes": ["well", "ill"],
    "ignore": ["id"],
    "numeric": {"age": {"mean": 50, "std": 10}, "dose": {"mean": 0}},
    "categorical": {"smoker": ["no", "yes"], "ward": ["a", "b", "c"]},
}
HEADER = "id,age,dose,smoker,ward,outcome"
ROWS = ["1,40,0.5,no,a,well", "2,60,1.5,yes,b,ill", "3,55,2,no,c,well", "4,45,1e1,yes,a,ill", "5,50,-3,no,b,well"]


def site(folder: Path, name: str = "north", rows: list[str] | None = None, header: str = HEADER, **changes: Any) -> Path:
    """A file with a columns.toml beside it; a change to None takes a key out."""
    folder.mkdir(exist_ok=True)
    scheme = {key: value for key, value in (SCHEME | {k.replace("_", "-"): v for k, v in changes.items()}).items() if value is not None}
    (folder / "columns.toml").write_text(tomli_w.dumps(scheme))
    file = folder / f"{name}.csv"
    file.write_text("\n".join([header, *(ROWS if rows is None else rows)]) + "\n")
    return file


def plain(file: Path) -> tuple[list[list[float]], list[float]]:
    """The obvious reading: a row of the file, a row of the table."""
    with file.open(newline="") as stream:
        found = list(csv.DictReader(stream))
    x = []
    for row in found:
        smoker, ward = ([float(row[name] == category) for category in SCHEME["categorical"][name]] for name in ("smoker", "ward"))
        x.append([(float(row["age"]) - 50) / 10, float(row["dose"]), *smoker, *ward])
    return x, [["well", "ill"].index(row["outcome"]) for row in found]


def together(data: TableData) -> list[tuple[list[float], float]]:
    x, y = torch.cat([data.x_train, data.x_test]), torch.cat([data.y_train, data.y_test])
    return sorted(zip(x.tolist(), y.tolist(), strict=True))


def test_the_arrays_are_those_of_a_plain_reading(tmp_path: Path) -> None:
    file = site(tmp_path)
    data, (x, y) = load_csv(str(file), 0), plain(file)
    want = sorted(zip(np.array(x, dtype=np.float32).tolist(), y, strict=True))
    assert together(data) == want
    assert (data.channels, data.image_size, data.classes, data.domains) == (7, 1, 2, ())


def test_the_order_of_columns_and_an_excel_file_change_nothing(tmp_path: Path) -> None:
    cells = [";".join(reversed(line.split(","))) for line in [HEADER, *ROWS]]
    file = site(tmp_path / "b", rows=cells[1:], header=cells[0], delimiter=";")
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")  # a byte order mark, an empty line
    assert together(load_csv(str(file), 0)) == together(load_csv(str(site(tmp_path / "a")), 0))


def test_several_files_are_domains_and_a_site_has_the_same_split_alone(tmp_path: Path) -> None:
    rows = [f"{i},{40 + i},{i / 7:.3f},{('no', 'yes')[i % 2]},{'abc'[i % 3]},{('well', 'ill')[i % 5 == 0]}" for i in range(50)]
    site(tmp_path, "north", rows), site(tmp_path, "south", rows[:31])
    data = load_csv(str(tmp_path), 0)
    assert data.domains == ("north", "south")
    alone = load_csv(str(tmp_path / "south.csv"), 1)
    assert torch.equal(data.x_train[data.domain_train == 1], alone.x_train)
    assert len(alone.x_test) == round(0.2 * 7) + round(0.2 * 24)  # of each class a fifth
    other = load_csv(str(site(tmp_path / "seed", "south", rows[:31], seed=1)), 0)
    assert not torch.equal(other.x_train, alone.x_train)  # control: another seed of columns.toml draws others
    assert load_csv(f"{tmp_path / 'south.csv'}, {tmp_path / 'north.csv'}", 0).domains == ("south", "north")
    assert len(load_csv(str(site(tmp_path / "two", rows=ROWS[:2])), 0).y_test) == 1  # each class has one row


@pytest.mark.parametrize("changes", [{"ignore": [], "group": "id"}, {}], ids=["grouped", "control"])
def test_a_person_s_rows_stay_on_one_side(changes: dict[str, Any], tmp_path: Path) -> None:
    rows = [f"{i // 4},{40 + i},0,no,a,{('well', 'ill')[i % 2]}" for i in range(40)]
    file, columns = site(tmp_path, rows=rows, **changes), read_columns(tmp_path)
    test = split(read_rows(file, columns), columns)
    assert test.sum() == 8
    assert all(len(set(test[4 * i : 4 * i + 4])) == 1 for i in range(10)) is bool(changes)


def test_a_target_that_is_a_number_is_scaled_by_stated_constants(tmp_path: Path) -> None:
    rows = [f"{i},{40 + i},0,no,a,{100 + i}" for i in range(10)]
    data = load_csv(str(site(tmp_path, rows=rows, classes=None, target_mean=100, target_std=2)), 0)
    assert sorted(torch.cat([data.y_train, data.y_test]).tolist()) == [i / 2 for i in range(10)]
    assert (data.classes, data.y_train.dtype, len(data.y_test)) == (1, torch.float32, 2)


@listed(
    ("rows", "changes", "left", "note"),
    [
        (["6,,1,no,a,well"], {"missing": "drop"}, 5, "5 rows are used; rows left out for a missing value: 1"),
        (["6,NA,1,no,a,well", "7,1,1,no,a,?"], {"missing": "drop"}, 5, "rows left out for a missing value: 2"),
        (["6,nan,1,,a,well"], {"missing": "fill"}, 6, "missing cells read as the stated mean, or as no category: 2"),
        (["6,,1,no,d,well"], {"missing": "fill", "unknown": "drop"}, 5, "5 rows are used; rows left out for an unknown category: 1"),
    ],
)
def test_policies_are_stated_and_told(rows: list[str], changes: dict[str, Any], left: int, note: str, tmp_path: Path) -> None:
    data = load_csv(str(site(tmp_path, rows=[*ROWS, *rows], **changes)), 0)
    assert len(data.y_train) + len(data.y_test) == left
    assert note in data.notes[0]
    assert load_csv(str(site(tmp_path / "whole", **changes)), 0).notes == ()  # control


def test_what_takes_the_place_of_a_missing_cell(tmp_path: Path) -> None:
    file = site(tmp_path, rows=[*ROWS, "6,,NaN,,x,well"], missing="fill", unknown="zeros")
    assert read_rows(file, read_columns(tmp_path)).x[-1].tolist() == [0.0] * 7  # the stated mean, and no category
    categories = {"smoker": ["no", "yes", ""], "ward": ["a", "b", "c", "x"]}
    listed_as_category = columns_of(SCHEME | {"categorical": categories, "missing": "fill"})
    assert read_rows(file, listed_as_category).x[-1].tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]


BELOW = "\n".join([HEADER, *ROWS, ""])


@listed(
    ("text", "line", "column"),
    [
        (BELOW + "6,,1,no,a,well", 7, "age"),
        (BELOW + "6,40,1,ja,a,well", 7, "smoker"),
        (BELOW + "6,40,1,no,a", 7, ""),
        (BELOW + '"6\n6",40,1,no,a,well\n7,x,1,no,a,well', 9, "age"),  # a cell of two lines
        ("", 0, ""),
        (HEADER.replace(",dose", ""), 1, "dose"),
        (HEADER + ",zip", 1, "zip"),
        ("\xff\xfe", 0, ""),  # no UTF-8
    ],
)
def test_a_wrong_file_is_refused_by_line_and_column(text: str, line: int, column: str, tmp_path: Path) -> None:
    file = site(tmp_path)
    file.write_bytes(f"{text}\n".encode("latin-1"))
    with pytest.raises(DataError) as caught:
        load_csv(str(file), 0)
    assert (caught.value.source, caught.value.part) == (str(file), place(line, column) if column else f"line {line}" if line else "")
    assert "\n" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@listed(
    ("changes", "problem"),
    [
        ({"target": None}, "target"),
        ({"classes": ["well"]}, "classes"),
        ({"numeric": {"age": {"sd": 3}}}, "'sd'"),
        ({"numeric": {"age": {"std": 3}}, "missing": "fill"}, "mean"),
    ],
)
def test_a_description_that_is_wrong_is_refused(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    file = site(tmp_path, **changes)
    with wrong_data(tmp_path / "columns.toml") as caught:
        load_csv(str(file), 0)
    assert problem in str(caught.value)


def test_paths(tmp_path: Path) -> None:
    file, other = site(tmp_path / "a"), site(tmp_path / "b", "south", classes=["ill", "well"])
    with wrong_data(tmp_path / "b" / "columns.toml"):
        load_csv(f"{file},{other}", 0)
    with wrong_data(one := site(tmp_path / "a", "one", rows=ROWS[:1])):  # a file without a test row, beside another
        load_csv(f"{file},{one}", 0)
    (tmp_path / "a" / "columns.toml").unlink()
    for path in (str(tmp_path / "gone.csv"), str(file)):
        with pytest.raises(DataNotFound):
            load_csv(path, 0)


def test_a_draft_describes_the_files_and_looks_at_no_test_row(tmp_path: Path) -> None:
    rows = [f"p{i},{40 + i},{'' if i == 3 else i},{('no', 'yes')[i % 2]},{'ab'[i % 2]},{('well', 'ill')[i % 3 == 0]}" for i in range(60)]
    file = site(tmp_path, rows=rows)
    text = draft(str(file), "outcome")
    (tmp_path / "columns.toml").write_text(text.replace('missing = "refuse"', 'missing = "fill"'))
    columns = read_columns(tmp_path)
    assert columns.ignore == ("id",)
    assert (columns.classes, columns.categorical) == (("ill", "well"), {"smoker": ("no", "yes"), "ward": ("a", "b")})
    data = load_csv(str(file), 0)
    assert abs(float(data.x_train[:, 0].mean())) < 0.05
    assert float(data.x_train[:, 0].std()) == pytest.approx(1, abs=0.05)
    chosen = split(read_rows(file, columns), columns)
    file.write_text("\n".join([HEADER, *rows[1:], rows[0].replace(",40,", ",<40,")]))
    with wrong_data(file, "line 61, column 'age'"):  # one cell that is no number does not change what a column is
        draft(str(file), "outcome")
    for spoilt, same in (("test", True), ("training", False)):  # control: training rows do count
        aged = [re.sub(r",\d+", ",900", row, count=1) if test is same else row for row, test in zip(rows, chosen.tolist(), strict=True)]
        file.write_text("\n".join([HEADER, *aged]) + "\n")
        assert (draft(str(file), "outcome") == text) is same, spoilt
    file.write_text("\n".join([HEADER, *(re.sub(r",\d+,", ",36.6,", row, count=1) for row in rows)]))
    assert "[numeric.age]\nmean = 36.6\nstd = 1.0\n" in draft(str(file), "outcome")
    other = site(tmp_path, "other", header=HEADER.replace("age", "old"))
    with wrong_data(file, "line 1, column 'old'"):
        draft(f"{file},{other}", "outcome")


def test_the_commands(tmp_path: Path) -> None:
    file, run = site(tmp_path, rows=[f"{i},{i},1,no,a,{i / 3:.2f}" for i in range(9)]), CliRunner().invoke
    shown = run(app, ["data", "columns", str(file), "--target", "outcome", "--regression"])
    assert shown.exit_code == 0, shown.output
    (tmp_path / "columns.toml").write_text(shown.stdout)
    columns = read_columns(tmp_path)
    assert (columns.classes, columns.target_scale.std) == ((), 0.74)
    checked = run(app, ["doctor", "--run-config", f"dataset='csv' data-path='{tmp_path}' model='mlp' task='regression'"])
    assert checked.exit_code == 0, checked.output
    assert f"classes=1 channels={columns.inputs} image-size=1 columns-digest='{columns.digest}'" in checked.stdout
    wrong_file = site(tmp_path / "wrong", rows=["1,x,1,no,a,1"])
    failed = run(app, ["doctor", "--run-config", f"dataset='csv' data-path='{wrong_file}' model='mlp'"])
    assert failed.exit_code == 1
    assert "north.csv, line 2, column 'age'" in " ".join(failed.output.split())
