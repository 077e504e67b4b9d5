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

from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.defence import Defence
from fl_bn.flower import FBN, FedBN, FixBN, InProcessGrid, OwnAppStrategy, RunFailed, answer, replayed, training
from fl_bn.methods import METHODS, Method
from fl_bn.objectives import Scaffold
from tests.doors.doors import apart
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


def test_replay_without_its_mod_says_which_line_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    method = METHODS["fedtan"]()
    strategy = OwnAppStrategy(make_net(), method, fraction_evaluate=0, exchange=ExchangeSettings("replay"))
    with pytest.raises(RunFailed):
        trained(my_app(method), strategy)
    assert "write @app.train(mods=[fl_bn.flower.replayed]) in client_app.py" in caplog.text


def test_hbn_without_its_batches_says_what_to_give(caplog: pytest.LogCaptureFixture) -> None:
    method = METHODS["hbn"]()
    with pytest.raises(RunFailed):
        trained(my_app(method, give=False), OwnAppStrategy(make_net(), method, fraction_evaluate=0))
    assert "call training(..., batches=trainloader)" in caplog.text


def test_scaffold_must_be_named_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RunFailed):
        trained(my_app(METHODS["fixbn"](), objective=Scaffold()), FixBN(make_net(), fraction_evaluate=0))
    assert "control" in caplog.text


@pytest.mark.parametrize(("make", "options"), [(FixBN, {"freeze_after": 3}), (FBN, {"tracking": 0.5}), (FedBN, {"min_train_nodes": 1})])
def test_a_strategy_takes_its_method_s_options(make: Callable[..., OwnAppStrategy], options: dict[str, Any]) -> None:
    assert isinstance(make(make_net(), **options), OwnAppStrategy)
    with pytest.raises(TypeError, match="min_fit_clients"):  # an argument that would be ignored is none
        make(make_net(), min_fit_clients=2)


def test_what_would_be_ignored_is_refused() -> None:
    with pytest.raises(ValueError, match="arrayrecord_key must stay 'arrays'"):
        FixBN(make_net(), arrayrecord_key="model")
    with pytest.raises(ValueError, match="no robust rule guards them"):
        FixBN(make_net(), objective=Scaffold(), defence=Defence(1, "median", "median"))


def test_a_client_that_must_be_aggregated_securely_answers_nothing_in_the_clear(caplog: pytest.LogCaptureFixture) -> None:
    app, strategy = my_app(METHODS["fbn"]()), FBN(make_net(), fraction_evaluate=0)
    grid = InProcessGrid(app, len(SIZES), {"secure-aggregation": True})
    with pytest.raises(RunFailed):
        strategy.start(grid, num_rounds=1)
    assert "secure-aggregation is on, but a user's own app replies unmasked" in caplog.text
    assert trained(app, FBN(make_net(), fraction_evaluate=0), rounds=1)  # control: where nobody asks for it, it answers
