"""FedAdagrad, FedAdam and FedYogi, Algorithm 2 (Reddi, Charles, Zaheer et al., ICLR 2021), FedAvgM (Hsu, Qi, Brown 2019), transcribed.

x: the weights; Δ_t: the weighted mean of the clients' x_i - x; v_{-1} = τ². There is no bias correction, unlike in Flower's FedAdam.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.equivalence.row import BOTH, Row
from tests.oracles.fedavg import FedAvg


@dataclass
class FedAvgM(FedAvg):
    """Update m <- β m + Δ; x <- x + η m. ``statistics``: of the statistics, too, as a control."""

    η: float = 0.7
    β: float = 0.9
    statistics: bool = False
    m: dict[str, Tensor] = field(default_factory=dict)

    def moved(self, name: str, Δ_t: Tensor) -> Tensor:
        self.m[name] = self.β * self.m.get(name, 0) + Δ_t
        return self.η * self.m[name]

    def server(self, S: list[int], local: list[nn.Module]) -> None:
        before = copy.deepcopy(self.w.state_dict())
        super().server(S, local)
        for name, t in (self.w.state_dict() if self.statistics else dict(self.w.named_parameters())).items():
            if t.is_floating_point():
                t.data.copy_(before[name] + self.moved(name, t.detach() - before[name]))


@dataclass
class Algorithm2(FedAvgM):
    """``v_1`` is v_{-1}; None: τ²."""

    kind: str = "fedadam"
    η: float = 0.05
    β_2: float = 0.99
    τ: float = 1e-3
    v_1: float | None = None
    v: dict[str, Tensor] = field(default_factory=dict)

    def moved(self, name: str, Δ_t: Tensor) -> Tensor:
        self.m[name] = self.β * self.m.get(name, 0) + (1 - self.β) * Δ_t
        v = self.v.get(name, torch.full_like(Δ_t, self.τ**2 if self.v_1 is None else self.v_1))
        self.v[name] = {
            "fedadagrad": v + Δ_t**2,
            "fedyogi": v - (1 - self.β_2) * Δ_t**2 * torch.sign(v - Δ_t**2),
            "fedadam": self.β_2 * v + (1 - self.β_2) * Δ_t**2,
            "none": v,
        }[self.kind]
        return self.η * self.m[name] / (self.v[name].sqrt() + self.τ)


def adaptive(kind: str, β: float) -> Row:
    of, right = Algorithm2.of, {"kind": kind, "β": β}
    wrong = {"v starts at 0": of(**right, v_1=0.0), "another tau": of(**right, τ=2e-3), "statistics, too": of(**right, statistics=True)}
    wrong |= {"another beta_1": of(kind=kind, β=0.5)}
    wrong |= {other: of(kind=other, β=β) for other in ("fedadagrad", "fedadam", "fedyogi") if other != kind}
    return Row(f"{kind}: Algorithm 2", of(**right), wrong, server=(kind, {"learning_rate": 0.05}), rounds=3)


AVERAGE = {"an average of the movements": Algorithm2.of(kind="none", η=0.7, τ=0.0, v_1=1.0)}
ROWS = [
    *map(adaptive, ("fedadagrad", "fedadam", "fedyogi"), (0.0, 0.9, 0.9)),
    Row("fedavgm", FedAvgM.of(), AVERAGE, server=("fedavgm", {"learning_rate": 0.7}), rounds=3, doors=BOTH),
]
