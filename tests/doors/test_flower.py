"""Door 3: a Flower app of one's own, where it is not as the quickstart: shuffled loaders by replay, what is kept, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_bn.flower import FBN, HBN, FedBN, FixBN, InProcessGrid, OwnAppStrategy, RunFailed
from fl_bn.methods import METHODS
from fl_bn.objectives import Scaffold
from tests.doors.doors import Rounds, apart, own_app
from tests.doors.inner import Defence, ExchangeSettings
from tests.doors.test_federation import made
from tests.listed import listed
from tests.noted import noted


def make_net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


class Shuffled(DataLoader[Any]):
    """Batches in an order that torch's global generator decides."""

    def __init__(self, client: int, samples: int) -> None:
        super().__init__(TensorDataset(*made(client, samples)), batch_size=8, shuffle=True)


LOADERS = [Shuffled(client, samples) for client, samples in enumerate((24, 40, 32))]


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
    "one side has an objective": (lambda: (my_app("fixbn", objective=Scaffold()), FixBN(make_net(), fraction_evaluate=0)), "control"),
}


@listed("make, key", [pytest.param(*case, id=name) for name, case in FAILED.items()])
def test_an_app_that_lacks_something_fails_by_its_name(make: Any, key: str, log: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RunFailed):
        trained(*make())
    assert key in log.text


@listed(
    "make, options, wrong",
    [
        (FixBN, {"freeze_after": 3}, {"arrayrecord_key": "model"}),
        (FBN, {"tracking": 0.5}, {"objective": Scaffold(), "defence": Defence(1, "median", "median")}),
        (FedBN, {"min_train_nodes": 1}, {"min_fit_clients": 2}),
    ],
)
def test_a_strategy_takes_its_method_s_options_and_none_that_would_be_ignored(
    make: Callable[..., OwnAppStrategy], options: dict[str, Any], wrong: dict[str, Any]
) -> None:
    assert isinstance(make(make_net(), **options), OwnAppStrategy)
    with pytest.raises((TypeError, ValueError)):
        make(make_net(), **options, **wrong)


def test_a_client_that_must_be_aggregated_securely_answers_nothing_in_the_clear(log: pytest.LogCaptureFixture) -> None:
    grid = InProcessGrid(my_app("fbn"), len(LOADERS), {"secure-aggregation": True})
    with pytest.raises(RunFailed):
        FBN(make_net(), fraction_evaluate=0).start(grid, num_rounds=1)
    assert "secure-aggregation" in log.text
    assert trained(my_app("fbn"), FBN(make_net(), fraction_evaluate=0), rounds=1)  # control: where nobody asks for it, it answers
