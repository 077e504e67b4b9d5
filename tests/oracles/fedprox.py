# ruff: noqa: N803, N806 (the names of the paper)
"""FedProx, Algorithm 2 (Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, MLSys 2020), transcribed.

S[t]: the devices of round t; h_k(w; w_t) = F_k(w) + μ / 2 ||w - w_t||² is minimised inexactly, by one SGD step per batch. The average has
weights n_k, as FedAvg's. The paper instead samples devices with probability p_k = n_k / n, and averages with equal weights.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.equivalence.row import BITS, BOTH, Client, Row, transcribed
from tests.oracles.fedavg import averaged, gradient


def algorithm_2(
    w: nn.Module, S: list[list[int]], clients: list[Client], n_k: list[int], η: float, μ: float, stale: bool = False
) -> nn.Module:
    """Run the rounds of S. ``stale``: the term is about the first round's weights in all rounds, as a control."""
    for t, S_t in enumerate(S):
        w_t = w_t if stale and t else [p.detach().clone() for p in w.parameters()]  # noqa: F821 (of the round before)
        local = []
        for k in S_t:
            w_k = copy.deepcopy(w).train()
            for x, y in clients[k]:
                g = gradient(w_k, x, y)
                with torch.no_grad():
                    for p, g_p, anchor in zip(w_k.parameters(), g, w_t, strict=True):
                        p -= η * (g_p + μ * (p - anchor))
            local.append(w_k.state_dict())
        averaged(w, local, [n_k[k] for k in S_t])
    return w


SOME: dict[str, Any] = {"network": "resnet", "cohorts": ((0, 1), (1, 2), (0, 2), (2,)), "rounds": 4, "doors": BOTH}
of = partial(transcribed, algorithm_2)
WRONG = {"without the half": of(1.4), "half of it": of(0.35), "no term": of(0.0), "near the first weights": of(0.7, stale=True)}
ROWS = [
    Row("fedprox: Algorithm 2", of(0.7), WRONG, objective=("fedprox", {"mu": 0.7}), **SOME),
    Row(
        "fedprox: with mu = 0 it is fedavg, bit for bit", {"objective": ("none", {})},
        {"a small mu": {"objective": ("fedprox", {"mu": 1e-3})}}, objective=("fedprox", {"mu": 0.0}), tolerance=BITS,
    ),
]  # fmt: skip
