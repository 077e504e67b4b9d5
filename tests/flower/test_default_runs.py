"""A method as it is by default does no harm where it is meant to help: FixBN does not fall when it freezes."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest

from fl_bn.flower import run_in_process

ROUNDS, EVERY = 24, 4  # frozen after round 12


def accuracies(folder: Path, **keys: Any) -> list[float]:
    """Return every fourth round's accuracy (%) of a run on digits, two classes per client."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    classes = {"clients": 10, "partition": "classes", "partition-parameter": 2.0}
    path = run_in_process({**classes, "rounds": ROUNDS, "evaluate-every": EVERY, "output": str(folder), "pictures": False, **keys})
    with (path / "rounds.csv").open() as lines:
        return [100 * float(row["accuracy"]) for row in csv.DictReader(lines) if row["accuracy"]]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fixbn", "fedtan2"])
def test_what_freezes_does_not_fall_below_its_level(method: str, tmp_path: Path) -> None:
    at_freeze = ROUNDS // EVERY // 2 - 1
    found = accuracies(tmp_path / "default", method=method)
    assert min(found[at_freeze:]) >= found[at_freeze] - 2
    other = {"setup": "experiments.papers:Papers", "frozen-rate": 1.0, "clip": "none", "centre-gradients": "never"}
    control = accuracies(tmp_path / "control", method=method, **other)
    assert control[: at_freeze + 1] == found[: at_freeze + 1]
    assert min(control[at_freeze:]) < control[at_freeze] - 20
