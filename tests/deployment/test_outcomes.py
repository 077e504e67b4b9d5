"""What the drills compare with: a run in one process in which the same clients were away, and the same replies were missing."""

from __future__ import annotations

from pathlib import Path

from flwr.clientapp import ClientApp

from fl_bn.flower import run_in_process
from tests.deployment.federation import SMALL
from tools.deployment.outcomes import gaps_of, offline, with_gaps


def test_a_client_that_was_away_is_told_from_one_whose_reply_was_not_used(tmp_path: Path) -> None:
    def ran(app: ClientApp, name: str) -> Path:
        path = run_in_process({**SMALL, "method": "fedbn", "min-replies": 0.0, "output": str(tmp_path), "name": name}, client_app=app)
        assert path is not None
        assert (path / "clients/client-0.safetensors").exists()
        return path

    with offline([(1, 2)]):
        assert gaps_of(ran(with_gaps({}), "away"), 3) == ([], [(1, 2)])
    assert gaps_of(ran(with_gaps({(2, 3): False}), "unused"), 3) == ([(2, 3)], [])
    assert gaps_of(ran(with_gaps({}), "whole"), 3) == ([], [])
