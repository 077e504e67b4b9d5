"""Settings: the learning rate's calendar, and combinations that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.listed import listed
from tests.training.core import LocalTraining, learning_rate, milestones_of, seeded


def test_learning_rate_schedules() -> None:
    assert [learning_rate("constant", 0.1, 0.5, t, 4) for t in range(1, 5)] == [0.1] * 4
    assert [learning_rate("step", 1.0, 0.1, t, 8) for t in range(1, 9)] == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])
    assert [learning_rate("exponential", 1.0, 0.5, t, 4) for t in range(1, 5)] == [1, 0.5, 0.25, 0.125]
    assert [learning_rate("cosine", 1.0, 0.5, t, 4) for t in (1, 3)] == pytest.approx([1, 0.5])
    steps = milestones_of("0.25:0.5, 0.75:0.1")
    assert [learning_rate("milestones", 2.0, 0.9, t, 8, steps) for t in (1, 2, 3, 6, 7, 8)] == pytest.approx([2, 2, 1, 1, 0.2, 0.2])
    with pytest.raises(ValueError, match="schedule must be one of constant, step, exponential, cosine, milestones, but got 'linear'"):
        learning_rate("linear", 1.0, 0.5, 1, 4)


def test_seeded_depends_on_the_key_alone() -> None:
    draws = {key: seeded(*key).integers(2**62) for key in [(0, 1, 2), (0, 2, 1), (1, 1, 2), (0, 1, 2, 0)]}
    assert seeded(0, 1, 2).integers(2**62) == draws[(0, 1, 2)]
    assert len(set(draws.values())) >= 3


@listed(
    ("field", "options"),
    [
        ("batch_size", {"batch_size": 1}),
        ("either", {"steps": 0}),
        ("either", {"epochs": 1}),
        ("steps", {"steps": -1, "epochs": 1}),
        ("optimizer", {"optimizer": "lbfgs"}),
        ("momentum", {"momentum": 1.0}),
        ("weight_decay", {"weight_decay": -1e-4}),
        ("update", {"update": "delta"}),
        ("steps=1", {"steps": 2, "update": "gradients"}),
        ("steps=1", {"steps": 0, "epochs": 1, "update": "gradients"}),
        ("optimizer='adam'", {"update": "gradients", "optimizer": "adam"}),
    ],
)
def test_refused(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=field):
        LocalTraining(**{"batch_size": 2, "steps": 1, **options})
