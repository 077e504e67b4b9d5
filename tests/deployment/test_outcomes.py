"""What the drills compare with: a run in one process in which the same clients were away, and the same replies were missing."""

from __future__ import annotations

from pathlib import Path

from flwr.clientapp import ClientApp

from fl_bn.flower import run_in_process
from tests.deployment.federation import SMALL
from tools.deployment.outcomes import Outcome, gaps_of, offline, with_gaps


def test_a_client_that_was_away_is_told_from_one_whose_reply_was_not_used(tmp_path: Path) -> None:
    def ran(app: ClientApp, name: str) -> Path:
        path = run_in_process({**SMALL, "method": "fedavg", "min-replies": 0.0, "output": str(tmp_path), "name": name}, client_app=app)
        assert path is not None
        return path

    with offline([(1, 2)]):
        assert gaps_of(ran(with_gaps({}), "away"), 3) == ([], [(1, 2)])
    assert gaps_of(ran(with_gaps({(2, 3): False}), "unused"), 3) == ([(2, 3)], [])
    assert gaps_of(ran(with_gaps({}), "whole"), 3) == ([], [])


def test_an_outcome_is_as_it_should_be_only_if_bits_and_words_are() -> None:
    outcome = Outcome("drill", 0, "fedbn", "")
    outcome.conclude([], "to the uninterrupted run")
    assert outcome.ok
    outcome.expect_names(["site east is lost", "train: node 10918397998099227553 is lost"])
    assert outcome.missed == ["a name in: train: node 10918397998099227553 is lost"]
    assert not outcome.ok
    outcome.conclude(["head.bias"], "to the uninterrupted run")
    assert (outcome.identical, outcome.notes) == ("", ["differs in head.bias"])
