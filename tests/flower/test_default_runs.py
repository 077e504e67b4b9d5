"""A method as it is by default does no harm where it is meant to help: FixBN does not fall when it freezes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from fl_bn.apps.client import app
from fl_bn.flower import BatchNormStrategy, InProcessGrid
from fl_bn.run.assembly import source_model
from fl_bn.run.config import RunConfig
from fl_bn.run.testing import test_metrics as metrics_of

ROUNDS, EVERY = 24, 4  # frozen after round 12


def accuracies(**keys: Any) -> list[float]:
    """Every fourth round's accuracy (%) of a run on digits, two classes per client."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    values = {"partition": "classes", "partition-parameter": 2.0, "rounds": ROUNDS, "evaluate-every": EVERY, "output": "", **keys}
    config, found = RunConfig.from_mapping(values), list[float]()

    def evaluate(model: nn.Module) -> dict[str, float]:
        metrics = metrics_of(config, model, torch.device("cpu"))
        found.append(100 * metrics["accuracy"])
        return metrics

    strategy = BatchNormStrategy(source_model(config), config.build_method(), config.round_policy(), evaluate=evaluate)
    strategy.start(InProcessGrid(app, config.clients, config.to_mapping()), num_rounds=config.rounds)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fixbn", "fedtan2"])
def test_what_freezes_does_not_fall_below_its_level(method: str) -> None:
    at_freeze = ROUNDS // EVERY // 2 - 1
    found = accuracies(method=method)
    assert min(found[at_freeze:]) >= found[at_freeze] - 2
    control = accuracies(method=method, **{"frozen-rate": 1.0, "clip": "none", "centre-gradients": "never"})
    assert control[: at_freeze + 1] == found[: at_freeze + 1]
    assert min(control[at_freeze:]) < control[at_freeze] - 20
