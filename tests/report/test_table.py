"""The table's numbers, recomputed by hand; what becomes of runs that failed, did not finish, or measured nothing; and its three formats."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest

from fl_bn.report.cells import read_cells
from fl_bn.report.curves import series
from fl_bn.report.formats import latex, results_csv, to_csv, to_latex, to_markdown
from fl_bn.report.layout import Table, lay_out, tabulate
from fl_bn.report.line_pictures import curves
from fl_bn.report.settings import read_settings
from fl_bn.report.write import read
from fl_bn.run.config import ConfigError
from tests.report.made_up import comparison, rounds, run, sweep


def table_of(folder: Path) -> Table:
    cells = read_cells(folder)
    return tabulate(lay_out(read_settings(folder), cells), cells)


def lines_of(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def test_means_and_standard_deviations_by_hand(tmp_path: Path) -> None:
    table = table_of(comparison(tmp_path))
    assert (table.layout.row_axis, table.layout.rest) == ("method", ("split",))
    assert table.layout.rows == ("BN", "GN", "FixBN")  # as in the sweep file, not as in the alphabet
    assert table.layout.columns == ("IID", "1 class")
    at = {(row, column): entry for row, of in table.entries.items() for column, entry in of.items()}
    assert at["BN", "IID"].mean == pytest.approx(55)
    assert at["BN", "IID"].std == pytest.approx(math.sqrt(50))  # of 50 and 60, divided by n - 1
    assert at["BN", "IID"].std != pytest.approx(5)  # negative control: divided by n
    assert at["FixBN", "1 class"].mean == pytest.approx(55)  # of 60 and 50: not with the 90 of the run that goes on
    assert (at["FixBN", "1 class"].values, at["FixBN", "1 class"].runs) == ((60, 50), 3)
    assert at["BN", "1 class"].values == (30,)  # not with the 90 of the run that failed
    assert math.isnan(at["BN", "1 class"].std)
    assert (at["GN", "1 class"].runs, at["GN", "1 class"].instead) == (0, "not run")
    assert table.best == {("FixBN", "IID"), ("FixBN", "1 class")}


def test_a_row_that_stands_apart_is_best_of_nothing_and_compares_with_nothing(tmp_path: Path) -> None:
    """Control: without the key it is the best."""
    for method, accuracy in (("known", 0.9), ("a", 0.5), ("b", 0.4)):
        run(tmp_path, {"method": method}, rounds([accuracy]))
    sweep(tmp_path, "[report]\napart = ['known']")
    assert {row for row, _ in table_of(tmp_path).best} == {"a"}
    assert table_of(tmp_path).entries["known"]["accuracy"].mean == pytest.approx(90)
    sweep(tmp_path, "[report]\napart = ['known', 'b']")
    assert table_of(tmp_path).best == set()
    sweep(tmp_path, "[report]")
    assert {row for row, _ in table_of(tmp_path).best} == {"known"}


def test_the_best_round_instead_of_the_last(tmp_path: Path) -> None:
    sweep(tmp_path, "[report]\nat = 'best'")
    run(tmp_path, {"method": "a", "seed": 0}, rounds([0.2, 0.9, 0.5], test_loss=[3, 1, 2]))
    run(tmp_path, {"method": "a", "seed": 1}, rounds([0.2, None, 0.7], test_loss=[3, None, 2]))
    assert table_of(tmp_path).entries["a"]["accuracy"].values == (pytest.approx(90), pytest.approx(70))
    assert "best round" in table_of(tmp_path).caption
    sweep(tmp_path, "[report]\nat = 'best'\nmetric = 'test-loss'")  # the best loss is the smallest, and no percentage
    assert table_of(tmp_path).entries["a"]["test-loss"].values == (1, 2)


def test_the_best_loss_of_a_column_is_the_smallest_and_what_shows_alike_is_best_alike(tmp_path: Path) -> None:
    sweep(tmp_path, "[report]\nmetric = 'test-loss'")
    for method, loss in (("a", 0.50), ("b", 0.40), ("c", 0.400001)):
        run(tmp_path, {"method": method}, rounds([0.5], test_loss=[loss]))
    assert {row for row, _ in table_of(tmp_path).best} == {"b", "c"}
    sweep(tmp_path, "[report]\nmetric = 'accuracy'")
    assert {row for row, _ in table_of(tmp_path).best} == {"a", "b", "c"}


@pytest.mark.parametrize(("worst", "best", "value"), [("max", "a", 2), ("min", "b", 9)])
def test_a_task_of_ones_own_is_known_by_its_columns(worst: str, best: str, value: int, tmp_path: Path) -> None:
    """Its metric has a spread over clients beside it; where the worst client has the highest value, the lowest is best."""
    sweep(tmp_path, "[report]\nat = 'best'\nboxplot = true")
    for method, values in (("a", [3, 2, 5]), ("b", [4, 9, 6])):
        beside = {"loss-like-std": [0.1] * 3, f"loss-like-{worst}": [7] * 3}
        clients = {"clients": [[], [], [{"client": 0, "loss-like": 1}, {"client": 1, "loss-like": 11}]]}
        columns = {"loss-like": values, **beside, **clients}
        run(tmp_path, {"method": method}, [{"round": n + 1, **{name: of[n] for name, of in columns.items()}} for n in range(3)])
    table = table_of(tmp_path)
    assert table.best == {(best, "loss-like")}
    assert table.entries[best]["loss-like"].values == (value,)  # as it is, not in percent
    assert table.caption == "Loss like, best round, chosen by this very number: one seed."
    (drawn,) = [picture for picture in read(tmp_path).pictures if picture.name == "boxplot"]
    assert drawn.caption.startswith("Loss like of the clients")
    assert drawn.save(tmp_path, ["png"])[0].stat().st_size > 1000


def test_one_row_is_not_best_of_anything(tmp_path: Path) -> None:
    sweep(tmp_path)
    run(tmp_path, {"method": "a"}, rounds([0.5]))
    table = table_of(tmp_path)
    assert table.best == frozenset()
    assert "**" not in to_markdown(table)
    assert table.caption == "Test accuracy (%), last round: one seed."


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([{}, {}], "Test accuracy"),
        ([{"validation-share": 0.2}] * 2, "Validation accuracy"),
        ([{"evaluate-on": "training"}] * 2, "Training accuracy"),
        ([{}, {"validation-share": 0.2}], "Accuracy"),
    ],
)
def test_the_caption_says_which_samples_were_evaluated(config: list[dict[str, object]], said: str, tmp_path: Path) -> None:
    """Before, validation and training accuracy were called test accuracy, too."""
    sweep(tmp_path)
    for method, keys in zip(("a", "b"), config, strict=True):
        run(tmp_path, {"method": method}, rounds([0.5], test_loss=[1.5]), **keys)
    table = table_of(tmp_path)
    assert table.caption == f"{said} (%), last round: one seed."
    names = {"Test accuracy": "test loss", "Accuracy": "evaluation loss"}
    assert table.layout.title("test-loss") == names.get(said, f"{said.split()[0].lower()} loss")
    drawn = curves(table.layout, series(table.layout, "accuracy"), "round")
    assert drawn is not None
    assert drawn.caption.startswith(f"{said} (%) over rounds")


def test_a_loss_that_became_nan_is_not_the_last_finite_one(tmp_path: Path) -> None:
    """rounds.jsonl has null for NaN: the loss of round 2 must not pass for the last round's."""
    sweep(tmp_path, "[report]\nmetric = 'test-loss'")
    run(tmp_path, {"method": "a", "seed": 0}, rounds([0.5, 0.5, None, 0.1], test_loss=[2.0, 1.0, None, None]))
    run(tmp_path, {"method": "a", "seed": 1}, rounds([0.5, 0.5, None, 0.5], test_loss=[2.0, 1.0, None, 3.0]))
    run(tmp_path, {"method": "b", "seed": 0}, rounds([0.5, 0.5, None, 0.1], test_loss=[2.0, 1.0, None, None]))
    table = table_of(tmp_path)
    assert table.entries["a"]["test-loss"].values == (3.0,)
    assert (table.entries["b"]["test-loss"].values, table.entries["b"]["test-loss"].instead) == ((), "not finite")
    assert [p.cell.name for p in table.problems] == ["a-0", "b-0"]
    assert table.problems[0].why == "test-loss was not a finite number in round 4"
    text = (tmp_path / "runs" / "b-0" / "rounds.jsonl").read_text()
    (tmp_path / "runs" / "b-0" / "rounds.jsonl").write_text(text.replace('"test-loss": null', '"test-loss": NaN'))
    assert table_of(tmp_path).entries["b"]["test-loss"].instead == "not finite"


def test_a_metric_that_was_not_measured(tmp_path: Path) -> None:
    sweep(tmp_path, "[report]\nmetric = 'mean-iou'")
    run(tmp_path, {"method": "a"}, rounds([0.5]))
    run(tmp_path, {"method": "b"}, rounds([0.5], mean_iou=[0.25]))
    table = table_of(tmp_path)
    assert table.entries["a"]["mean-iou"].instead == "not measured"
    assert table.entries["b"]["mean-iou"].values == (25,)
    assert [(p.cell.name, p.why) for p in table.problems] == [("a", "mean-iou was not measured")]


def test_runs_with_different_settings_are_never_averaged(tmp_path: Path) -> None:
    """An axis that [report] forgets becomes a column: its values stay apart."""
    sweep(tmp_path, "[report]\nrows = 'method'\ncolumns = ['split']")
    for seed in (0, 1):
        for f, accuracy in ((1, 0.9), (2, 0.1)):
            run(tmp_path, {"method": "a", "split": "IID", "f": f, "seed": seed}, rounds([accuracy]))
    table = table_of(tmp_path)
    assert table.layout.columns == ("IID, 1", "IID, 2")
    assert [table.entries["a"][column].mean for column in table.layout.columns] == [pytest.approx(90), pytest.approx(10)]


def test_rows_and_columns_that_are_asked_for_and_numbers_by_size(tmp_path: Path) -> None:
    sweep(tmp_path, "[report]\nrows = 'split'\ncolumns = ['clients', 'method']")
    for clients in (10, 2):
        for split in ("x", "y"):
            run(tmp_path, {"method": "a", "clients": clients, "split": split, "on": True}, rounds([clients / 100]))
    table = table_of(tmp_path)
    assert (table.layout.rows, table.layout.columns) == (("x", "y"), ("2, a", "10, a"))
    assert table.corner == "split \\ clients, method"
    sweep(tmp_path, "[report]\nrows = 'method'")
    assert table_of(tmp_path).layout.column_heading("2, x, true") == "clients 2, x, on true"


@pytest.mark.parametrize("key", ["rows = 'methods'", "columns = ['methods']"])
def test_an_axis_that_no_run_has_is_refused(key: str, tmp_path: Path) -> None:
    comparison(tmp_path, key)
    with pytest.raises(ConfigError, match=r"names the axis 'methods', which no run has: did you mean 'method'\? \(axes: method, split"):
        table_of(tmp_path)


def test_a_folder_without_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no runs yet"):
        read_cells(sweep(tmp_path))


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
    why = {p.cell.name: p.why for p in table.problems}
    assert why["GN-IID-0"].startswith("cell.json: JSONDecodeError")
    assert why["GN-IID-1"] == "the last line of rounds.jsonl is incomplete"
    assert why["BN-IID-0"] == "finished, but rounds.jsonl has no round"
    assert why["FixBN-1_class-2"] == "running after 1 of 1 rounds"
    assert len(read_cells(tmp_path)) == 11


def test_nothing_readable_is_an_empty_table(tmp_path: Path) -> None:
    path = run(sweep(tmp_path), {"method": "a"}, [])
    (path / "cell.json").write_text(json.dumps({"axes": {}}))
    table = table_of(tmp_path)
    assert (table.entries, len(table.problems)) == ({}, 1)
    assert "KeyError" in to_markdown(table)
    assert to_latex(table)
    assert to_csv(table)


# The formats

PAPER = """
[paper]
source = "Table 3"
numbers = { FixBN = { "1 class" = "54.2" }, HBN = { IID = "77" } }
"""


def test_what_the_sweep_leaves_out_is_not_called_not_run(tmp_path: Path) -> None:
    """GN has no run with one class. Controls: the file without ``skip``, and one that leaves out another combination."""
    skips = {"{ method = 'GN', split = '1 class' }": "left out", "{ method = 'GN', split = 'IID' }": "not run", "": "not run"}
    for skip, said in skips.items():
        folder = comparison(tmp_path / said / str(len(skip)))
        file = folder / "sweep.toml"
        file.write_text(f"skip = [{skip}]\n{file.read_text()}")
        table = table_of(folder)
        assert table.entries["GN"]["1 class"].instead == said
        assert f"| GN | 71.0 (1.4) | {said} |" in to_markdown(table)


def test_a_skip_that_is_no_list_of_tables_is_refused(tmp_path: Path) -> None:
    folder = comparison(tmp_path)
    for skip in ("'GN'", "['GN']", "[{}]"):
        (folder / "sweep.toml").write_text(f"skip = {skip}")
        with pytest.raises(ConfigError, match="skip must be a list of tables"):
            read_settings(folder)


def test_the_formats_by_hand(tmp_path: Path) -> None:
    table = table_of(comparison(tmp_path, PAPER))
    assert lines_of(to_csv(table)) == [
        ["method", *(f"{column} {kind}" for column in ("IID", "1 class") for kind in ("mean", "std", "seeds", "paper"))],
        ["BN", "55", "7.07107", "2", "", "30", "", "1", ""],
        ["GN", "71", "1.41421", "2", "", "", "", "0", ""],
        ["FixBN", "85", "7.07107", "2", "", "55", "7.07107", "2", "54.2"],
    ]
    markdown = to_markdown(table).splitlines()
    assert markdown[:7] == [
        "# Made up",
        "",
        r"| method \\ split | IID | 1 class |",
        "|---|---:|---:|",
        "| BN | 55.0 (7.1) | 30.0, 1 of 2 |",
        "| GN | 71.0 (1.4) | not run |",
        "| FixBN | **85.0** (7.1) | **55.0** (7.1), 2 of 3 [54.2] |",
    ]
    assert (
        "Test accuracy (%), last round: mean (standard deviation) over 2 seeds where nothing else is said; in brackets: Table 3."
        in markdown
    )
    assert "- BN-1\\_class-1: failed: RunFailed: client 3 sent NaN" in markdown
    assert "- FixBN-1\\_class-2: running after 1 of 1 rounds" in markdown
    assert "The paper's numbers without a place here: HBN, IID: 77." in markdown
    tex = to_latex(table)
    assert r"method & IID & 1 class \\" in tex
    assert r"FixBN & \textbf{85.0} (7.1) & \textbf{55.0} (7.1), 2 of 3 [54.2] \\" in tex
    assert "% not from BN-1_class-1: failed: RunFailed: client 3 sent NaN\n" in tex
    assert tex.count(r"\textbf") == 2


def test_results_have_a_line_per_run(tmp_path: Path) -> None:
    comparison(tmp_path)
    run(tmp_path, {"method": "X", "f": 3}, rounds([0.2, 0.1], exchanges=[6, 6], bytes_up_weights=[100, 50], bytes_down_exchange=[1, None]))
    cells = read_cells(tmp_path)
    found = {row["run"]: row for row in csv.DictReader(io.StringIO(results_csv(table_of(tmp_path), cells)))}
    assert len(found) == 12
    line = found["X-3"]
    assert [line[k] for k in ("method", "split", "f", "seed", "status", "rounds")] == ["X", "", "3", "", "finished", "2"]
    assert [line[k] for k in ("last", "best", "best-round", "bytes-per-client", "exchanges")] == ["10", "20", "1", "151", "14"]
    assert (found["BN-1_class-1"]["status"], found["BN-1_class-1"]["error"]) == ("failed", "RunFailed: client 3 sent\nNaN")


def test_latex_is_escaped() -> None:
    assert latex("50% & a_b #1 $x$ {y}") == r"50\% \& a\_b \#1 \$x\$ \{y\}"
    assert latex("\\input{~/x^2}") == r"\textbackslash{}input\{\textasciitilde{}/x\textasciicircum{}2\}"
    assert latex("[2ex] *") == "{[}2ex{]} {*}"  # after \\ they would be its option
    assert latex("a\n\nb") == "a b"


def test_labels_cannot_break_out_of_markdown_and_latex(tmp_path: Path) -> None:
    sweep(tmp_path, "title = 'a | b'")
    label = "a|b <script> *c* `d`\n% \\end{table}"
    run(tmp_path, {"method": label}, rounds([0.5]), "failed", "first\n\\input{x}")
    table = table_of(tmp_path)
    row = next(line for line in to_markdown(table).splitlines() if "script" in line)
    assert row == r"| a\|b &lt;script> \*c\* \`d\` % \\end{table} | failed |"
    tex = to_latex(table)
    assert r"\% \textbackslash{}end\{table\}" in tex
    assert tex.count(r"\end{table}") == 1
    assert tex.splitlines()[-1].startswith("% ")
