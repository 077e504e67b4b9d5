"""SCAFFOLD, Algorithm 1 (Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, ICML 2020), transcribed, with the global step size η_g = 1.

c, c_i: control variates, one tensor per parameter, by option II of line 12. Running statistics have no control variate: they are averaged
as FedAvg's. Models are averaged with weights n_i (in the paper with equal weights). Changes of control variates are added up with weight
1 / N, as in the paper's line 17.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.equivalence.row import Row
from tests.oracles.fedavg import FedAvg, descend, gradient
from tests.oracles.fedprox import SOME


@dataclass
class Scaffold(FedAvg):
    """``strength`` multiplies the correction. ``whole``: c moves by the mean over S, without |S| / N; ``weighted``: by samples."""

    strength: float = 1.0
    whole: bool = False
    weighted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.c = [torch.zeros_like(p) for p in self.w.parameters()]
        self.c_i = [self.c for _ in self.row.clients]

    def step(self, y_i: nn.Module, i: int, x: Tensor, y: Tensor) -> None:
        decay = self.row.sgd.get("weight_decay", 0.0)
        four = zip(gradient(y_i, x, y), y_i.parameters(), self.c_i[i], self.c, strict=True)
        descend(y_i, [g + decay * p.detach() + self.strength * (c - c_i) for g, p, c_i, c in four], self.row.rate)  # line 10

    @torch.no_grad()
    def server(self, S: list[int], local: list[nn.Module]) -> None:
        moved = [torch.zeros_like(c) for c in self.c]
        for i, y_i in zip(S, local, strict=True):
            steps = len(self.row.steps[i]) * self.row.rate  # K η_l
            share = self.row.sizes[i] / sum(self.row.sizes[j] for j in S) if self.weighted else 1 / len(S)
            pairs = zip(self.c_i[i], self.c, self.w.parameters(), y_i.parameters(), strict=True)
            plus = [self.strength * (c_i - c) + (x - y) / steps for c_i, c, x, y in pairs]  # line 12
            moved = [total + share * (p - c_i) for total, p, c_i in zip(moved, plus, self.c_i[i], strict=True)]  # lines 13 and 16
            self.c_i[i] = plus  # line 14
        super().server(S, local)  # line 17
        N = len(S) if self.whole else len(self.row.clients)
        self.c = [c + len(S) / N * change for c, change in zip(self.c, moved, strict=True)]


of = Scaffold.of
WRONG = {
    "c without |S| / N": of(whole=True), "c by samples": of(weighted=True),
    "half the correction": of(strength=0.5), "none": of(strength=0.0),
}  # fmt: skip
ROWS = [
    Row("scaffold: Algorithm 1", of(), WRONG, objective=("scaffold", {}), **SOME),
    Row("scaffold: half the strength, with weight decay", of(strength=0.5), {"whole": of(), "variates without the decay": {"sgd": {}}},
        objective=("scaffold", {"strength": 0.5}), sgd={"weight_decay": 0.1}, rounds=4, doors=("federation", "flower")),
]  # fmt: skip
