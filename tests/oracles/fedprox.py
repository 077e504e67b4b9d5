# ruff: noqa: N803, N806 (the names of the paper)
"""FedProx, Algorithm 2 (Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, MLSys 2020), transcribed.

S[t]: the devices of round t; h_k(w; w_t) = F_k(w) + μ / 2 ||w - w_t||² is minimised inexactly, by one SGD step per batch. The average has
weights n_k, as FedAvg's. The paper instead samples devices with probability p_k = n_k / n, and averages with equal weights.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.oracles.fedavg import Client, Loss, averaged, cross_entropy, gradient


def algorithm_2(
    w: nn.Module, S: list[list[int]], clients: list[Client], n_k: list[int], η: float, μ: float, F: Loss = cross_entropy
) -> nn.Module:
    for S_t in S:
        w_t = [p.detach().clone() for p in w.parameters()]
        local = []
        for k in S_t:
            w_k = copy.deepcopy(w).train()
            for x, y in clients[k]:
                g = gradient(w_k, x, y, F)
                with torch.no_grad():
                    for p, g_p, anchor in zip(w_k.parameters(), g, w_t, strict=True):
                        p -= η * (g_p + μ * (p - anchor))
            local.append(w_k.state_dict())
        averaged(w, local, [n_k[k] for k in S_t])
    return w
