# ruff: noqa: N803, N806 (the names of the paper)
"""FedSAM, Algorithm 1 (Qu, Li, Duan, Liu, Tang, Lu, ICML 2022), transcribed; the same as Caldarola, Caputo, Ciccone, ECCV 2022.

Each local step: δ = ρ g / ||g|| with the norm over all parameters, then a step along the gradient at w + δ. BatchNorm normalises by the
batch in both passes. Only the first pass updates the running statistics.
"""

from __future__ import annotations

import copy
import math
from functools import partial

import torch
from torch import nn

from tests.equivalence.row import Client, Row, transcribed
from tests.networks import seeded_network
from tests.oracles.fedavg import averaged, gradient
from tests.oracles.fedprox import SOME


def algorithm_1(
    w: nn.Module, S: list[list[int]], clients: list[Client], n_i: list[int], η_l: float, ρ: float, twice: bool = False, again: bool = True
) -> nn.Module:
    """Return the global model after the rounds of S.

    Two arguments make wrong rules, as controls. ``twice``: both passes update the running statistics. ``again`` is False: dropout draws
    other numbers in the second pass.
    """
    for r, S_r in enumerate(S, start=1):
        local = []
        for i in S_r:
            torch.manual_seed(1000 * r + i)  # of dropout
            w_i = copy.deepcopy(w).train()
            for x, y in clients[i]:
                draws = torch.get_rng_state()
                g = gradient(w_i, x, y)  # at w
                norm = math.sqrt(sum(float((g_p**2).sum()) for g_p in g))
                at_w = [p.detach().clone() for p in w_i.parameters()]
                statistics = {key: b.clone() for key, b in w_i.named_buffers()}
                with torch.no_grad():
                    for p, g_p in zip(w_i.parameters(), g, strict=True):
                        p += ρ * g_p / norm
                if again:
                    torch.set_rng_state(draws)
                g̃ = gradient(w_i, x, y)  # at w + δ
                with torch.no_grad():
                    for p, before, g_p in zip(w_i.parameters(), at_w, g̃, strict=True):
                        p.copy_(before - η_l * g_p)
                    if not twice:
                        for key, b in w_i.named_buffers():
                            b.copy_(statistics[key])
            local.append(w_i.state_dict())
        averaged(w, local, [n_i[i] for i in S_r])
    return w


of = partial(transcribed, algorithm_1)
WRONG = {"statistics of both passes": of(0.3, twice=True), "half the radius": of(0.15), "no ascent": {"objective": ("none", {})}}
SAM = ("fedsam", {"rho": 0.3})
DROPOUT = SOME | {"network": lambda: seeded_network("cnn"), "dropout": True, "doors": ("own loop",)}
ROWS = [
    Row("fedsam: Algorithm 1", of(0.3), WRONG, objective=SAM, **SOME),
    Row("fedsam: both passes draw the same dropout", of(0.3), {"other draws": of(0.3, again=False)}, objective=SAM, **DROPOUT),
]
