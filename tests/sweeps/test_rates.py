"""A claim's page says at which learning rates its methods were tried, and whether the claim's is the best of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fl_bn.report.settings import SEED
from fl_bn.run.config import ConfigError
from fl_bn.sweep.evidence import claim_of, definition, gather
from fl_bn.sweep.evidence_page import markdown, write_evidence
from fl_bn.sweep.experiments import Experiment, find
from fl_bn.sweep.rates import Tried, in_words, tried
from tests.sweeps.evidence_runs import ALL, DEFINITION, RATES, kept

WITH_RATES = DEFINITION.replace("[run]", "[run]\nlearning-rate = 0.01", 1).replace("compare =", 'rates = "rates"\ncompare =', 1) + RATES
FOUND = {
    f"{method}-{rate}-seed{seed}": accuracy + 0.01 * (seed - 7)
    for method, of in {"FedAvg": {"0.01": 0.4, "0.1": 0.3}, "FedBN": {"0.01": 0.5, "0.1": 0.55}}.items()
    for rate, accuracy in of.items()
    for seed in (7, 8)
}


@pytest.fixture
def rated(experiment: Experiment) -> Experiment:
    experiment.file.write_text(WITH_RATES)
    return replace(experiment, variants=(*experiment.variants, "rates"))


def page(experiment: Experiment, tmp_path: Path, found: dict[str, float]) -> str:
    folder = kept(experiment, tmp_path, ALL)
    kept(experiment, tmp_path, found, variant="rates")
    return markdown(gather(folder, [experiment]))


def test_the_page_has_every_rate_and_says_where_another_was_better(rated: Experiment, tmp_path: Path) -> None:
    text = page(rated, tmp_path, FOUND)
    assert "### X-1: learning rates" in text
    assert "| FedAvg | **40.5** (0.7) | 30.5 (0.7) | 0.01 |" in text
    assert "| FedBN | 50.5 (0.7) | **55.5** (0.7) | 0.01 |" in text
    assert "the claim's rate is the best that was tried for FedAvg; another was better, by so many points, for FedBN (0.1, by 5.0)." in text
    assert "after 4 rounds; seeds: 2." in text
    write_evidence(tmp_path / "out", tmp_path / "pages", [rated])
    assert "another was better, by so many points, for FedBN (0.1, by 5.0)" in (tmp_path / "pages" / "X-1.html").read_text()
    assert "Cells run of the variant `rates`: 8 of 8" in text


def test_a_rate_that_was_not_tried_is_said(rated: Experiment, tmp_path: Path) -> None:
    """Controls: the test above; without the key there is no section."""
    rated.file.write_text(WITH_RATES.replace("learning-rate = 0.01\n", "learning-rate = 0.02\n", 1))
    text = page(rated, tmp_path, FOUND)
    assert "the claim's was not tried, and this is the best of the others, for FedAvg (0.01), FedBN (0.1)." in text
    assert "| FedBN | 50.5 (0.7) | **55.5** (0.7) | 0.02 |" in text
    rated.file.write_text(rated.file.read_text().replace('rates = "rates"\n', "", 1))
    assert "learning rates" not in markdown(gather(tmp_path / "out", [rated]))


def test_what_is_missing_is_counted(rated: Experiment, tmp_path: Path) -> None:
    text = page(rated, tmp_path, {name: value for name, value in FOUND.items() if name != "FedBN-0.1-seed8"})
    assert "| FedBN | 50.5 (0.7) | **55.0** | 0.01 |" in text
    assert "Missing of the variant `rates`: 1 cell, " in text
    folder = kept(rated, tmp_path, ALL, out="none")
    assert "Missing of the variant `rates`: 8 cells" in markdown(gather(folder, [rated]))


def test_a_run_that_did_not_stay_finite_is_no_accuracy() -> None:
    lost = Tried("BN", {0.1: [60.0, 62.0], 1.0: []}, 1.0)
    assert (lost.shown(0.1), lost.shown(1.0), lost.shown(5.0)) == ("**61.0** (1.4)", "not finite", "not run")
    assert lost.lost == math.inf
    assert in_words([lost]) == "another was better, by so many points, for BN (0.1, by inf)"


def test_every_method_of_the_repository_s_rates_stands_in_its_claim() -> None:
    """Of the repository: the claim's rate is among those that were tried, for all methods."""
    for experiment in find():
        claim = claim_of(experiment)
        if claim is None or not claim.rates:
            continue
        claimed = {(cell.axes["method"], cell.config.learning_rate) for cell in definition(experiment, "evidence")[0]}
        here = {(cell.axes["method"], cell.config.learning_rate) for cell in definition(experiment, claim.rates)[0]}
        methods = {method for method, _ in here}
        assert methods <= {method for method, _ in claimed}, experiment.name
        assert all(here & {(m, rate) for m, rate in claimed if m == method} for method in methods), experiment.name
        assert all(SEED not in cell.axes or cell.config.seed >= 10 for cell in definition(experiment, claim.rates)[0]), experiment.name


def test_a_variant_that_is_not_there_is_refused(experiment: Experiment, tmp_path: Path) -> None:
    folder = kept(experiment, tmp_path, ALL)
    experiment.file.write_text(DEFINITION.replace("compare =", 'rates = "rate"\ncompare =', 1))
    with pytest.raises(ConfigError, match="needs the variant 'rate', but there are"):
        gather(folder, [experiment])


def test_a_method_is_compared_with_the_claim_s_runs_of_the_same_place(experiment: Experiment, tmp_path: Path) -> None:
    """002-T4's SCAFFOLD has a rate of its own: FedAvg's rows are compared with FedAvg's. Of the repository, with made accuracies."""
    (of,) = find(["002-T4"])
    cells, _ = definition(of, "rates")
    made = {cell.config.name: 0.3 for cell in cells}
    folder = kept(of, tmp_path, made, variant="rates")
    (one,) = gather(folder, [of])
    assert one.runs is not None
    assert one.rates is not None
    assert {method.claimed for method in tried(one.runs, one.rates)} == {0.01}
