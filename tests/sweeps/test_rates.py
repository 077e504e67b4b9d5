"""A claim's page says at which learning rates its methods were tried, and whether the claim's is the best of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.catalogue import FOLDER, Experiment, find
from experiments.claims import VARIANT, read_register
from experiments.evidence import definition, gather, runs_of
from experiments.evidence_page import markdown, write_evidence
from experiments.rates import Tried, in_words, tried
from fl_bn.report.settings import SEED
from tests.sweeps.evidence_runs import ALL, CLAIMS, DEFINITION, RATES, kept, register

WITH_RATES = DEFINITION.replace("[run]", "[run]\nlearning-rate = 0.01", 1) + RATES
CLAIM = CLAIMS.replace("place =", 'rates = "rates"\nplace =')
FOUND = {
    f"{method}-{rate}-seed{seed}": accuracy + 0.01 * (seed - 7)
    for method, of in {"FedAvg": {"0.01": 0.4, "0.1": 0.3}, "FedBN": {"0.01": 0.5, "0.1": 0.55}}.items()
    for rate, accuracy in of.items()
    for seed in (7, 8)
}


@pytest.fixture
def rated(experiment: Experiment) -> Experiment:
    experiment.file.write_text(WITH_RATES)
    register(experiment, CLAIM)
    return replace(experiment, variants=(*experiment.variants, "rates"))


def page(experiment: Experiment, tmp_path: Path, found: dict[str, float]) -> str:
    folder = kept(experiment, tmp_path, ALL)
    kept(experiment, tmp_path, found, variant="rates")
    return markdown(gather(folder, experiment.file.parent))


def test_the_page_says_where_another_rate_was_better(rated: Experiment, tmp_path: Path) -> None:
    text = page(rated, tmp_path, FOUND)
    said = "the claim's rate is the best that was tried for FedAvg; another was better, by so many points, for FedBN (0.1, by 5.0)."
    assert f"Learning rates, tried on samples held out of the training part: {said}" in text
    write_evidence(tmp_path / "out", tmp_path / "pages", rated.file.parent)
    assert "another was better, by so many points, for FedBN (0.1, by 5.0)" in (tmp_path / "pages" / "X-1.html").read_text()


def test_a_rate_that_was_not_tried_is_said(rated: Experiment, tmp_path: Path) -> None:
    """Controls: the test above; without the key nothing is said of rates."""
    rated.file.write_text(WITH_RATES.replace("learning-rate = 0.01\n", "learning-rate = 0.02\n", 1))
    text = page(rated, tmp_path, FOUND)
    assert "the claim's was not tried, and this is the best of the others, for FedAvg (0.01), FedBN (0.1)." in text
    register(rated)
    assert "Learning rates" not in markdown(gather(tmp_path / "out", rated.file.parent))


def test_a_run_that_did_not_stay_finite_is_no_accuracy() -> None:
    lost = Tried("BN", {0.1: [60.0, 62.0], 1.0: []}, 1.0)
    assert (lost.shown(0.1), lost.shown(1.0), lost.shown(5.0)) == ("**61.0** (1.4)", "not finite", "not run")
    assert lost.lost == math.inf
    assert in_words([lost]) == "another was better, by so many points, for BN (0.1, by inf)"


def test_every_method_of_the_repository_s_rates_stands_in_its_claim() -> None:
    """Of the repository: the claim's rate is among those that were tried, for all methods."""
    rated = [claim for claim in read_register(FOLDER).claims if claim.rates]
    assert len(rated) > 3
    for claim in rated:
        (experiment,) = find([claim.of])
        claimed = {(cell.axes["method"], cell.config.learning_rate) for cell in definition(experiment, claim.variant)[0]}
        here = {(cell.axes["method"], cell.config.learning_rate) for cell in definition(experiment, claim.rates)[0]}
        methods = {method for method, _ in here}
        assert methods <= {method for method, _ in claimed}, claim.id
        assert all(here & {(m, rate) for m, rate in claimed if m == method} for method in methods), claim.id
        assert all(SEED not in cell.axes or cell.config.seed >= 10 for cell in definition(experiment, claim.rates)[0]), claim.id


def test_a_method_is_compared_with_the_claim_s_runs_of_the_same_place(tmp_path: Path) -> None:
    """002-T4's SCAFFOLD has a rate of its own: FedAvg's rows are compared with FedAvg's. Of the repository, with made accuracies."""
    (of,) = find(["002-T4"])
    cells, _ = definition(of, "rates")
    folder = kept(of, tmp_path, {cell.config.name: 0.3 for cell in cells}, variant="rates")
    found = tried(runs_of(of, VARIANT, folder), runs_of(of, "rates", folder))
    assert {method.claimed for method in found} == {0.01}
