# ruff: noqa: N803, N806 (the names of the paper)
"""FedAdagrad, FedAdam and FedYogi, Algorithm 2 (Reddi, Charles, Zaheer et al., ICLR 2021), FedAvgM (Hsu, Qi, Brown 2019), transcribed.

x: the weights; Δ_t: the weighted mean of the clients' x_i - x; v_{-1} = τ². There is no bias correction. Flower's FedAdam differs: it
corrects the bias, with the exponent of the following round, and starts v at 0. ``FlowerFedAdam`` transcribes it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.equivalence.row import BOTH, Row
from tests.oracles.fedavg import FedAvg

Array = np.ndarray


def Δ(x: Array, x_i: list[Array], n_i: list[float]) -> Array:
    total = np.zeros_like(x)
    for k in range(len(x_i)):
        total = total + n_i[k] / sum(n_i) * (x_i[k] - x)
    return total


class Algorithm2:
    """Keep m and v between rounds; ``step`` returns the server's new weights. The argument ``v`` is v_{-1}; None: τ²."""

    def __init__(self, kind: str, η: float, β_1: float, β_2: float, τ: float, v: float | None = None) -> None:
        self.kind, self.η, self.β_1, self.β_2, self.τ = kind, η, β_1, β_2, τ
        self.m: Array | float = 0.0
        self.v: Array | float = τ**2 if v is None else v

    def step(self, x: Array, Δ_t: Array) -> Array:
        self.m = self.β_1 * self.m + (1 - self.β_1) * Δ_t
        if self.kind == "fedadagrad":
            self.v = self.v + Δ_t**2
        elif self.kind == "fedyogi":
            self.v = self.v - (1 - self.β_2) * Δ_t**2 * np.sign(self.v - Δ_t**2)
        elif self.kind == "fedadam":
            self.v = self.β_2 * self.v + (1 - self.β_2) * Δ_t**2
        return x + self.η * self.m / (np.sqrt(self.v) + self.τ)


class FedAvgM:
    """Update v <- β v + Δ; x <- x + η v."""

    def __init__(self, η: float, β: float) -> None:
        self.η, self.β, self.v = η, β, 0.0

    def step(self, x: Array, Δ_t: Array) -> Array:
        self.v = self.β * self.v + Δ_t
        return x + self.η * self.v


class FlowerFedAdam:
    """Compute as Flower 1.25: v_{-1} = 0, and η is multiplied by sqrt(1 - β_2^(t+1)) / (1 - β_1^(t+1)) in round t = 1, 2, ..."""

    def __init__(self, η: float, β_1: float, β_2: float, τ: float) -> None:
        self.η, self.β_1, self.β_2, self.τ = η, β_1, β_2, τ
        self.m, self.v, self.t = 0.0, 0.0, 0

    def step(self, x: Array, Δ_t: Array) -> Array:
        self.t += 1
        self.m = self.β_1 * self.m + (1 - self.β_1) * Δ_t
        self.v = self.β_2 * self.v + (1 - self.β_2) * Δ_t**2
        η_norm = self.η * np.sqrt(1 - self.β_2 ** (self.t + 1)) / (1 - self.β_1 ** (self.t + 1))
        return x + η_norm * self.m / (np.sqrt(self.v) + self.τ)


@dataclass
class Stepped(FedAvg):
    """Step by a server's optimizer on FedAvg's average. ``statistics``: on the statistics, too, as a control."""

    make: Callable[[], Any] = lambda: None
    statistics: bool = False
    servers: dict[str, Any] = field(default_factory=dict)

    def server(self, S: list[int], local: list[nn.Module]) -> None:
        before = copy.deepcopy(self.w.state_dict())
        super().server(S, local)
        stepped = self.w.state_dict() if self.statistics else dict(self.w.named_parameters())
        for name, t in stepped.items():
            if t.is_floating_point():
                x = before[name].numpy()
                x_t = self.servers.setdefault(name, self.make()).step(x, Δ(x, [t.detach().numpy()], [1.0]))
                t.data.copy_(torch.as_tensor(x_t))


def of(make: Callable[..., Any], *arguments: Any, statistics: bool = False, **options: Any) -> Callable[[Row], nn.Module]:
    return Stepped.of(make=partial(make, *arguments, **options), statistics=statistics)


def adaptive(kind: str, β_1: float) -> Row:
    right = (Algorithm2, kind, 0.05, β_1, 0.99, 1e-3)
    wrong = {"v starts at 0": of(*right, v=0.0), "another tau": of(*right[:-1], 2e-3), "statistics, too": of(*right, statistics=True)}
    wrong |= {"another beta_1": of(Algorithm2, kind, 0.05, 0.5, 0.99, 1e-3), "bias correction": of(FlowerFedAdam, 0.05, β_1, 0.99, 1e-3)}
    wrong |= {other: of(Algorithm2, other, *right[2:]) for other in ("fedadagrad", "fedadam", "fedyogi") if other != kind}
    return Row(f"{kind}: Algorithm 2", of(*right), wrong, server=(kind, {"learning_rate": 0.05}), rounds=3)


AVERAGE = {"an average of the movements": of(Algorithm2, "none", 0.7, 0.9, 0.0, 0.5, v=0.25)}
ROWS = [
    *map(adaptive, ("fedadagrad", "fedadam", "fedyogi"), (0.0, 0.9, 0.9)),
    Row("fedavgm", of(FedAvgM, 0.7, 0.9), AVERAGE, server=("fedavgm", {"learning_rate": 0.7}), rounds=3, doors=BOTH),
]
