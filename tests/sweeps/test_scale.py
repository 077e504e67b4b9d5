"""Whether a run is long enough to speak of a claim: steps per client and phase of the schedule, or a flat curve."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.claims import Claim, Rules
from experiments.scale import phases, too_short
from fl_bn.report.cells import Cell
from fl_bn.run.config import RunConfig

RISING = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
FLAT = [0.5] * 10


def cell(curve: list[float], **config: Any) -> Cell:
    keys = {"rounds": 100, "local-steps": 10, "learning-rate-schedule": "constant", **{k.replace("_", "-"): v for k, v in config.items()}}
    step = keys["rounds"] // len(curve)
    rows = tuple({"round": step * n, "accuracy": value} for n, value in enumerate(curve, 1))
    return Cell("one", {}, {**RunConfig().to_mapping(), **keys}, "finished", rows=rows)


def short(one: Cell, **claim: Any) -> str:
    return too_short([one], Claim("000-T1", "Table 1", "c", **claim), Rules())


def test_a_third_of_the_steps_is_enough() -> None:
    assert short(cell(RISING), steps=(3000.0,)) == ""  # 1,000 of 3,000
    assert short(cell(RISING), steps=(3100.0,)) == "32 % of the paper's steps per client"
    assert short(cell(RISING, fraction=0.5), steps=(3000.0,)) == "17 % of the paper's steps per client"
    assert short(cell(RISING)) == ""  # a claim that is not of converged accuracy


def test_every_phase_of_the_schedule_needs_its_share() -> None:
    """As long as the paper's in all, but the last phase is not. Control: the paper's own shares."""
    milestones = {"learning_rate_schedule": "milestones", "learning_rate_milestones": "0.5:0.1, 0.9:0.01"}
    in_a_phase = "of the paper's steps per client in a phase of the schedule"
    assert phases(RunConfig(**milestones)) == [
        50,
        90,
        100,
    ]
    assert short(cell(RISING, **milestones), steps=(500.0, 400.0, 1000.0)) == f"10 % {in_a_phase}"
    assert short(cell(RISING, **milestones), steps=(500.0, 400.0, 100.0)) == ""
    assert short(cell(RISING, learning_rate_schedule="step"), steps=(1600.0, 800.0, 800.0)) == f"31 % {in_a_phase}"


def test_schedules_of_other_phases_are_compared_as_a_whole() -> None:
    assert short(cell(RISING, learning_rate_schedule="cosine"), steps=(2000.0, 1000.0)) == ""
    assert short(cell(RISING, learning_rate_schedule="cosine"), steps=(4000.0, 1000.0)) == "20 % of the paper's steps per client"


def test_passes_over_the_data_count_as_steps_where_samples_are_known() -> None:
    one = cell(RISING, local_steps=0, local_epochs=1, batch_size=4)
    assert short(one, steps=(1250.0,), client_samples=20.0) == ""  # 5 steps a pass, 500 in all
    assert short(one, steps=(1600.0,), client_samples=20.0).startswith("31 %")
    assert short(one, epochs=(300.0,)) == ""
    assert short(one, samples=(6000.0,), client_samples=20.0) == ""  # 2,000
    assert short(one, samples=(8000.0,), client_samples=20.0) == "25 % of the paper's samples per client"
    assert short(cell(RISING, batch_size=4), samples=(16000.0,)) == "25 % of the paper's samples per client"
    assert short(one, epochs=(400.0,)) == "25 % of the paper's epochs per client"


@pytest.mark.parametrize("schedule", ["constant", "exponential"])
def test_a_flat_curve_is_enough(schedule: str) -> None:
    """Control: one that gains in the last fifth."""
    decay = {"learning_rate_decay": 0.998} if schedule == "exponential" else {}
    assert short(cell(FLAT, learning_rate_schedule=schedule, **decay), steps=(99999.0,)) == ""
    assert short(cell([*FLAT[:8], 0.5, 0.52], learning_rate_schedule=schedule, **decay), steps=(99999.0,)) != ""
    assert short(cell([0.1, *FLAT[1:]], learning_rate_schedule=schedule, **decay), steps=(99999.0,)) == ""


def test_a_curve_that_the_rate_has_ended_is_not_flat() -> None:
    """A cosine ends at 0, and an exponential can. A step's last phase is flat, its first is not."""
    assert short(cell(FLAT, learning_rate_schedule="cosine"), steps=(99999.0,)) != ""
    assert short(cell(FLAT, learning_rate_schedule="exponential", learning_rate_decay=0.9), steps=(99999.0,)) != ""
    steep = [0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert short(cell(steep, learning_rate_schedule="step"), steps=(9e4, 9e4, 9e4)) != ""
