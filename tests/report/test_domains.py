"""Reports by domain, of what a round moves, and of programs that are no sweeps; numbers by hand."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fl_bn.report import write_index, write_program_report, write_report
from fl_bn.report.program import read_program
from fl_bn.report.write import read
from fl_bn.run.config import ConfigError
from tests.report.made_up import run, sweep


def rows(*accuracies: dict[str, float]) -> list[dict[str, object]]:
    return [{"round": n + 1, "accuracy": 0.9, "per-domain": found} for n, found in enumerate(accuracies)]


def five(folder: Path, report: str) -> Path:
    sweep(folder, f'[axes.method]\nA = {{ method = "fedavg" }}\nB = {{ method = "fedbn" }}\n[report]\n{report}\n')
    run(folder, {"method": "A", "seed": 0}, rows({"x": 0.1, "y": 0.2}, {"x": 0.5, "y": 0.7}))
    run(folder, {"method": "A", "seed": 1}, rows({"x": 0.1, "y": 0.2}, {"x": 0.7, "y": 0.7}))
    run(folder, {"method": "B", "seed": 0}, rows({"x": 0.3, "y": 0.9}))
    return folder


def test_a_domain_is_a_column_and_the_average_is_over_domains(tmp_path: Path) -> None:
    report = read(five(tmp_path, 'domains = true\ncolumns = ["domain"]'))
    means = {row: {column: round(entry.mean, 6) for column, entry in of.items()} for row, of in report.table.entries.items()}
    assert means == {"A": {"x": 60.0, "y": 70.0, "average": 65.0}, "B": {"x": 30.0, "y": 90.0, "average": 60.0}}
    assert report.state == "3 of 3 runs finished."
    plain = read(five(tmp_path / "plain", ""))  # control: without it, the accuracy of the round
    assert {entry.mean for of in plain.table.entries.values() for entry in of.values()} == {90.0}


def test_a_run_without_domains_is_there_as_its_average(tmp_path: Path) -> None:
    folder = five(tmp_path, "domains = true")
    run(folder, {"method": "B", "seed": 1}, [], "failed", "no room")
    report = read(folder)
    assert [problem.cell.status for problem in report.table.problems] == ["failed"]
    assert len(report.table.entries["B"]["average"].values) == 1


def test_what_a_round_moves_is_every_upload_and_one_download(tmp_path: Path) -> None:
    """FedTAN's Table 3 by its own count: six times 271,098 floats."""
    folder = sweep(tmp_path, '[report]\nmetric = "megabytes"')
    bytes_each = {"bytes-up-weights": 4 * 269_722, "bytes-up-statistics": 4 * 1_376, "bytes-down-weights": 4 * 271_098}
    run(folder, {"method": "BN"}, [{"round": 1, "accuracy": 0.1, "accepted": 5, **bytes_each}])
    run(folder, {"method": "half"}, [{"round": 1, "accuracy": 0.1, "accepted": 2, **bytes_each}])
    write_report(folder, ["md", "csv"])
    said = (folder / "table.md").read_text()
    assert "6.2049" in said
    assert f"{3 * 4 * 271_098 / 2**20:.4f}" in said  # control: two uploads are fewer


def test_what_a_run_moves_is_the_sum_over_its_rounds(tmp_path: Path) -> None:
    """FedTAN's Table 4 by its own count: 1,000 rounds of FedTAN in 10,000, here 1 in 10. It rounds before it adds: 60.6563."""
    folder = sweep(tmp_path, '[report]\nmetric = "gigabytes"')
    plain = {"bytes-up-weights": 4000 * 271_098, "bytes-down-weights": 4000 * 271_098}
    exchanged = {key: value + 4000 * 2 * 1_376 for key, value in plain.items()}
    rounds = [{"round": n + 1, "accuracy": 0.1, "accepted": 5, **(exchanged if n == 0 else plain)} for n in range(10)]
    run(folder, {"method": "M = 1"}, rounds)
    run(folder, {"method": "never"}, [{**row, **plain} for row in rounds])
    write_report(folder, ["md", "csv"])
    said = (folder / "table.md").read_text()
    assert "60.6566" in said
    assert "60.5951" in said  # control: without the exchange


def test_a_programs_page_has_its_pictures_and_the_first_rows_of_its_tables(tmp_path: Path) -> None:
    source = tmp_path / "x.toml"
    source.write_text('# What <it> is.\ntitle = "A & B"\n')
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "some_picture.png").write_bytes(b"\x89PNG picture")
    with (folder / "numbers.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("n", "error"), *((n, 0.123456789) for n in range(99))])
    page = write_program_report(folder, source).read_text()
    for said in ("A &amp; B", "What &lt;it&gt; is.", "some picture", "data:image/png;base64,", "0.1235", "The first 60 of 99 lines."):
        assert said in page
    assert "<it>" not in page
    index = write_index([folder], tmp_path / "index.html").read_text()
    assert "out/report.html" in index
    assert "A &amp; B" in index
    (folder / "program.toml").write_text("title = 3 3")
    with pytest.raises(ConfigError, match="is not the folder of an experiment"):
        read_program(folder)
