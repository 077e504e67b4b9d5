# ruff: noqa: N803, N806 (the names of the paper)
"""FedACG, Algorithm 1 (Kim, Kim, Han, CVPR 2024), transcribed, without the penalty β / 2 ||θ - (θ + λ m)||² in the clients' loss.

θ: the weights; m: the server's momentum; λ: its decay. ``clients[i](start)`` returns the weights after client i's K local steps from
``start``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.equivalence.row import BOTH, Row
from tests.oracles.fedavg import sgd

Array = np.ndarray


def algorithm_1(θ: Array, T: int, clients: list[Callable[[Array], Array]], n_i: list[float], λ: float) -> list[Array]:
    """Run T rounds from θ; return the weights after each round, θ^1 to θ^T."""
    m = np.zeros_like(θ)
    seen = []
    for _ in range(T):
        sent = θ + λ * m  # the accelerated model, which the clients start from
        Δ = np.zeros_like(θ)
        for i in range(len(clients)):
            Δ_i = clients[i](sent) - sent
            Δ = Δ + n_i[i] / sum(n_i) * Δ_i
        m = λ * m + Δ
        θ = θ + m
        seen.append(θ)
    return seen


def of(row: Row, λ: float = 0.85) -> nn.Module:
    """Run a row's rounds; its network has no statistics."""
    net = row.net()

    def weights() -> Array:
        return nn.utils.parameters_to_vector(net.parameters()).detach().numpy().copy()

    def steps(start: Array, client: int) -> Array:
        nn.utils.vector_to_parameters(torch.from_numpy(start.copy()), net.parameters())
        for x, y in row.clients[client]:
            sgd(net, x, y, row.rate)
        return weights()

    clients = [partial(steps, client=i) for i in range(len(row.clients))]
    nn.utils.vector_to_parameters(torch.from_numpy(algorithm_1(weights(), row.rounds, clients, row.sizes, λ)[-1]), net.parameters())
    return net


WRONG: dict[str, Any] = {"without looking ahead": lambda row: of(row, 0.0), "another lambda": lambda row: of(row, 0.8)}
WRONG |= {"momentum, but no look ahead": {"server": ("fedavgm", {"momentum": 0.85})}}


def plain() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))


ROWS = [Row("fedacg: Algorithm 1", of, WRONG, network=plain, server=("fedacg", {}), rounds=4, doors=BOTH)]
