# ruff: noqa: N803, N806 (the names of the paper)
"""FedACG, Algorithm 1 (Kim, Kim, Han, CVPR 2024), transcribed, without the penalty β / 2 ||θ - (θ + λ m)||² in the clients' loss.

θ: the weights; m: the server's momentum; λ: its decay. ``clients[i](start)`` returns the weights after client i's K local steps from
``start``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

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
