# ruff: noqa: N803, N806 (the names of the paper)
"""FedAvg whose local SGD has momentum that is reset every round, kept at the client, or averaged by the server (FixBN, appendix C.4).

S[t]: the clients of round t; m: SGD's momentum buffer, m <- β m + g, w <- w - η m. It starts at zero if no buffer was kept.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.equivalence.row import Client, Row, make_clients, transcribed
from tests.oracles.fedavg import averaged, gradient


def fedavg(w: nn.Module, S: list[list[int]], clients: list[Client], n_k: list[int], η: float, β: float, maintain: str) -> nn.Module:
    zeros = [torch.zeros_like(p) for p in w.parameters()]
    kept = {k: [z.clone() for z in zeros] for k in range(len(clients))}
    M = [z.clone() for z in zeros]  # the server's
    for S_t in S:
        local, buffers = [], []
        for k in S_t:
            w_k = copy.deepcopy(w).train()
            start = {"reset": zeros, "local": kept[k], "global": M}[maintain]
            m = [b.clone() for b in start]
            for x, y in clients[k]:
                g = gradient(w_k, x, y)
                m = [β * b + g_p for b, g_p in zip(m, g, strict=True)]
                with torch.no_grad():
                    for p, b in zip(w_k.parameters(), m, strict=True):
                        p -= η * b
            kept[k] = m
            buffers.append(m)
            local.append(w_k.state_dict())
        n = [n_k[k] for k in S_t]
        averaged(w, local, n)
        M = [sum(n[j] / sum(n) * buffers[j][i] for j in range(len(S_t))) for i in range(len(zeros))]
    return w


of = partial(transcribed, fedavg, 0.8)
KINDS = ("reset", "local", "global")
FIELDS: dict[str, Any] = {"sgd": {"momentum": 0.8}, "cohorts": [[0, 1]] * 5, "rounds": 5, "epochs": 2, "doors": ("application",)}
ROWS = [
    Row(
        f"maintained momentum: {kind}", of(kind), {other: of(other) for other in KINDS if other != kind}, clients=make_clients(6, 14, 10),
        local={"maintain": kind}, **FIELDS,
    )
    for kind in KINDS
]  # fmt: skip
