"""What was released counts, also where the server died before a checkpoint knew of it."""

from __future__ import annotations

import json
import os
import re
import signal
from functools import partial
from pathlib import Path

from fl_bn.flower.secagg.workflow import SecureSum
from fl_bn.secure.privacy import Journal, epsilon
from tests.experiment.resuming import AFTER, DISK, ROUNDS, Values, ends_with, run, small_run

NOISE, DELTA = 4.0, 1e-5
EACH = 2  # releases of a round of fbn: updates and statistics


def private(folder: Path, **overrides: str | int | float | bool) -> Values:
    secret: Values = {
        "secure_aggregation": True,
        "client_weights": "uniform",
        "dp_noise": NOISE,
        "secagg_clipping_range": 16.0,
        "method": "fbn",
    }
    return small_run(folder, **{**secret, **overrides})


def said(path: Path) -> tuple[int, float]:
    """Releases and epsilon, as the run's summary states them."""
    found = re.search(r"epsilon ([\d.]+) at delta 1e-05 per client after (\d+) releases", (path / "summary.md").read_text())
    assert found is not None
    return int(found[2]), float(found[1])


def right(path: Path, releases: int) -> None:
    assert said(path) == (releases, float(f"{epsilon(releases, NOISE, DELTA):.3g}"))
    assert Journal(path / "privacy.jsonl").total() == releases


def test_a_disk_that_keeps_no_spend_releases_nothing(tmp_path: Path) -> None:
    """The round changes nothing, as no sum was asked for."""

    def full(folder: Path) -> None:
        (folder / "privacy.jsonl").rename(folder / "aside")
        (folder / "privacy.jsonl").mkdir()  # no line can be added

    def free(folder: Path) -> None:
        (folder / "privacy.jsonl").rmdir()
        (folder / "aside").rename(folder / "privacy.jsonl")

    AFTER.update({1: full, 2: free})
    path = run(private(tmp_path / "runs", callbacks=DISK))
    right(path, EACH * (ROUNDS - 1))
    rounds = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    assert [row["aggregated"] for row in rounds] == [True, False, True, True, True]
    assert "Is a directory" in (path / "clients.csv").read_text()


def test_a_killed_server_forgets_no_release(tmp_path: Path) -> None:
    """SIGKILL in the middle of three rounds in turn, before or after a sum; the checkpoint of the round before knows nothing of it."""
    values = private(tmp_path / "runs")

    def dies(at: int, after: bool, resume: str) -> None:
        honest, sums = SecureSum.result, 0

        def killed(self: SecureSum) -> object:
            nonlocal sums
            sums += 1
            total = honest(self) if sums != at or after else None
            if sums == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return total

        SecureSum.result = killed  # type: ignore[assignment,method-assign]
        run(values, resume=resume)

    for resume, at, after in (("", 2, False), ("run", 2, True), ("run", 3, False)):
        ends_with(signal.SIGKILL, partial(dies, at, after, resume))
    right(run(values, resume="latest"), EACH * (ROUNDS + 3))
