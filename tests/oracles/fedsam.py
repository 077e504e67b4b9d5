"""FedSAM, Algorithm 1 (Qu, Li, Duan, Liu, Tang, Lu, ICML 2022), transcribed; the same as Caldarola, Caputo, Ciccone, ECCV 2022.

Each local step: δ = ρ g / ||g|| with the norm over all parameters, then a step along the gradient at w + δ. BatchNorm normalises by the
batch in both passes. Only the first pass updates the running statistics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.equivalence.row import Row
from tests.networks import seeded_network
from tests.oracles.fedavg import FedAvg, gradient
from tests.oracles.fedprox import SOME


@dataclass
class FedSAM(FedAvg):
    """``twice``: both passes update the running statistics; ``again`` False: dropout draws anew in the second pass: as controls."""

    ρ: float = 0.3
    twice: bool = False
    again: bool = True

    def step(self, w_i: nn.Module, i: int, x: Tensor, y: Tensor) -> None:
        draws = torch.get_rng_state()
        g = gradient(w_i, x, y)  # at w
        norm = math.sqrt(sum(float((g_p**2).sum()) for g_p in g))
        at_w = [p.detach().clone() for p in w_i.parameters()]
        statistics = {key: b.clone() for key, b in w_i.named_buffers()}
        with torch.no_grad():
            for p, g_p in zip(w_i.parameters(), g, strict=True):
                p += self.ρ * g_p / norm
        if self.again:
            torch.set_rng_state(draws)
        g̃ = gradient(w_i, x, y)  # at w + δ
        with torch.no_grad():
            for p, before, g_p in zip(w_i.parameters(), at_w, g̃, strict=True):
                p.copy_(before - self.row.rate * g_p)
        if not self.twice:
            w_i.load_state_dict(statistics, strict=False)


of, SAM = FedSAM.of, ("fedsam", {"rho": 0.3})
WRONG = {"statistics of both passes": of(twice=True), "half the radius": of(ρ=0.15), "no ascent": {"objective": ("none", {})}}
DROPOUT = SOME | {"network": lambda: seeded_network("cnn"), "dropout": True, "doors": ("own loop",)}
ROWS = [
    Row("fedsam: Algorithm 1", of(), WRONG, objective=SAM, **SOME),
    Row("fedsam: both passes draw the same dropout", of(), {"other draws": of(again=False)}, objective=SAM, **DROPOUT),
]
