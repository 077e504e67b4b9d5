"""Accuracy before and after local training at a site: sent where the site allows it, and withheld where it bounds its evaluations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fl_bn.flower import BatchNormStrategy, Rounds
from fl_bn.methods import METHODS
from tests.federation import random_samples
from tests.flower.inside import LocalTraining, RoundRecord, Samples
from tests.hostile.bisecting import with_node_config
from tests.in_process import WatchedGrid, client_app
from tests.networks import seeded_network

DATA: list[Samples] = [random_samples(n, seed=n) for n in (12, 8)]


def record(evaluates: bool = True, **node_config: Any) -> RoundRecord:
    model, method = seeded_network("cnn"), METHODS["fedavg"]()
    settings = LocalTraining(batch_size=4, steps=1, local_evaluation=evaluates)
    grid = with_node_config(WatchedGrid(client_app(method, DATA, settings, model=model), len(DATA)), **node_config)
    strategy = BatchNormStrategy(model, method, Rounds(clients=2, wait=0.0))
    strategy.start(grid, num_rounds=1)
    return strategy.record


@pytest.mark.parametrize(
    ("node_config", "told"),
    [({}, 2), ({"min-samples": 10}, 1), ({"min-samples": 20}, 0), ({"max-evaluations": 100}, 0)],
)
def test_what_a_site_allows(node_config: dict[str, Any], told: int) -> None:
    made = record(**node_config)
    known = [client for client in made.clients if not math.isnan(client.before)]
    assert len(known) == told
    assert all(0 <= client.before <= 1 and 0 <= client.after <= 1 for client in known)
    assert len(made.accepted) == 2


def test_off_by_default_and_without_a_bit_of_difference() -> None:
    on, off = record(), record(evaluates=False)
    assert all(math.isnan(client.before) for client in off.clients)
    assert [client.loss for client in on.clients] == [client.loss for client in off.clients]
    assert torch.tensor([client.before for client in on.clients]).isfinite().all()  # control
