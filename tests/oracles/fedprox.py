"""FedProx, Algorithm 2 (Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, MLSys 2020), transcribed.

h_k(w; w_t) = F_k(w) + μ / 2 ||w - w_t||² is minimised inexactly, by one SGD step per batch. The average has weights n_k, as FedAvg's. The
paper instead samples devices with probability p_k = n_k / n, and averages with equal weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tests.equivalence.row import BITS, BOTH, Row
from tests.oracles.fedavg import FedAvg, descend, gradient


@dataclass
class FedProx(FedAvg):
    """``stale``: the term is about the first round's weights in all rounds, as a control."""

    μ: float = 0.7
    stale: bool = False

    def step(self, w_k: nn.Module, k: int, x: Tensor, y: Tensor) -> None:
        w_t = self.row.net() if self.stale else self.w
        trio = zip(gradient(w_k, x, y), w_k.parameters(), w_t.parameters(), strict=True)
        descend(w_k, [g + self.μ * (p - anchor).detach() for g, p, anchor in trio], self.row.rate)


SOME: dict[str, Any] = {"network": "resnet", "cohorts": ((0, 1), (1, 2), (0, 2), (2,)), "rounds": 4, "doors": BOTH}
of = FedProx.of
WRONG = {"without the half": of(μ=1.4), "half of it": of(μ=0.35), "no term": of(μ=0.0), "near the first weights": of(stale=True)}
ROWS = [
    Row("fedprox: Algorithm 2", of(), WRONG, objective=("fedprox", {"mu": 0.7}), **SOME),
    Row(
        "fedprox: with mu = 0 it is fedavg, bit for bit", {"objective": ("none", {})},
        {"a small mu": {"objective": ("fedprox", {"mu": 1e-3})}}, objective=("fedprox", {"mu": 0.0}), tolerance=BITS,
    ),
]  # fmt: skip
