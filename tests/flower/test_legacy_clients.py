"""Clients of Flower's older API as others write them: their metrics, and objects that hold their network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from torch import nn
from torch.nn import functional as F

from tests.flower.own_apps import CLIENTS, SAMPLES, client_of
from tests.flower.test_legacy_apps import STRATEGIES, Client, Saves, ran


class Judge:
    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def loss(self, batches: Any) -> float:
        with torch.no_grad():
            return sum(F.cross_entropy(self.network(x), y).item() for x, y in batches)


class Holds(Client):
    """Gives its network to an object of its own, as trainers take it."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.judge = Judge(self.net)

    def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        self.load(parameters)
        return self.judge.loss(self.trainloader), SAMPLES, {}


class Makes(Holds):
    def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        self.judge = Judge(self.net)
        return super().evaluate(parameters, config)


def test_an_object_that_holds_the_network_of_the_constructor_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Before, such an object tested the network that nobody trains, and every round had the same loss."""
    ran(client=Holds)
    words = "Holds.evaluate ran the network that 'net' held when the client was made (its attribute 'judge' has it), but each round puts"
    assert words in caplog.text
    caplog.clear()
    ran(client=Makes)  # control
    assert "when the client was made" not in caplog.text


class Says(Client):
    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        return *super().fit(parameters, config)[:2], {"site": "no number", "loss": "n/a"}


def test_a_loss_that_is_no_number_is_a_metric_like_others() -> None:
    """Before, it ended in "could not convert string to float"."""
    ran(strategy=Saves, client=Says)
    assert [len(results) for _, results in STRATEGIES.pop().seen] == [CLIENTS] * 2


class Percent(Client):
    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        return *super().fit(parameters, config)[:2], {"site": "in percent", "accuracy": 93.5}


class Unlike(Client):
    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        return *super().fit(parameters, config)[:2], {"site": "unlike", **({"hard": 0.5} if client_of(self.context) else {})}


@pytest.mark.parametrize("client", [Percent, Unlike])
def test_a_strategy_s_hook_gets_all_clients_whose_updates_count(client: type[Client]) -> None:
    """Before, a client whose metrics fl-bn's own mean leaves out was missing, and without any other the hook was not called."""
    ran(strategy=Saves, client=client)
    assert [len(results) for _, results in STRATEGIES.pop().seen] == [CLIENTS] * 2
