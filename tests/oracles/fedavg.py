# ruff: noqa: N803 (the names of the paper)
"""FedAvg with BatchNorm, transcribed: full participation, plain SGD; all tensors but integer counters are averaged with weights n_k / n."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Client = list[tuple[Tensor, Tensor]]  # the client's batches of one round
Loss = Callable[[Tensor, Tensor], Tensor]
State = dict[str, Tensor]

cross_entropy: Loss = nn.functional.cross_entropy


def gradient(net: nn.Module, x: Tensor, y: Tensor, F: Loss = cross_entropy) -> list[Tensor]:
    """Return the gradient of the batch's mean loss, in the order of ``net.parameters()``."""
    net.zero_grad()
    F(net(x), y).backward()
    return [w.grad.clone() for w in net.parameters()]


def sgd(net: nn.Module, x: Tensor, y: Tensor, η: float) -> None:
    g = gradient(net, x, y)
    with torch.no_grad():
        for w, g_w in zip(net.parameters(), g, strict=True):
            w -= η * g_w


def averaged(net: nn.Module, local: Sequence[State], n_k: Sequence[float]) -> None:
    """Average the clients' tensors into ``net``, as the server does: w <- sum n_k / n * w_k, for all floating-point tensors."""
    n = sum(n_k)
    state = net.state_dict()
    for key in state:
        if state[key].is_floating_point():
            total = torch.zeros_like(state[key])
            for k in range(len(local)):
                total = total + n_k[k] / n * local[k][key]
            state[key].copy_(total)


def fedavg(net: nn.Module, rounds: int, clients: list[Client], n_k: list[int], η: float) -> nn.Module:
    for _ in range(rounds):
        local = []
        for client in clients:
            w_k = copy.deepcopy(net)
            w_k.train()
            for x, y in client:
                sgd(w_k, x, y, η)
            local.append(w_k.state_dict())
        averaged(net, local, n_k)
    return net
