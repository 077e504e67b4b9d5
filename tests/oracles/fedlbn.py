# ruff: noqa: N803, N806 (the names of the papers)
"""FedLBN: FedBN's Algorithm 1 for the first BatchNorm layer, FBN's Algorithm 2 for the others, one federation of both."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.equivalence.row import BOTH, Row, make_clients
from tests.oracles.fbn import Constant, Rule, merged
from tests.oracles.fedavg import averaged, by_client, sgd


def of(row: Row, home: slice = slice(1), β: float = 0.1, rule: Rule = merged) -> dict[str, Tensor]:
    """Run a row's rounds. ``home``: which BatchNorm layers stay at home. Return the clients' networks, and what the server shares."""
    net = row.net().train()
    names = [name for name, layer in net.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    own = names[home]
    shared = [name for name in names if name not in own]
    for name in shared:
        net.get_submodule(name).__class__ = Constant
    nets = [copy.deepcopy(net) for _ in row.clients]
    for _ in range(row.rounds):
        for w, client in zip(nets, row.steps, strict=True):
            for name in shared:
                w.get_submodule(name).__dict__["seen"] = ()
            for x, y in client:
                sgd(w, x, y, row.rate)
        averaged(net, [w.state_dict() for w in nets], row.sizes)
        for name in shared:
            layer = net.get_submodule(name)
            first = [w.get_submodule(name).__dict__["seen"][0] for w in nets]
            u, s = rule(layer.running_mean.numpy().copy(), layer.running_var.numpy().copy(), first, β)
            layer.running_mean.copy_(torch.from_numpy(u))
            layer.running_var.copy_(torch.from_numpy(s))
        sent = {name: t for name, t in net.state_dict().items() if name.rpartition(".")[0] not in own}
        for w in nets:
            w.load_state_dict(sent, strict=False)
    return {**by_client(nets), **sent}


FEDLBN: dict[str, Any] = {"method": "fedlbn", "options": {"momentum": 0.1}}
WRONG: dict[str, Any] = {"all layers stay at home": {"method": "fedbn", "options": {}}, "none stays at home": {"method": "fbn"}}
WRONG |= {"the first two": partial(of, home=slice(2)), "the second": partial(of, home=slice(1, 2))}
WRONG |= {"variances are averaged": partial(of, rule=partial(merged, spread=0.0))}
ROWS = [
    Row("fedlbn", of, WRONG, network="resnet", doors=(*BOTH, "flower"), **FEDLBN),
    Row("fedlbn: one batch", of, WRONG, clients=make_clients(6, 14, 10), doors=("federation", "workers", "vectorised", "application"),
        **FEDLBN),
]  # fmt: skip
