# ruff: noqa: N803 (the names of the paper)
"""FedAvg with BatchNorm, transcribed: full participation, plain SGD; all tensors but integer counters are averaged with weights n_k / n."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.equivalence.row import BOTH, Client, Row, make_clients

State = dict[str, Tensor]


def gradient(net: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Return the gradient of the batch's mean loss, in the order of ``net.parameters()``."""
    net.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
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


def of(row: Row, net: nn.Module | None = None, n_k: list[int] | None = None) -> nn.Module:
    """Compute a row's rounds, from another network, or with the weights ``n_k``."""
    return fedavg(net or row.net(), row.rounds, row.steps, n_k or row.sizes, row.rate)


def by_client(nets: Sequence[nn.Module]) -> State:
    return {f"{k}/{name}": t for k, net in enumerate(nets) for name, t in net.state_dict().items()}


def single(row: Row) -> State:
    """Train every client alone."""
    return by_client([fedavg(row.net(), row.rounds, [client], [1], row.rate) for client in row.steps])


EQUAL = {"equal weights": lambda row: of(row, n_k=[1] * len(row.clients))}
WRONG = EQUAL | {"statistics stay at clients": {"method": "silobn"}, "one round less": {"rounds": 2}}
ROWS = [
    Row("fedavg", of, WRONG, network="resnet", rounds=3, doors=(*BOTH, "flower", "channels last")),
    Row("fedavg: batches of all samples", of, EQUAL, clients=make_clients(6, 14, 10), epochs=2, doors=("application",)),
    Row("single", single, {"fedbn": {"method": "fedbn"}}, "single"),
]
