"""Clients in the shape of Flower's baselines MOON and FedRep, before and after: with plain FedAvg the converted app is the app before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp
from torch.nn import functional as F

from fl_bn.flower import legacy_client_app, legacy_server_app, run_in_process
from fl_bn.methods import METHODS
from tests.flower.own_apps import CLIENTS, SAMPLES, client_of, net
from tests.flower.test_legacy_apps import Client
from tests.listed import listed


class Moon(Client):
    """Compares the network's output with those of the round's and of the client's previous network, which a file keeps."""

    def __init__(self, folder: Path, context: Context) -> None:
        super().__init__(context)
        self.file = folder / f"{client_of(context)}.pt"

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        self.load(parameters)
        whole, previous = copy.deepcopy(self.net), copy.deepcopy(self.net)
        if self.file.exists():
            previous.load_state_dict(torch.load(self.file))
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        for x, y in self.trainloader:
            optimizer.zero_grad()
            output = self.net(x)
            alike = torch.stack([F.cosine_similarity(output, one(x)) for one in (whole, previous)], 1)
            (F.cross_entropy(output, y) + F.cross_entropy(alike / 0.5, torch.zeros_like(y))).backward()
            optimizer.step()
        torch.save(self.net.state_dict(), self.file)
        return self.arrays(), SAMPLES, {}


class Rep(NumPyClient):
    """Trains a head that it keeps in Flower's context, and then the body; its manager holds network and batches."""

    def __init__(self, folder: Path, context: Context) -> None:
        self.manager, self.state = Client(context), context.state

    def with_own_head(self, parameters: list[np.ndarray]) -> Any:
        self.manager.load(parameters)
        if "head" in self.state:
            self.manager.net[3].load_state_dict(self.state["head"].to_torch_state_dict())
        return self.manager.net

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        model = self.with_own_head(parameters)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for learns in (model[3], model[0]):
            model.requires_grad_(False)
            learns.requires_grad_(True)
            for x, y in self.manager.trainloader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        self.state["head"] = ArrayRecord(model[3].state_dict())
        return self.manager.arrays(), SAMPLES, {}

    def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        self.with_own_head(parameters)
        return self.manager.evaluate(self.manager.arrays(), config)


AT = {Moon: {}, Rep: {"net": "manager.net", "trainloader": "manager.trainloader"}}


def ran(kind: Callable[..., Any], folder: Path, method: str = "") -> list[Any]:
    """Run the app, converted to ``method`` if one is given; return the arrays of each round, and the clients' mean losses."""
    folder.mkdir()
    seen, told = list[Any](), list[float]()
    client = partial(kind, folder)

    def server_fn(context: Context) -> ServerAppComponents:
        start = ndarrays_to_parameters([tensor.numpy() for tensor in net(3).state_dict().values()])
        given: dict[str, Any] = {
            "evaluate_metrics_aggregation_fn": lambda metrics: told.append(len(metrics)) or {},
            "initial_parameters": start,
        }
        strategy = FedAvg(evaluate_fn=lambda number, arrays, config: seen.append([a for a in arrays if a.ndim]), **given)
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=3))

    if method:
        chosen = METHODS[method]()
        server, app = legacy_server_app(server_fn, net, chosen), legacy_client_app(lambda context: client(context), chosen, **AT[kind])
    else:
        server, app = ServerApp(server_fn=server_fn), ClientApp(lambda context: client(context).to_client())
    run_in_process({"clients": CLIENTS}, server_app=server, client_app=app)
    assert told == [CLIENTS] * 3
    return [np.concatenate([array.ravel() for array in arrays]) for arrays in seen]


@pytest.mark.slow
@pytest.mark.pinned("the app before runs on Flower's older driver, in this process")
@listed("kind", AT)
def test_with_fedavg_a_converted_baseline_is_the_baseline_and_with_fbn_it_is_not(kind: Any, tmp_path: Path) -> None:
    before, after, other = (ran(kind, tmp_path / (method or "before"), method) for method in ("", "fedavg", "fbn"))
    assert len(before) == len(after) == 4
    for one, same in zip(before, after, strict=True):
        np.testing.assert_allclose(one, same, atol=1e-6)
    assert not np.allclose(before[-1], other[-1], atol=1e-2)
