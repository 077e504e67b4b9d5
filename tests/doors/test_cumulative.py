"""BatchNorm with momentum=None averages over all batches of a run, as FedAvg in plain PyTorch does, in every door."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fl_bn import SeededBatches, methods
from tests.doors.doors import DOORS, RATE, Rounds, apart, drawn, through, wide
from tests.federation import random_samples

ROUNDS, SIZE = 3, 4


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(8, momentum=None)
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), norm, nn.ReLU(), nn.Linear(8, 4)).double()


CLIENTS = wide([random_samples(8, size=2, brightness=k / 2, seed=k) for k in range(2)])
LOADERS = [SeededBatches(own.x, own.y, SIZE) for own in CLIENTS]


def plainly(forgets: bool = False) -> Rounds:
    """FedAvg in plain PyTorch: the mean of the clients' state_dicts. ``forgets``: a new network's count each round (control)."""
    shared, found = net().state_dict(), Rounds()
    for number in range(1, ROUNDS + 1):
        ends = []
        for i, loader in enumerate(LOADERS):
            model = net().train()
            model.load_state_dict({**shared, "2.num_batches_tracked": torch.tensor(0)} if forgets else shared)
            optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
            for x, y in drawn(loader, i, number):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            ends.append(model.state_dict())
        shared = {name: ((ends[0][name] + ends[1][name]) / 2).to(t.dtype) for name, t in shared.items()}
        found.append(shared)
    return found


@pytest.mark.parametrize("door", DOORS)
def test_the_average_goes_on_as_in_plain_pytorch(door: str) -> None:
    found = through(door, net(), methods.fedavg(), CLIENTS, ROUNDS)
    assert apart(found, plainly()) < 1e-12
    means = [[{"mean": one["2.running_mean"]} for one in rounds] for rounds in (found, plainly(forgets=True))]
    assert not apart(*means) < 1e-3  # control
