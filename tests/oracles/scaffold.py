# ruff: noqa: N803, N806 (the names of the paper)
"""SCAFFOLD, Algorithm 1 (Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, ICML 2020), transcribed, with the global step size η_g = 1.

S[r]: the clients of round r; c, c_i: control variates, one tensor per parameter; ``everything[i]``: client i's batches for option I's pass
over its local data. Running statistics have no control variate: they are averaged as FedAvg's. Models are averaged with weights n_i (in
the paper with equal weights). Changes of control variates are added up with weight 1 / N, as in the paper's line 17.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.oracles.fedavg import Client, Loss, averaged, cross_entropy, gradient


def g_of_all(x: nn.Module, data: Client, F: Loss) -> list[Tensor]:
    """Return g_i(x): the mean gradient over all samples of ``data``. Copies of ``x`` compute it, so its statistics stay the same."""
    n = sum(len(labels) for _, labels in data)
    total = [torch.zeros_like(p) for p in x.parameters()]
    for images, labels in data:
        g = gradient(copy.deepcopy(x).train(), images, labels, F)
        total = [t + len(labels) / n * g_p for t, g_p in zip(total, g, strict=True)]
    return total


@dataclass
class Scaffold:
    """Hold the server's x and c, and every client's c_i. ``x`` is changed in place."""

    x: nn.Module
    N: int
    c: list[Tensor] = field(init=False)
    c_i: list[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.c = [torch.zeros_like(p) for p in self.x.parameters()]
        self.c_i = [[torch.zeros_like(p) for p in self.x.parameters()] for _ in range(self.N)]

    def round(
        self,
        S: list[int],
        clients: list[Client],
        n_i: list[int],
        η_l: float,
        option: int,
        everything: list[Client] | None = None,
        F: Loss = cross_entropy,
    ) -> None:
        """Run one round, lines 2 to 18 of the algorithm; ``clients[i]`` has client i's K batches."""
        local, Δc = [], [torch.zeros_like(c) for c in self.c]
        for i in S:
            y_i = copy.deepcopy(self.x).train()
            K = len(clients[i])
            for images, labels in clients[i]:  # line 8
                g = gradient(y_i, images, labels, F)
                with torch.no_grad():
                    for p, g_p, c_i, c in zip(y_i.parameters(), g, self.c_i[i], self.c, strict=True):
                        p -= η_l * (g_p - c_i + c)  # line 10
            if option == 1:  # line 12
                assert everything is not None
                c_i_plus = g_of_all(self.x, everything[i], F)
            else:
                pairs = zip(self.c_i[i], self.c, self.x.parameters(), y_i.parameters(), strict=True)
                c_i_plus = [c_i - c + (x.detach() - y.detach()) / (K * η_l) for c_i, c, x, y in pairs]
            Δc = [total + (plus - c_i) / len(S) for total, plus, c_i in zip(Δc, c_i_plus, self.c_i[i], strict=True)]  # lines 13 and 16
            self.c_i[i] = c_i_plus  # line 14
            local.append(y_i.state_dict())
        averaged(self.x, local, [n_i[i] for i in S])  # line 17
        self.c = [c + len(S) / self.N * change for c, change in zip(self.c, Δc, strict=True)]


def algorithm_1(
    x: nn.Module,
    S: list[list[int]],
    clients: list[Client],
    n_i: list[int],
    η_l: float,
    option: int,
    everything: list[Client] | None = None,
    F: Loss = cross_entropy,
) -> Scaffold:
    """Run a round for each entry of ``S``, every one with the same batches; return the final state."""
    run = Scaffold(x, len(clients))
    for S_r in S:
        run.round(S_r, clients, n_i, η_l, option, everything, F)
    return run
