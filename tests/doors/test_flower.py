"""Door 3: a Flower app of one's own, where it is not as the quickstart: shuffled loaders by replay, what is kept, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fl_bn.flower import FBN, HBN, FedBN, FixBN, InProcessGrid, OwnAppStrategy, RunFailed, answer, replayed, training
from fl_bn.methods import METHODS, Method
from fl_bn.objectives import Scaffold
from tests.doors.doors import apart
from tests.doors.inner import Defence, ExchangeSettings
from tests.listed import listed
from tests.noted import noted

SIZES = (24, 40, 32)


def make_net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def load_data(context: Context) -> DataLoader:
    client = int(context.node_config["partition-id"])
    x = torch.randn(SIZES[client], 6, generator=torch.Generator().manual_seed(client))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)


def my_app(method: Method, mods: list[Any] | None = None, give: bool = True, **options: Any) -> ClientApp:
    app = ClientApp()
    answer(app, make_net, method, load_data)

    @app.train(mods=mods)
    def train(msg: Message, context: Context) -> Message:
        loader = load_data(context)
        with training(msg, context, make_net(), method, loader if give else None, **options) as round:
            optimizer = torch.optim.SGD(round.model.parameters(), lr=0.1)
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(round.model(x), y)
                loss.backward()
                optimizer.step()
        return round.message(len(loader.dataset), loss.item())

    return app


def trained(app: ClientApp, strategy: OwnAppStrategy, rounds: int = 2) -> list[dict[str, torch.Tensor]]:
    found = noted(strategy)
    torch.manual_seed(3)
    strategy.start(InProcessGrid(app, len(SIZES), {}), num_rounds=rounds)
    return [{name: torch.from_numpy(array) for name, array in found[n].items()} for n in range(1, rounds + 1)]


def test_fedtan_by_replay_draws_the_same_batches_each_time() -> None:
    """Shuffled loaders and dropout: the handler comes to the same first step as often as it is called, else moments and batches differ."""
    method = METHODS["fedtan"]()

    def through(carrier: str) -> list[dict[str, torch.Tensor]]:
        strategy = OwnAppStrategy(make_net(), method, fraction_evaluate=0, exchange=ExchangeSettings(carrier))
        return trained(my_app(method, [replayed]), strategy)

    assert apart(through("replay"), through("local")) < 1e-6
    first, second = through("local")
    assert not torch.equal(first["0.weight"], second["0.weight"])


def replayed_without_its_mod() -> tuple[ClientApp, OwnAppStrategy]:
    method = METHODS["fedtan"]()
    return my_app(method), OwnAppStrategy(make_net(), method, fraction_evaluate=0, exchange=ExchangeSettings("replay"))


FAILED: dict[str, tuple[Callable[[], tuple[ClientApp, OwnAppStrategy]], str]] = {
    "a line is missing": (replayed_without_its_mod, "mods=[fl_bn.flower.replayed]"),
    "batches are missing": (lambda: (my_app(METHODS["hbn"](), give=False), HBN(make_net(), fraction_evaluate=0)), "batches="),
    "one side has an objective": (
        lambda: (my_app(METHODS["fixbn"](), objective=Scaffold()), FixBN(make_net(), fraction_evaluate=0)),
        "control",
    ),
}


@listed("make, key", [pytest.param(*case, id=name) for name, case in FAILED.items()])
def test_an_app_that_lacks_something_fails_by_its_name(make: Any, key: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RunFailed):
        trained(*make())
    assert key in caplog.text


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


def test_a_client_that_must_be_aggregated_securely_answers_nothing_in_the_clear(caplog: pytest.LogCaptureFixture) -> None:
    app, strategy = my_app(METHODS["fbn"]()), FBN(make_net(), fraction_evaluate=0)
    grid = InProcessGrid(app, len(SIZES), {"secure-aggregation": True})
    with pytest.raises(RunFailed):
        strategy.start(grid, num_rounds=1)
    assert "secure-aggregation" in caplog.text
    assert trained(app, FBN(make_net(), fraction_evaluate=0), rounds=1)  # control: where nobody asks for it, it answers
