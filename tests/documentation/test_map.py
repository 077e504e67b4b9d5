"""README's and choosing.md's tables, the map's file and its page are what the command makes of the cells that were run."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from scipy.stats import t

from experiments.marks import replaced
from fl_bn.advise import regimes
from fl_bn.advise.measure import measure
from fl_bn.run.config import ConfigError, RunConfig
from tests.documentation.pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import own_map
import own_map_pages as pages

MEASURED = {one.name: one.measured for one in regimes.load()}


def made(lines: own_map.Accuracies) -> list[regimes.Regime]:
    unknown = next(iter(MEASURED.values()))
    return pages.regimes_of(lines, {name: MEASURED.get(name, unknown) for name in own_map.REGIMES})


def test_the_map_is_that_of_the_cells() -> None:
    assert regimes.FILE.read_text() == regimes.dump(made(own_map.read(pages.CELLS)))


def test_the_page_of_all_numbers_is_that_of_the_cells() -> None:
    lines = own_map.read(pages.CELLS)
    assert pages.TABLE.read_text() == pages.table(made(lines), lines)


@pytest.mark.parametrize("page", pages.WHERE, ids=lambda page: page.name)
def test_the_recommendation_is_that_of_the_cells(page: Path) -> None:
    text, lines = page.read_text(), own_map.read(pages.CELLS)
    assert replaced(text, pages.MARK, pages.recommendation(made(lines), pages.WHERE[page])) == text
    for place in [place for place in lines if place.phase == own_map.TEST and place.method == "hbn"]:
        lines[place] /= 2  # control: other numbers, another page
    assert replaced(text, pages.MARK, pages.recommendation(made(lines), pages.WHERE[page])) != text


@pytest.mark.slow
def test_the_regimes_are_measured_as_the_map_says() -> None:
    for name, said in MEASURED.items():
        config = own_map.keys(own_map.Place(own_map.TEST, name, "fedavg", 0, 0.1))
        found = measure(RunConfig.from_mapping(config))
        assert (found.classes, found.label_skew) == pytest.approx((said.classes, said.label_skew))
        assert (found.distance, found.by_labels) == pytest.approx((said.distance, said.by_labels), rel=0.05, abs=1e-3)


def test_every_regime_has_its_problem_in_words_and_every_method_its_page() -> None:
    assert list(pages.PROBLEMS) == list(own_map.REGIMES)
    assert sorted(name for words in pages.ROWS.values() for name in words) == sorted(own_map.REGIMES)
    for method in own_map.METHODS:
        file, _, anchor = pages.PAGES[method].partition("#")
        text = (ROOT / "docs" / "methods" / file).read_text().lower().replace(",", "")
        assert anchor.replace("-", " ") in text


def test_where_nothing_separates_the_table_says_so() -> None:
    lines = own_map.read(pages.CELLS)
    even = {
        place: 80.0 + place.seed
        for method in own_map.METHODS
        for place in [own_map.Place(own_map.RATE, "IID", method, own_map.RATE_SEED, rate) for rate in own_map.RATES]
        + [own_map.Place(own_map.TEST, "IID", method, seed, own_map.RATES[0]) for seed in own_map.SEEDS]
    }
    assert lines
    (line,) = [line for line in pages.recommendation(made(even), "").splitlines() if line.startswith("| Otherwise")]
    assert line == "| Otherwise | clients alike: [`fedavg`](others.md#fedavg-with-batchnorm), gains are within chance |"


def test_cells_come_in_order_and_tests_wait_for_their_rates() -> None:
    every = list(own_map.cells({}))
    assert len(set(every)) == len(every) == len(own_map.REGIMES) * len(own_map.METHODS) * (len(own_map.RATES) + len(own_map.SEEDS))
    assert all(place.rate == 0 for place in every if place.phase == own_map.TEST)
    tried = {
        own_map.Place(own_map.RATE, "IID", "gn", own_map.RATE_SEED, rate): value
        for rate, value in zip(own_map.RATES, (50.0, float("nan"), 60.0), strict=True)
    }
    assert own_map.best_rate(tried, "IID", "gn") == own_map.RATES[2]
    assert own_map.best_rate({}, "IID", "gn") == 0.0
    assert {own_map.keys(place)["validation-share"] > 0 for place in tried} == {True}
    assert own_map.keys(own_map.Place(own_map.TEST, "IID", "gn", 0, 0.1))["validation-share"] == 0


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ConfigError, match="the page needs the lines <!-- map --> and <!-- end -->"):
        replaced("# Page\n", "map", "table\n")


def test_the_least_difference_that_tells_apart_by_hand() -> None:
    """Rows 90 91, 80 83, 70 69: left over by method and seed are -.5 .5 .5 -.5 ... : squares by hand below."""
    spans = [1.0, 3.0, -1.0]  # seed 1 minus seed 0; their mean is 1
    left = sum(2 * ((span - 1.0) / 2) ** 2 for span in spans)  # 2 degrees of freedom
    found = pages.separable({"fedavg": {0: 90.0, 1: 91.0}, "gn": {0: 80.0, 1: 83.0}, "fbn": {0: 70.0, 1: 69.0}})
    assert found == pytest.approx(t.ppf(0.975, 2) * math.sqrt(2 * (left / 2) / 2))
    assert pages.separable({"fedavg": {0: 90.0}, "gn": {0: 80.0}}) == pages.ONE_SEED
