"""Settings: the learning rate's calendar, and combinations that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fl_bn.federation.settings import LocalTraining, learning_rate, milestones_of, seeded
from tests.listed import listed


def test_learning_rate_schedules() -> None:
    assert [learning_rate("constant", 0.1, 0.5, t, 4) for t in range(1, 5)] == [0.1] * 4
    assert [learning_rate("step", 1.0, 0.1, t, 8) for t in range(1, 9)] == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])
    assert [learning_rate("exponential", 1.0, 0.5, t, 4) for t in range(1, 5)] == [1, 0.5, 0.25, 0.125]
    assert [learning_rate("cosine", 1.0, 0.5, t, 4) for t in (1, 3)] == pytest.approx([1, 0.5])
    steps = milestones_of("0.25:0.5, 0.75:0.1")
    assert [learning_rate("milestones", 2.0, 0.9, t, 8, steps) for t in (1, 2, 3, 6, 7, 8)] == pytest.approx([2, 2, 1, 1, 0.2, 0.2])
    with pytest.raises(ValueError, match="schedule must be one of constant, step, exponential, cosine, milestones, but got 'linear'"):
        learning_rate("linear", 1.0, 0.5, 1, 4)


@listed(
    ("options", "reason"),
    [
        ({"batch_size": 1, "steps": 1}, "local training's batch_size must be >= 2, but got 1"),
        ({"batch_size": 2}, "either local epochs or local steps"),
        ({"batch_size": 2, "steps": 1, "epochs": 1}, "either local epochs or local steps"),
        ({"batch_size": 2, "steps": -1, "epochs": 1}, "steps must be >= 0, but got -1"),
        ({"batch_size": 2, "steps": 1, "optimizer": "lbfgs"}, "optimizer must be one of sgd, adam, but got 'lbfgs'"),
        ({"batch_size": 2, "steps": 1, "momentum": 1.0}, r"momentum must be in \[0, 1\), but got 1.0"),
        ({"batch_size": 2, "steps": 1, "weight_decay": -1e-4}, "weight_decay must be >= 0, but got -0.0001"),
        ({"batch_size": 2, "steps": 1, "update": "delta"}, "update must be one of weights, gradients, but got 'delta'"),
        ({"batch_size": 2, "steps": 2, "update": "gradients"}, "needs steps=1, .*, but got steps=2, epochs=0 and"),
        ({"batch_size": 2, "epochs": 1, "update": "gradients"}, "needs steps=1, epochs=0 .*, but got steps=0, epochs=1 and"),
        ({"batch_size": 2, "steps": 1, "update": "gradients", "optimizer": "adam"}, "but got steps=1, epochs=0 and optimizer='adam'"),
    ],
)
def test_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LocalTraining(**options)


def test_optimizers() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    sgd = LocalTraining(2, steps=1, momentum=0.9, weight_decay=0.1).make_optimizer(parameters, 0.3)
    assert isinstance(sgd, torch.optim.SGD)
    assert {k: sgd.defaults[k] for k in ("lr", "momentum", "weight_decay")} == {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.1}
    assert isinstance(LocalTraining(2, steps=1, optimizer="adam").make_optimizer(parameters, 0.3), torch.optim.Adam)


def test_seeded_depends_on_the_key_alone() -> None:
    draws = {key: seeded(*key).integers(2**62) for key in [(0, 1, 2), (0, 2, 1), (1, 1, 2), (0, 1, 2, 0)]}
    assert seeded(0, 1, 2).integers(2**62) == draws[(0, 1, 2)]
    assert len(set(draws.values())) >= 3
