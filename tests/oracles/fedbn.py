# ruff: noqa: N803, N806 (the names of the paper)
"""FedBN, Algorithm 1 (Li et al., ICLR 2021), transcribed: K users, L layers, E local updates between averagings.

The algorithm says "layer l is BatchNorm" in words. Here the caller gives a list of the names of these layers. SiloBN (Andreux et al., DCL
2020) is the same for the running statistics alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from tests.equivalence.row import BITS, Client, Row, make_clients
from tests.oracles.fedavg import averaged, by_client, sgd


def algorithm_1(net: nn.Module, bn: list[str], T: int, E: int, users: list[Client], η: float, n: list[int]) -> list[nn.Module]:
    """Make T updates; return every user's network. The t-th batch of user k is ``users[k][(t - 1) % E]``.

    User k has the weight n_k / sum n; the paper's is 1 / K.
    """
    K = len(users)
    nets = [copy.deepcopy(net).train() for _ in range(K)]
    for t in range(1, T + 1):
        for k in range(K):  # for each user k and each layer l: w <- SGD(w)
            x, y = users[k][(t - 1) % E]
            sgd(nets[k], x, y, η)
        if t % E == 0:
            for layer in dict(nets[0].named_modules()):
                if layer in bn:
                    continue
                own = dict(nets[0].get_submodule(layer).named_parameters(recurse=False))
                for name in own:
                    total = torch.zeros_like(own[name])
                    for k in range(K):
                        total = total + n[k] / sum(n) * getattr(nets[k].get_submodule(layer), name).detach()
                    for k in range(K):
                        getattr(nets[k].get_submodule(layer), name).data.copy_(total)
    return nets


def of(row: Row, n: list[int] | None = None, named: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    net, E = row.net(), len(row.clients[0])
    bn = [name for name, module in net.named_modules() if isinstance(module, nn.BatchNorm2d) and named(name)]
    return by_client(algorithm_1(net, bn, row.rounds * E, E, row.steps, row.rate, n or row.sizes))


def shared(row: Row, n: list[int] | None = None) -> dict[str, Tensor]:
    return {name.removeprefix("0/"): t for name, t in of(row, n).items() if name.startswith("0/")}


def silobn(row: Row) -> dict[str, Tensor]:
    nets = [row.net().train() for _ in row.clients]
    for _ in range(row.rounds):
        for net, client in zip(nets, row.steps, strict=True):
            for x, y in client:
                sgd(net, x, y, row.rate)
        statistics = [{name: b.clone() for name, b in net.named_buffers()} for net in nets]
        local = [copy.deepcopy(net.state_dict()) for net in nets]
        for net, own in zip(nets, statistics, strict=True):
            averaged(net, local, row.sizes)
            net.load_state_dict(own, strict=False)
    return by_client(nets)


EQUALLY = partial(of, n=[1, 1, 1])
WRONG = {"BatchNorm is what has bn in its name": partial(of, named=lambda name: "bn" in name), "users of equal weight": EQUALLY}
ROWS = [
    Row("fedbn: Algorithm 1", of, WRONG | {"scale and shift are shared": silobn}, "fedbn", network="resnet"),
    Row(
        "fedbn: Algorithm 1, users of equal weight", partial(shared, n=[1, 1, 1]), {"by samples": shared}, "fedbn", network="resnet",
        uniform=True, doors=("own loop",), only=("head", "first"),
    ),
    Row("silobn", silobn, {"scale and shift stay at home": of}, "silobn", network="resnet"),
    Row(
        "fedbn: with equal clients it is fedavg, bit for bit", {"method": "fedavg"},
        {"other clients": {"clients": make_clients(8, 8, 8, 8, pieces=2)}}, "fedbn", clients=make_clients(8, pieces=2) * 4,
        only=("0/", "3/"), tolerance=BITS,
    ),
]  # fmt: skip
