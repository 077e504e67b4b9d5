"""Krum and Multi-Krum (Blanchard et al., NeurIPS 2017, section 4), transcribed.

V_1 .. V_n are the proposed vectors, f of them Byzantine; i → j means that V_j is among the n - f - 2 closest vectors to V_i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from tests.equivalence.row import BOTH, Row, make_clients
from tests.oracles import fbn
from tests.oracles.fedavg import FedAvg
from tests.oracles.nnm import nnm

Array = np.ndarray


def closest(V: Array, i: int, count: int) -> list[int]:
    """Return the indices j of the ``count`` vectors that are closest to V_i."""
    others = [j for j in range(len(V)) if j != i]
    others.sort(key=lambda j: float(((V[i] - V[j]) ** 2).sum()))
    return others[:count]


def s(V: Array, i: int, f: int) -> float:
    """Return the score of worker i."""
    n, score = len(V), 0.0
    for j in closest(V, i, n - f - 2):
        score += float(((V[i] - V[j]) ** 2).sum())
    return score


def krum(V: Array, f: int) -> Array:
    """Return the vector with the lowest score; of several, the one with the smallest index."""
    i_star = 0
    for i in range(1, len(V)):
        if s(V, i, f) < s(V, i_star, f):
            i_star = i
    return V[i_star]


def multi_krum(V: Array, f: int, m: int) -> Array:
    """Return the average of the m vectors with the lowest scores."""
    best = sorted(range(len(V)), key=lambda i: s(V, i, f))[:m]
    average = np.zeros_like(V[0])
    for i in best:
        average = average + V[i] / m
    return average


@dataclass
class Defended(FedAvg):
    """``rule`` combines the clients' updates of the weights; statistics are averaged with equal weights."""

    rule: Callable[[Array], Array] = lambda V: V.mean(0)

    def server(self, S: list[int], local: list[nn.Module]) -> None:
        start, *ends = (nn.utils.parameters_to_vector(w.parameters()).detach().clone() for w in (self.w, *local))
        super().server(S, local)
        update = self.rule(np.stack([(end - start).numpy() for end in ends]))
        nn.utils.vector_to_parameters(start + torch.from_numpy(update), self.w.parameters())


def defended(rule: Callable[[Array], Array]) -> Callable[[Row], nn.Module]:
    return Defended.of(rule=rule, n_k=[1] * 5)


RULES: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {  # and with another number of neighbours
    "krum": (lambda V: krum(V, 1), lambda V: krum(V, 2)),
    "multi-krum": (lambda V: multi_krum(V, 1, len(V) - 1), lambda V: multi_krum(V, 1, len(V) - 2)),
    "median": (lambda V: np.median(V, axis=0), lambda V: V.mean(0)),
    "nnm+median": (fbn.median, lambda V: np.median(nnm(V, 2), axis=0)),
    "nnm+trimmed-mean": (fbn.trimmed_mean, lambda V: np.sort(nnm(V, 2), axis=0)[1:-1].mean(0)),
}


def against(name: str) -> Row:
    right, wrong = RULES[name]
    others = {other: defended(rule) for other, (rule, _) in RULES.items() if other != name} | {"other neighbours": defended(wrong)}
    given = {"defence": (1, "mean", name), "clients": make_clients(6, 14, 10, 8, 12, seed=2), "doors": BOTH}
    return Row(f"robust fedavg: {name}", defended(right), others, **given)


(HONEST,), (GARBAGE,) = make_clients(6), make_clients(6, seed=1)
ROWS = [
    *map(against, RULES),
    Row("robust fbn: a Byzantine client changes nothing", lambda row: fbn.FBN(replace(row, clients=row.clients[:1], cohorts=())).run(),
        {"no defence": {"defence": ()}}, "fbn", {"momentum": 0.1}, "resnet",  # variances are others: Bessel's factor has the cohort's count
        clients=[HONEST] * 3 + [[(50 * x, y) for x, y in GARBAGE]] + [HONEST] * 2, defence=(1, "nnm+median", "nnm+median"), rounds=1,
        doors=(*BOTH, "flower", "application"), only=("weight", "bias", "mean")),
]  # fmt: skip
