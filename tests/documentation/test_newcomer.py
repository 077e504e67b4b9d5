"""The newcomer's table is what the command makes of the cells that were run."""

from __future__ import annotations

import sys

from experiments.marks import replaced
from tests.documentation.pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import newcomer

FOLDER = ROOT / "benchmarks" / "results" / "newcomer"


def test_the_table_is_that_of_the_cells() -> None:
    rows, before, text = newcomer.read(FOLDER / "cells.csv"), newcomer.read(FOLDER / "before.csv"), (FOLDER / "table.md").read_text()
    assert newcomer.table(rows, before) == text
    key = next(iter(rows))
    other = {**rows, key: {**rows[key], "all_classes": "1.0"}}
    assert newcomer.table(other, before) != text  # control
    assert newcomer.table(rows, other) != text
    lacking = {one: row for one, row in rows.items() if one != key}
    assert newcomer.whole(lacking).keys() == {one for one in newcomer.whole(rows) if one[2] != key[2]}
    page = newcomer.PAGE.read_text()
    assert replaced(page, newcomer.MARK, newcomer.excerpt(rows)) == page


def test_every_cell_once_and_the_first_seed_first() -> None:
    cells = [*newcomer.cells()]
    assert len(set(cells)) == len(cells) == len(newcomer.REGIMES) * len(newcomer.METHODS) * len(newcomer.SEEDS)
    assert {seed for _, _, seed in cells[:18]} == {0}
