"""Negative control of test_dead_apps.py, with no deadline that a busy machine could miss: so it runs beside other tests."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.deployment.dying import Run, kill, parts
from tests.deployment.federation import Federation, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
DEAF = Path(__file__).with_name("deaf_supernode.py")


def test_without_the_mechanism_the_round_waits_until_its_deadline(tmp_path: Path) -> None:
    """Negative control: Flower's own SuperNode says nothing of the death, so the round ends at its deadline of 45 s."""
    with Federation(tmp_path / "federation", ("east", "west")) as federation:
        federation.start_all()
        federation.stop("sites/west")
        with parts(federation, "west", DEAF) as start:
            start("clientapp")
            run = Run(federation, tmp_path, "deaf", **{"round-timeout": 45.0})
            kill(federation, "west", run.hang("west"))
            rounds, begin = run.done(), time.monotonic()
            wait_until("the round ends", lambda: run.done() > rounds, 120)
            seconds = time.monotonic() - begin
            print(f"round done {seconds:.1f} s after the death")
            out = run.end()
        assert seconds > 25, "with the mechanism: 2 s (test_dead_apps.py)"
        assert "asked again" not in out
        assert "no reply before the deadline" in (run.rounds.parent / "clients.csv").read_text()
