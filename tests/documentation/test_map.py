"""README's and choosing.md's tables, the map's file and its page are what the command makes of the cells that were run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from experiments.marks import replaced
from fl_bn.app.advise import regimes
from tests.documentation.pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import own_map
import own_map_pages as pages

MEASURED = {one.name: one.measured for one in regimes.load()}


def test_the_map_and_its_page_are_those_of_the_cells() -> None:
    lines = own_map.read(pages.CELLS)
    assert regimes.FILE.read_text() == regimes.dump(pages.regimes_of(lines, MEASURED))
    assert pages.TABLE.read_text() == pages.table(pages.regimes_of(lines, MEASURED), lines)


@pytest.mark.parametrize("page", pages.WHERE, ids=lambda page: page.name)
def test_the_recommendation_is_that_of_the_cells(page: Path) -> None:
    text, lines = page.read_text(), own_map.read(pages.CELLS)
    assert replaced(text, pages.MARK, pages.recommendation(pages.regimes_of(lines, MEASURED), pages.WHERE[page])) == text
    for place in [place for place in lines if place.phase == own_map.TEST and place.method == "hbn"]:
        lines[place] /= 2  # control: other numbers, another page
    assert replaced(text, pages.MARK, pages.recommendation(pages.regimes_of(lines, MEASURED), pages.WHERE[page])) != text


def test_the_interval_of_a_difference_is_paired_by_seed() -> None:
    assert pages.margin({0: 71.0, 1: 82.0, 2: 93.0}, {0: 70.0, 1: 82.0, 2: 91.0}) == pytest.approx(4.302653 / 3**0.5)  # 1, 0, 2; t of 2
