"""Exchanges of statistics before evaluations and round 1; and a method as it is by default does no harm when it freezes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_bn.flower import run_in_process
from fl_bn.methods import METHODS
from fl_bn.methods import hbn as make_hbn
from tests.in_process import Run, Samples, run
from tests.integration.runs import table

HBN, STATIC = METHODS["hbn"](), METHODS["static-bn"]()
MEASURE = "query.statistics"


def exchanges(ran: Run, round: int) -> int:
    """Return the number of exchanges of statistics of all clients."""
    return sum(m.metadata.message_type == MEASURE and m.metadata.group_id == str(round) for m in ran.grid.sent) / 3


def test_a_statistics_exchange_precedes_each_evaluation(clients: list[Samples]) -> None:
    exact = make_hbn(lam=1.0)
    for method, passes in ((HBN, 1), (make_hbn(evaluate="exact"), 2), (exact, 2), (make_hbn(lam=1.0, evaluate="hybrid"), 1), (STATIC, 2)):
        for how, number in (("auto", 1), ("passes", passes)):  # exact passes: one per BatchNorm layer
            assert exchanges(run(method, clients, 1, policy={"recalibration": how}), 1) == number
    seldom = run(HBN, clients, 3, policy={"evaluate_every": 2, "fraction": 0.4})
    assert seldom.grid.kinds() == ["query.hello 0", "train 1", "train 2", f"{MEASURE} 2", "train 3", f"{MEASURE} 3"]
    assert exchanges(seldom, 2) == 1  # every client is measured, though one trains
    assert run(METHODS["fbn"](), clients, 2).grid.kinds() == ["query.hello 0", "train 1", "train 2"]  # control: they do not lag


ROUNDS, EVERY = 24, 4  # frozen after round 12


def accuracies(folder: Path, **keys: Any) -> list[float]:
    """Return every fourth round's accuracy (%) of a run on digits, two classes per client."""
    classes = {"clients": 10, "partition": "classes", "partition-parameter": 2.0}
    path = run_in_process({**classes, "rounds": ROUNDS, "evaluate-every": EVERY, "output": str(folder), "pictures": False, **keys})
    return [100 * float(row["accuracy"]) for row in table(path / "rounds.csv") if row["accuracy"]]


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
