# ruff: noqa: N803, N806 (the names of the paper)
"""SCAFFOLD, Algorithm 1 (Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, ICML 2020), transcribed, with the global step size η_g = 1.

S[r]: the clients of round r; c, c_i: control variates, one tensor per parameter, by option II of line 12. Running
statistics have no control variate: they are averaged as FedAvg's. Models are averaged with weights n_i (in
the paper with equal weights). Changes of control variates are added up with weight 1 / N, as in the paper's line 17.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.equivalence.row import Client, Row, transcribed
from tests.oracles.fedavg import averaged, gradient
from tests.oracles.fedprox import SOME


@dataclass
class Scaffold:
    """Hold the server's x and c, and every client's c_i. ``x`` is changed in place.

    ``strength`` multiplies the correction, ``decay`` is SGD's weight decay. Two controls: with ``whole``, c moves by the mean over S,
    without |S| / N; with ``weighted``, by samples.
    """

    x: nn.Module
    N: int
    strength: float = 1.0
    decay: float = 0.0
    whole: bool = False
    weighted: bool = False
    c: list[Tensor] = field(init=False)
    c_i: list[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.c = [torch.zeros_like(p) for p in self.x.parameters()]
        self.c_i = [[torch.zeros_like(p) for p in self.x.parameters()] for _ in range(self.N)]

    def round(self, S: list[int], clients: list[Client], n_i: list[int], η_l: float) -> None:
        """Run one round, lines 2 to 18 of the algorithm; ``clients[i]`` has client i's K batches."""
        local, Δc = [], [torch.zeros_like(c) for c in self.c]
        for i in S:
            y_i = copy.deepcopy(self.x).train()
            K = len(clients[i])
            for images, labels in clients[i]:  # line 8
                g = gradient(y_i, images, labels)
                with torch.no_grad():
                    for p, g_p, c_i, c in zip(y_i.parameters(), g, self.c_i[i], self.c, strict=True):
                        p -= η_l * (g_p + self.decay * p + self.strength * (c - c_i))  # line 10
            pairs = zip(self.c_i[i], self.c, self.x.parameters(), y_i.parameters(), strict=True)  # line 12
            c_i_plus = [self.strength * (c_i - c) + (x.detach() - y.detach()) / (K * η_l) for c_i, c, x, y in pairs]
            share = n_i[i] / sum(n_i[j] for j in S) if self.weighted else 1 / len(S)
            Δc = [total + share * (plus - c_i) for total, plus, c_i in zip(Δc, c_i_plus, self.c_i[i], strict=True)]  # lines 13 and 16
            self.c_i[i] = c_i_plus  # line 14
            local.append(y_i.state_dict())
        averaged(self.x, local, [n_i[i] for i in S])  # line 17
        moved = 1 if self.whole else len(S) / self.N
        self.c = [c + moved * change for c, change in zip(self.c, Δc, strict=True)]


def algorithm_1(x: nn.Module, S: list[list[int]], clients: list[Client], n_i: list[int], η_l: float, **options: Any) -> Scaffold:
    """Run a round for each entry of ``S``, every one with the same batches; return the final state. ``options``: see ``Scaffold``."""
    run = Scaffold(x, len(clients), **options)
    for S_r in S:
        run.round(S_r, clients, n_i, η_l)
    return run


def of(**options: Any) -> Callable[[Row], nn.Module]:
    return lambda row: transcribed(algorithm_1, decay=row.sgd.get("weight_decay", 0.0), **options)(row).x


WRONG = {
    "c without |S| / N": of(whole=True), "c by samples": of(weighted=True),
    "half the correction": of(strength=0.5), "none": of(strength=0.0),
}  # fmt: skip
ROWS = [
    Row("scaffold: Algorithm 1", of(), WRONG, objective=("scaffold", {}), **SOME),
    Row("scaffold: half the strength, with weight decay", of(strength=0.5), {"whole": of(), "variates without the decay": {"sgd": {}}},
        objective=("scaffold", {"strength": 0.5}), sgd={"weight_decay": 0.1}, rounds=4),
]  # fmt: skip
