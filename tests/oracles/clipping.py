"""Gradient clipping: by the norm over all parameters (Pascanu, Mikolov, Bengio 2013), by value, and adaptive: AGC (Brock, De, Smith,
Simonyan 2021, equation 3), transcribed.

AGC multiplies the gradient G_i of a unit i by λ max(||W_i||, ε) / ||G_i|| if ||G_i|| / max(||W_i||, ε) > λ, with ε = 1e-3. A unit is the
row of a matrix, or the kernels of one output channel; a vector is one unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from tests.equivalence.row import Row, make_clients
from tests.oracles.fedavg import FedAvg, gradient

Array = np.ndarray
Rule = Callable[[list[Array], list[Array]], list[Array]]


def norm(a: Array) -> float:
    return math.sqrt(sum(float(v) ** 2 for v in a.ravel()))


def by_norm(G: list[Array], limit: float) -> list[Array]:
    total = math.sqrt(sum(norm(g) ** 2 for g in G))
    return [g * limit / total for g in G] if total > limit else [g.copy() for g in G]


def by_value(G: list[Array], limit: float) -> list[Array]:
    return [np.maximum(-limit, np.minimum(limit, g)) for g in G]


def agc(W: list[Array], G: list[Array], λ: float, ε: float = 1e-3) -> list[Array]:
    clipped = []
    for W_l, G_l in zip(W, G, strict=True):
        units = range(len(W_l)) if W_l.ndim > 1 else [slice(None)]
        new = G_l.copy()
        for i in units:
            most = λ * max(norm(W_l[i]), ε)
            if norm(G_l[i]) > most:
                new[i] = most / norm(G_l[i]) * G_l[i]
        clipped.append(new)
    return clipped


@dataclass
class Clipped(FedAvg):
    """``rule(W, G)`` clips the gradients."""

    rule: Rule = lambda W, G: G

    def step(self, w_k: nn.Module, k: int, x: Tensor, y: Tensor) -> None:
        G, W = [g.numpy() for g in gradient(w_k, x, y)], [p.detach().numpy() for p in w_k.parameters()]
        for w, g in zip(W, self.rule(W, G), strict=True):
            w -= self.row.rate * g


RULES: dict[str, Callable[[list[Array], list[Array]], list[Array]]] = {
    "norm": lambda W, G: by_norm(G, 0.1),
    "round": lambda W, G: by_norm(G, 0.1 / (0.1 * 2)),  # two steps of rate 0.1 move the weights by 0.1 at most
    "value": lambda W, G: by_value(G, 0.1),
    "adaptive": lambda W, G: agc(W[:-2], G[:-2], 0.1) + G[-2:],  # not the head
    "the head, too": lambda W, G: agc(W, G, 0.1),
    "a layer as one unit": lambda W, G: [agc([w.ravel()], [g.ravel()], 0.1)[0].reshape(g.shape) for w, g in zip(W, G, strict=True)],
    "none": lambda W, G: G,
}
ROWS = [
    Row(
        f"clipping: {kind}", Clipped.of(rule=RULES[kind]), {other: Clipped.of(rule=rule) for other, rule in RULES.items() if other != kind},
        clients=make_clients(6, 14, 10), epochs=2, local={"clip": kind, "clip_limit": 0.1}, doors=("application",),
        tolerance=1e-5 if kind in ("norm", "round") else 1e-11,  # torch adds 1e-6 to the norm
    )
    for kind in ("norm", "round", "value", "adaptive")
]  # fmt: skip
