"""FedACG, Algorithm 1 (Kim, Kim, Han, CVPR 2024), transcribed, without the penalty β / 2 ||θ - (θ + λ m)||² in the clients' loss.

θ: the weights; m: the server's momentum; λ: its decay. Clients start from the accelerated model θ + λ m.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.equivalence.row import BOTH, Row
from tests.oracles.fedavg import FedAvg


@dataclass
class FedACG(FedAvg):
    λ: float = 0.85
    m: Any = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.θ = self.vector

    @property
    def vector(self) -> Tensor:
        return parameters_to_vector(self.w.parameters()).detach()

    def server(self, S: list[int], local: list[nn.Module]) -> None:
        sent = self.vector
        super().server(S, local)
        self.m = self.λ * self.m + self.vector - sent
        self.θ = self.θ + self.m
        vector_to_parameters(self.θ + self.λ * self.m, self.w.parameters())

    def run(self) -> nn.Module:
        super().run()
        vector_to_parameters(self.θ, self.w.parameters())
        return self.w


def plain() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))


WRONG: dict[str, Any] = {"without looking ahead": FedACG.of(λ=0.0), "another lambda": FedACG.of(λ=0.8)}
WRONG |= {"momentum, but no look ahead": {"server": ("fedavgm", {"momentum": 0.85})}}
ROWS = [Row("fedacg: Algorithm 1", FedACG.of(), WRONG, network=plain, server=("fedacg", {}), rounds=4, doors=BOTH)]
