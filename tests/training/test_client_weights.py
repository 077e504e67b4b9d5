"""How many samples a client counts for in averages: those of its round, or all that it has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_bn.federation.client_round import client_round
from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.sources import SampleSource, alone
from fl_bn.methods import METHODS
from fl_bn.run.config import ConfigError, RunConfig
from tests.training.cohorts import as_one_program

DRAWN = LocalTraining(batch_size=4, steps=2)


def samples(n: int) -> Samples:
    rng = torch.Generator().manual_seed(n)
    return Samples(torch.randint(0, 256, (n, 3, 8, 8), generator=rng, dtype=torch.uint8), torch.arange(n) % 3)


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


@pytest.mark.parametrize("together", [False, True])
def test_a_client_counts_for_what_it_drew_or_for_all_it_has(together: bool) -> None:
    for settings, expected in ((DRAWN, 8), (replace(DRAWN, weigh_all=True), 20)):
        rounds = [alone(network(), METHODS["fedavg"](), settings, 0.1)]
        done = as_one_program(rounds, [samples(20)], 0, [0]) if together else [client_round(rounds[0], SampleSource(samples(20), 0, 0))]
        assert done[0][0].samples == done[0][0].weight == settings.planned(20) == expected


def test_the_key_says_so() -> None:
    values = {"method": "fedavg", "local-steps": 2, "batch-size": 4}
    config = RunConfig.from_mapping({**values, "client-weights": "data"})
    assert config.local_training().weigh_all
    assert config.round_policy().client_weights == "samples"  # of what the clients then say
    assert not RunConfig.from_mapping(values).local_training().weigh_all  # control
    with pytest.raises(ConfigError, match="client-weights must be 'samples' for fedtan, but got 'data'"):
        RunConfig.from_mapping({"method": "fedtan", "client-weights": "data"})
