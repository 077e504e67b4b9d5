"""The numbers of tables and curves, recomputed by hand; what becomes of runs that failed, did not finish, or measured nothing."""

from __future__ import annotations

import csv
import io
import json
from math import nan
from pathlib import Path

import numpy as np
import pytest

from fl_bn.app.config import ConfigError
from fl_bn.app.report import write_report
from fl_bn.app.report.cells import Cell, read_cells
from fl_bn.app.report.formats import runs_csv, to_markdown
from fl_bn.app.report.layout import Table, as_text, lay_out, tabulate
from fl_bn.app.report.page import report_of
from fl_bn.app.report.pictures import series
from fl_bn.app.report.settings import read_settings
from fl_bn.app.summary import STOPPED
from tests.listed import listed
from tests.refusals import naming
from tests.report.made_up import comparison, read, rounds, run, sweep


def table_of(folder: Path) -> Table:
    cells = read_cells(folder)
    return tabulate(lay_out(read_settings(folder), cells), cells)


def test_the_best_round_instead_of_the_last(tmp_path: Path) -> None:
    sweep(tmp_path, "[report]\nat = 'best'")
    run(tmp_path, {"method": "a", "seed": 0}, rounds([0.2, 0.9, 0.5], test_loss=[3, 1, 2]))
    run(tmp_path, {"method": "a", "seed": 1}, rounds([0.2, None, 0.7], test_loss=[3, None, 2]))
    assert table_of(tmp_path).entries["a"]["accuracy"].values == (pytest.approx(90), pytest.approx(70))
    assert "best round" in table_of(tmp_path).caption
    sweep(tmp_path, "[report]\nat = 'best'\nmetric = 'test-loss'")  # the best loss is the smallest, and no percentage
    assert table_of(tmp_path).entries["a"]["test-loss"].values == (1, 2)


@pytest.mark.parametrize(("worst", "best", "value"), [("max", "a", 2), ("min", "b", 9)])
def test_a_task_of_ones_own_is_known_by_its_columns(worst: str, best: str, value: int, tmp_path: Path) -> None:
    """Its metric has a spread over clients beside it; where the worst client has the highest value, the lowest is best."""
    sweep(tmp_path, "[report]\nat = 'best'")
    for method, values in (("a", [3, 2, None, 5]), ("b", [4, 9, None, 6])):  # not every round is evaluated
        beside = {"loss-like-std": 0.1, f"loss-like-{worst}": 7}
        run(tmp_path, {"method": method}, [{"round": n, "loss-like": value, **beside} for n, value in enumerate(values, 1)])
    table = table_of(tmp_path)
    assert table.best == {(best, "loss-like")}
    assert table.entries[best]["loss-like"].values == (value,)  # as it is, not in percent
    assert table.caption == "Loss like, best round, chosen by this very number: one seed."


@listed(("keys", "said"), [({}, "Test"), ({"validation-share": 0.2}, "Validation"), ({"evaluate-on": "training"}, "Training")])
def test_the_caption_says_which_samples_were_evaluated(keys: dict[str, object], said: str, tmp_path: Path) -> None:
    run(sweep(tmp_path), {"method": "a"}, rounds([0.5], test_loss=[1.5]), **keys)
    assert table_of(tmp_path).caption.startswith(said)


def test_a_loss_that_became_nan_is_not_the_last_finite_one(tmp_path: Path) -> None:
    """rounds.jsonl has null for NaN: the loss of round 2 must not pass for the last round's."""
    sweep(tmp_path, "[report]\nmetric = 'test-loss'")
    run(tmp_path, {"method": "a", "seed": 0}, rounds([0.5, 0.5, None, 0.1], test_loss=[2.0, 1.0, None, None]))
    run(tmp_path, {"method": "a", "seed": 1}, rounds([0.5, 0.5, None, 0.5], test_loss=[2.0, 1.0, None, 3.0]))
    run(tmp_path, {"method": "b", "seed": 0}, rounds([0.5, 0.5, None, 0.1], test_loss=[2.0, 1.0, None, None]))
    table = table_of(tmp_path)
    assert table.entries["a"]["test-loss"].values == (3.0,)
    assert (table.entries["b"]["test-loss"].values, table.entries["b"]["test-loss"].instead) == ((), "not finite")
    assert table.problems == dict.fromkeys(("a-0", "b-0"), "test-loss was not a finite number in round 4")


def test_rows_and_columns_that_are_asked_for_and_numbers_by_size(tmp_path: Path) -> None:
    """An axis that [report] forgets becomes a column: runs with different settings are never averaged."""
    sweep(tmp_path, "[report]\nrows = 'split'\ncolumns = ['clients', 'method']")
    for clients in (10, 2):
        for split in ("x", "y"):
            run(tmp_path, {"method": "a", "clients": clients, "split": split, "on": True}, rounds([clients / 100]))
    table = table_of(tmp_path)
    assert (table.layout.rows, table.layout.columns) == (("x", "y"), ("2, a", "10, a"))
    assert [table.entries["x"][column].mean for column in table.layout.columns] == [pytest.approx(2), pytest.approx(10)]
    assert table.corner == "split \\ clients, method"
    sweep(tmp_path, "[report]\nrows = 'method'")
    assert table_of(tmp_path).layout.columns == ("2, x, true", "2, y, true", "10, x, true", "10, y, true")
    assert table_of(tmp_path).layout.column_heading("2, x, true") == "clients 2, x, on true"


def test_damaged_files_cost_their_run_only(tmp_path: Path) -> None:
    comparison(tmp_path)
    runs = tmp_path / "runs"
    (runs / "GN-IID-0" / "cell.json").write_text("{")
    with (runs / "GN-IID-1" / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "accu')
    (runs / "BN-IID-0" / "rounds.jsonl").write_text("")
    table = table_of(tmp_path)
    assert (table.entries["GN"]["IID"].values, table.entries["GN"]["IID"].instead) == ((), "damaged")
    assert table.entries["BN"]["IID"].values == (60,)
    why = table.problems
    assert why["GN-IID-0"].startswith("unreadable: cell.json: JSONDecodeError")
    assert why["GN-IID-1"] == why["BN-IID-0"] == "damaged: rounds.jsonl ends in an incomplete line, or has none"
    assert why["FixBN-1_class-2"] == "running after 1 of 1 rounds"
    assert len(read_cells(tmp_path)) == 11


def test_runs_that_the_sweep_plans_no_more_or_that_have_not_ended_are_named_and_not_in_the_numbers(tmp_path: Path) -> None:
    comparison(tmp_path)
    planned = {cell.name: (cell.axes, cell.config) for cell in read_cells(tmp_path) if cell.axes["method"] != "GN"}
    planned["BN-IID-2"] = {"method": "BN", "split": "IID", "seed": 2}, {"rounds": 3}
    table = report_of(read_settings(tmp_path), read_cells(tmp_path, planned), tmp_path).table
    assert table.entries.keys() == {"BN", "FixBN"}
    assert table.problems["GN-IID-0"].startswith("left out")
    assert table.problems["BN-IID-2"] == "unfinished after 0 of 3 rounds"
    assert (len(table.entries["BN"]["IID"].values), table.entries["BN"]["IID"].runs) == (2, 3)


PAPER = """
[paper]
source = "Table 3"
numbers = { FixBN = { "1 class" = "54.2" }, HBN = { IID = "77" } }
"""


def test_the_formats_by_hand(tmp_path: Path) -> None:
    """Rows are as in the sweep file. 7.1 is the deviation of 50 and 60, divided by n - 1; runs that failed or go on do not count."""
    table = table_of(comparison(tmp_path, PAPER))
    markdown = to_markdown(table).splitlines()
    assert markdown[:7] == [
        "# Made up",
        "",
        r"| method \\ split | IID | 1 class |",
        "|---|---:|---:|",
        "| BN | 55.0 (7.1) | 30.0, 1 of 2 |",
        "| GN | 71.0 (1.4) | not run |",
        "| FixBN | **85.0** (7.1) | **55.0** (7.1), 2 of 3 \\[54.2\\] |",
    ]
    caption = "Test accuracy (%), last round: mean (standard deviation) over 2 seeds where nothing else is said; in brackets: Table 3."
    assert caption in markdown
    assert "- BN-1\\_class-1: failed: RunFailed: client 3 sent NaN" in markdown
    assert "- FixBN-1\\_class-2: running after 1 of 1 rounds" in markdown


def test_a_tidy_line_per_run_and_round(tmp_path: Path) -> None:
    comparison(tmp_path)
    run(tmp_path, {"method": "X", "f": 3}, rounds([0.2, 0.1], exchanges=[6, 6], bytes_up_weights=[100, 50]))
    lines = list(csv.DictReader(io.StringIO(runs_csv(read_cells(tmp_path)))))
    of = [line for line in lines if line["run"] == "X-3"]
    assert [[line[k] for k in ("method", "split", "f", "seed", "status")] for line in of] == [["X", "", "3", "", "finished"]] * 2
    assert [[line[k] for k in ("round", "accuracy", "exchanges", "bytes-up-weights")] for line in of] == [
        ["1", "0.2", "6", "100"], ["2", "0.1", "6", "50"],
    ]  # fmt: skip
    (failed,) = {(line["status"], line["error"]) for line in lines if line["run"] == "BN-1_class-1"}
    assert failed == ("failed", "RunFailed: client 3 sent\nNaN")
    (tmp_path / "runs/BN-1_class-1/summary.md").write_text("# Run\n")  # fl-bn resume has ended it since
    assert [(cell.status, cell.error) for cell in read_cells(tmp_path) if cell.name == "BN-1_class-1"] == [("finished", "")]


def test_runs_that_are_no_sweep_are_named_by_what_differs(tmp_path: Path) -> None:
    for name, keys, value in (
        ("a", "seed = 0", 0.4),
        ("b", "seed = 1", 0.6),
        ("c", "seed = 0\nlearning-rate = 0.1", 0.8),
        ("d", "seed = 2", 1.0),
        ("e", "seed = 0", 0.9),  # centralised
        ("f", "seed = 1", 0.3),  # as b: no second sample of the seed
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(f"method = 'fbn'\nname = '{name}'\n{keys}\n")
        (tmp_path / name / "rounds.jsonl").write_text(json.dumps({"round": 1, "accuracy": value}) + "\n")
        (tmp_path / name / "summary.md").write_text(f"{STOPPED} after 1 of 5 rounds." if name == "d" else "")
    (tmp_path / "e" / "cell.json").write_text('{"centralised": true}')
    files = write_report(tmp_path / "report", runs=[tmp_path])
    text = files[1].read_text()
    assert "| fbn, learning-rate=0.05 | 50.0 (14.1), 2 of 3 |" in text
    assert "| fbn, learning-rate=0.1 | 80.0" in text
    assert "| centralised-fbn, learning-rate=0.05 | **90.0**" in text
    assert "/f | 30.0" in text


def test_mean_and_band_are_those_of_the_rounds_that_every_seed_has(tmp_path: Path) -> None:
    sweep(tmp_path, "[report]\nmetric = 'test-loss'")
    run(tmp_path, {"method": "a", "seed": 0}, rounds([0.5, 0.5, 0.5], test_loss=[3, None, 1]))  # was NaN in round 2
    run(tmp_path, {"method": "a", "seed": 1}, rounds([0.5, 0.5, 0.5], test_loss=[5, 4, 3]))
    run(tmp_path, {"method": "b", "seed": 0}, rounds([0.5], test_loss=[7]))
    a, b = series(lay_out(read_settings(tmp_path), read_cells(tmp_path)), "round")
    assert (list(a.x), a.seeds, list(a.mean)) == ([1, 3], 2, [4, 2])
    assert np.allclose(a.std, [np.sqrt(2), np.sqrt(2)])
    assert (b.seeds, list(b.std)) == (1, [0])  # one seed has no band


def test_how_far_a_run_has_come() -> None:
    clients = [[{"client": 0, "steps": 4}, {"client": 1, "steps": 6}, {"client": 2, "accuracy": 0.1}], []]
    rows = rounds([0.1, 0.2], bytes_up_weights=[10, 20], bytes_down_statistics=[1, 2], exchanges=[3, 0], clients=clients)
    cell = Cell("x", {}, {"local-steps": 7}, "finished", rows=tuple(rows))
    assert cell.travelled("round") == {1: 1, 2: 2}
    assert cell.travelled("bytes") == {1: 11, 2: 33}
    assert cell.travelled("exchanges") == {1: 4, 2: 5}  # one per round, and the layer-wise ones
    assert cell.travelled("local-steps") == {1: 5, 2: 12}  # mean over the clients; else what the config says


def test_a_domain_is_a_column_and_the_average_is_over_domains(tmp_path: Path) -> None:
    def means(report: str) -> dict[str, dict[str, float]]:
        sweep(
            tmp_path,
            f'[axes.method]\nA = {{ method = "fedavg" }}\nB = {{ method = "fedbn" }}\nC = {{ method = "silobn" }}\n[report]\n{report}\n',
        )
        table = read(tmp_path).table
        return {row: {column: round(entry.mean, 6) for column, entry in of.items()} for row, of in table.entries.items()}

    for method, seed, accuracies in (("A", 0, (0.5, 0.7)), ("A", 1, (0.7, 0.7)), ("B", 0, (0.3, 0.9)), ("C", 0, (None, 0.9))):
        rows = [{"round": 1, "accuracy": 0.9, "per-domain": dict(zip("xyz", (*accuracies, None), strict=True))}]
        run(tmp_path, {"method": method, "seed": seed}, rows)
    found = means('domains = true\ncolumns = ["domain"]')
    of = {"A": (60.0, 70.0, nan, 65.0), "B": (30.0, 90.0, nan, 60.0), "C": (nan, 90.0, nan, nan)}  # C's x diverged; none has z
    assert [*map(list, map(dict.values, found.values()))] == [pytest.approx(values, nan_ok=True) for values in of.values()]


def test_a_round_moves_every_upload_and_one_download() -> None:
    """FedTAN's Table 3: six times the network of 271,098 floats, where five clients upload."""
    rows = rounds([0.1, 0.2], accepted=[5, 5], bytes_up_weights=[4 * 270_000] * 2, bytes_up_statistics=[4 * 1_098] * 2)
    cell = Cell("x", {}, {}, "finished", rows=tuple(row | {"bytes-down-weights": 4 * 271_098} for row in rows))
    assert [as_text(value, "megabytes") for value in cell.curve("megabytes").values()] == ["6.2049", "6.2049"]
    assert [as_text(value, "gigabytes") for value in cell.curve("gigabytes").values()] == ["0.0061", "0.0121"]  # so far


# What [report], [paper] and [notes] may say, and what is refused with a reason


@listed(
    ("text", "message"),
    [
        ("[report", "TOML"),
        ("[report]\nmetrik = 'accuracy'", "'metrik'"),
        ("[report]\nx = ['rounds']", "'round'"),
        ("[report]\nrows = ['method']", "rows"),
        ("[paper]\nnumbers = { BN = '45' }", "numbers"),
    ],
)
def test_what_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with naming(message, ConfigError) as refused:
        read_settings(sweep(tmp_path, text))
    assert "sweep.toml" in str(refused.value)
