"""The calendar belongs to the method: rounds with frozen statistics run at no more than its share of the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fl_bn.federation.settings import Schedule
from fl_bn.methods import METHODS, Method, freeze
from fl_bn.run.config import RunConfig
from tests.listed import listed

fixbn, fedavg, ROUNDS, BASE = METHODS["fixbn"], METHODS["fedavg"], 8, 0.05
Rates = Callable[[int, int], float]
SCHEDULES: dict[str, Rates] = {
    "constant": Schedule(BASE, "constant", 1.0),
    "step, the paper's": Schedule(BASE, "step", 0.1),
    "step, gentle": Schedule(BASE, "step", 0.5),
    "exponential, steep": Schedule(BASE, "exponential", 0.2),
    "cosine": Schedule(BASE, "cosine", 1.0),
    "milestones": Schedule(BASE, "milestones", 1.0, ((0.5, 0.02), (0.75, 2.0))),
    "warm-up": lambda round, rounds: BASE * min(1.0, round / 3),
}
FREEZING: dict[str, tuple[Method, float]] = {
    "fixbn": (fixbn(), 0.1),
    "fedtan2": (METHODS["fedtan2"](), 0.02),
    "fedavg, frozen": (freeze(fedavg(), ROUNDS // 2), 0.1),
    "a key": (fixbn(frozen_rate=0.3), 0.3),
}
# the schedule alone decides: a share of 1, no round after the freeze or before it, batch statistics to the end
UNBOUNDED = [fixbn(frozen_rate=1.0), fixbn(freeze_after=ROUNDS), fixbn(freeze_after=0), fixbn(freeze_what="affine")]


def rates(method: Method, schedule: Rates) -> list[float]:
    return [method.learning_rate(schedule, round, ROUNDS) for round in range(1, ROUNDS + 1)]


@listed("schedule", SCHEDULES)
def test_no_frozen_round_is_faster_than_the_share(schedule: str) -> None:
    plan, half = rates(fedavg(), SCHEDULES[schedule]), ROUNDS // 2
    for name, (method, share) in FREEZING.items():
        want = plan[:half] + [min(rate, share * max(plan[:half])) for rate in plan[half:]]
        assert rates(method, SCHEDULES[schedule]) == want, name
    assert plan == [SCHEDULES[schedule](round, ROUNDS) for round in range(1, ROUNDS + 1)]
    assert all(rates(method, SCHEDULES[schedule]) == plan for method in UNBOUNDED)


def test_what_the_schedule_dropped_is_not_dropped_again() -> None:
    paper = SCHEDULES["step, the paper's"]
    for method in (fixbn(), fixbn(freeze_after=6)):  # the latter is frozen at the second drop
        assert rates(method, paper) == rates(fedavg(), paper)  # to the bit
    assert rates(fixbn(), SCHEDULES["step, gentle"])[4] == pytest.approx(0.1 * BASE)  # control: a drop that is too small
    late = [0.0] * (ROUNDS // 2) + [BASE] * (ROUNDS - ROUNDS // 2)  # a share of nothing is no limit
    assert rates(fixbn(), lambda round, rounds: late[round - 1]) == late


def test_the_run_config_s_key() -> None:
    def share(**keys: Any) -> float:
        values = {name.replace("_", "-"): value for name, value in keys.items()}
        return RunConfig.from_mapping({"setup": "experiments.papers:Papers", **values}).build_method().frozen_rate

    assert (share(method="fixbn"), share(method="fedtan2"), share(method="hbn", freeze_after=3)) == (0.15, 0.15, 0.15)
    for unsafe in ({"clip": "none"}, {"centre_gradients": "never"}, {"optimizer": "adam", "momentum": 0.0}):
        assert (share(method="fixbn", **unsafe), share(method="fedtan2", **unsafe)) == (0.1, 0.02)
    assert share(method="hbn", freeze_after=3, hbn_lam=0.1) == 0.1  # the paper's, whose gradients are as they are
    for method in ({"method": "fixbn"}, {"method": "fedtan2"}, {"method": "silobn", "freeze_after": 3}):
        assert share(frozen_rate=0.5, **method) == 0.5
    assert share(method="fedavg") == 1.0
