# ruff: noqa: N803, N806 (the names of the paper)
"""HBN (Hybrid Batch Normalisation), equations 8 to 11, transcribed: one layer.

μ_b, σ2_b: mean and variance of a batch; μ_g, σ2_g: the global statistics; α = sigmoid(p), one per channel; λ: the weight of a round's
statistics.
"""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray


def forward(x: Array, μ_g: Array, σ2_g: Array, p: Array, γ: Array, β: Array, ε: float) -> Array:
    """Normalise a batch x (B, C, H, W) in training, by equations 9 and 10."""
    B, C, H, W = x.shape
    y = np.empty_like(x)
    for c in range(C):
        m = B * H * W
        μ_b = 0.0
        for b in range(B):
            for h in range(H):
                for w in range(W):
                    μ_b += x[b, c, h, w] / m
        σ2_b = 0.0
        for b in range(B):
            for h in range(H):
                for w in range(W):
                    σ2_b += (x[b, c, h, w] - μ_b) ** 2 / m
        α = 1 / (1 + math.exp(-p[c]))
        μ = α * μ_b + (1 - α) * μ_g[c]
        σ2 = α * σ2_b + (1 - α) * σ2_g[c]
        for b in range(B):
            for h in range(H):
                for w in range(W):
                    y[b, c, h, w] = γ[c] * (x[b, c, h, w] - μ) / math.sqrt(σ2 + ε) + β[c]
    return y


def global_statistics(μ_g: Array, σ2_g: Array, data: list[Array], λ: float) -> tuple[Array, Array]:
    """Return the new global statistics by equations 8 and 11.

    The means and variances of each client's data (m_i, C) are merged without bias. The old global statistics have weight 1 - λ, the merged
    ones λ.
    """
    m, μ_i, σ2_i = [], [], []
    for x in data:  # every client
        m.append(len(x))
        μ_i.append(sum(row for row in x) / len(x))
        σ2_i.append(sum((row - μ_i[-1]) ** 2 for row in x) / len(x))
    M = sum(m)
    μ = np.zeros_like(μ_g)
    for i in range(len(data)):
        μ = μ + m[i] * μ_i[i] / M
    M2 = np.zeros_like(σ2_g)
    for i in range(len(data)):
        M2 = M2 + m[i] * (σ2_i[i] + (μ_i[i] - μ) ** 2)
    σ2 = M2 / (M - 1)
    return (1 - λ) * μ_g + λ * μ, (1 - λ) * σ2_g + λ * σ2


def hybrid_report(batches: list[Array], μ_g: Array, σ2_g: Array, p: Array) -> tuple[int, Array, Array]:
    """Return what one client reports before an evaluation: count, mean and variance, as its layer normalises in training.

    A batch x (B, C, H, W) counts as m = B H W values with mean α μ_b + (1 - α) μ_g and variance α σ2_b + (1 - α) σ2_g. The batches are
    pooled by the law of total variance.
    """
    α = np.array([1 / (1 + math.exp(-value)) for value in p])
    m, μ, σ2 = [], [], []
    for x in batches:
        rows = np.array([x[b, :, h, w] for b in range(x.shape[0]) for h in range(x.shape[2]) for w in range(x.shape[3])])
        μ_b = sum(rows) / len(rows)
        σ2_b = sum((row - μ_b) ** 2 for row in rows) / len(rows)
        m.append(len(rows))
        μ.append(α * μ_b + (1 - α) * μ_g)
        σ2.append(α * σ2_b + (1 - α) * σ2_g)
    M = sum(m)
    mean = sum(m[k] * μ[k] for k in range(len(m))) / M
    within = sum(m[k] * σ2[k] for k in range(len(m))) / M
    between = sum(m[k] * (μ[k] - mean) ** 2 for k in range(len(m))) / M
    return M, mean, within + between
