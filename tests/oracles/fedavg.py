"""FedAvg with BatchNorm, transcribed: full participation, plain SGD, everything but integer counters averaged with n_k / n."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

Client = list[tuple[Tensor, Tensor]]  # the client's batches of one round


def sgd(net: nn.Module, x: Tensor, y: Tensor, η: float) -> None:
    loss = nn.functional.cross_entropy(net(x), y)
    net.zero_grad()
    loss.backward()
    with torch.no_grad():
        for w in net.parameters():
            w -= η * w.grad


def fedavg(net: nn.Module, rounds: int, clients: list[Client], n_k: list[int], η: float) -> nn.Module:
    n = sum(n_k)
    for _ in range(rounds):
        local = []
        for client in clients:
            w_k = copy.deepcopy(net)
            w_k.train()
            for x, y in client:
                sgd(w_k, x, y, η)
            local.append(w_k.state_dict())
        state = net.state_dict()
        for key in state:
            if state[key].is_floating_point():
                total = torch.zeros_like(state[key])
                for k in range(len(clients)):
                    total = total + n_k[k] / n * local[k][key]
                state[key].copy_(total)
    return net
