"""Door 3: a Flower app of one's own, where it is not as the quickstart: shuffled loaders by replay, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_bn.flower import HBN, InProcessGrid, OwnAppStrategy, RunFailed
from fl_bn.methods import METHODS
from tests.doors.doors import Rounds, apart, own_app
from tests.doors.inner import ExchangeSettings
from tests.doors.test_federation import made
from tests.listed import listed
from tests.noted import noted


def make_net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


LOADERS = [DataLoader(TensorDataset(*made(client, n)), batch_size=8, shuffle=True) for client, n in enumerate((24, 40, 32))]
"""Batches in an order that torch's global generator decides."""


def my_app(method: str, **options: Any) -> ClientApp:
    return own_app(make_net(), METHODS[method](), LOADERS, fresh=make_net, **options)


def trained(app: ClientApp, strategy: OwnAppStrategy, rounds: int = 2) -> Rounds:
    found = noted(strategy)
    torch.manual_seed(3)
    strategy.start(InProcessGrid(app, len(LOADERS), {}), num_rounds=rounds)
    return [{name: torch.from_numpy(array) for name, array in found[n].items()} for n in range(1, rounds + 1)]


def fedtan(carrier: str) -> OwnAppStrategy:
    return OwnAppStrategy(make_net(), METHODS["fedtan"](), fraction_evaluate=0, exchange=ExchangeSettings(carrier))


def test_fedtan_by_replay_draws_the_same_batches_each_time() -> None:
    """Shuffled loaders and dropout: the handler comes to the same first step as often as it is called, else moments and batches differ."""
    local = trained(my_app("fedtan"), fedtan("local"))
    assert apart(trained(my_app("fedtan"), fedtan("replay")), local) < 1e-6
    assert not torch.equal(local[0]["0.weight"], local[1]["0.weight"])  # control


FAILED: dict[str, tuple[Callable[[], tuple[ClientApp, OwnAppStrategy]], str]] = {
    "a line is missing": (lambda: (my_app("fedtan", mods=[]), fedtan("replay")), "mods=[fl_bn.flower.replayed]"),
    "batches are missing": (lambda: (my_app("hbn", give=False), HBN(make_net(), fraction_evaluate=0)), "batches="),
}


@listed("make, key", [pytest.param(*case, id=name) for name, case in FAILED.items()])
def test_an_app_that_lacks_something_fails_by_its_name(make: Any, key: str, log: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RunFailed):
        trained(*make())
    assert key in log.text
