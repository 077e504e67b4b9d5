# ruff: noqa: N803, N806 (the names of the paper)
"""FBN, Algorithm 2 (Guerraoui et al.), transcribed: one batch-normalisation layer, one local step per round (E = 1).

The names are those of the paper: u and s are the running mean and the (unbiased) running variance, β is the weight of the new batch, K
the number of values per channel of a client's batch, and n the number of clients.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def μ(x: Array) -> Array:
    """Return the mean of a batch x (K, C), summed row by row."""
    total = np.zeros(x.shape[1])
    for row in x:
        total = total + row
    return total / len(x)


def σ2(x: Array) -> Array:
    """Return the biased variance of a batch x (K, C)."""
    total = np.zeros(x.shape[1])
    for row in x:
        total = total + (row - μ(x)) ** 2
    return total / len(x)


def algorithm_2(u: Array, s: Array, batches: list[Array], β: float) -> tuple[Array, Array]:
    """Return the new u and s by the algorithm as the paper prints it, for batches of one size K."""
    n, K = len(batches), len(batches[0])
    assert all(len(x) == K for x in batches)
    u_i, s_i = [], []
    for x in batches:  # every client
        u_i.append((1 - β) * u + β * μ(x))
        s_i.append((1 - β) * s + β * (K * n / (K * n - 1)) * σ2(x))
    u_plus = np.zeros_like(u)
    for i in range(n):  # the server
        u_plus = u_plus + u_i[i] / n
    s_plus = np.zeros_like(s)
    for i in range(n):
        s_plus = s_plus + s_i[i] / n
    for i in range(n):
        s_plus = s_plus + (K * n / ((K * n - 1) * β)) * (u_i[i] - u_plus) ** 2 / n
    return u_plus, s_plus


def algorithm_2_unequal(u: Array, s: Array, batches: list[Array], β: float) -> tuple[Array, Array]:
    """Return the new u and s for batches of different sizes m_i, of sum M.

    The weights are m_i / M, and c = M / (M - 1) replaces K n / (K n - 1).
    """
    M = sum(len(x) for x in batches)
    c = M / (M - 1)
    w = [len(x) / M for x in batches]
    u_i = [(1 - β) * u + β * μ(x) for x in batches]
    s_i = [(1 - β) * s + β * c * σ2(x) for x in batches]
    u_plus = np.zeros_like(u)
    for i in range(len(batches)):
        u_plus = u_plus + w[i] * u_i[i]
    s_plus = np.zeros_like(s)
    for i in range(len(batches)):
        s_plus = s_plus + w[i] * s_i[i] + (c / β) * w[i] * (u_i[i] - u_plus) ** 2
    return u_plus, s_plus
