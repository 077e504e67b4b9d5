"""Plain PyTorch on the union of the clients' data, which FedTAN's step, FBN, and exact statistics must equal."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models

from tests.equivalence.row import BOTH, Row, make_clients, union
from tests.oracles import fedavg, fixbn


class Constant(nn.BatchNorm2d):
    """Normalises with its running statistics, then lets torch update them."""

    def forward(self, x: Tensor) -> Tensor:
        out = F.batch_norm(x, self.running_mean.clone(), self.running_var.clone(), self.weight, self.bias, False, 0.0, self.eps)
        F.batch_norm(x.detach(), self.running_mean, self.running_var, None, None, True, self.momentum, self.eps)
        return out


class Exact(nn.BatchNorm2d):
    """Normalises with the unbiased statistics of the batch that it is given, and keeps them."""

    def forward(self, x: Tensor) -> Tensor:
        self.running_mean, self.running_var = x.mean((0, 2, 3)), x.transpose(0, 1).flatten(1).var(1)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


def swapped(net: nn.Module, layer: type[nn.Module]) -> nn.Module:
    """Change the class of all BatchNorm layers for 2-d inputs."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = layer
    return net


def training(row: Row, net: nn.Module | None = None) -> nn.Module:
    """Make a step a round on all data, with an optimizer that is new in every round."""
    net = (net or row.net()).train()
    x, y = union(row.clients)
    for _ in range(row.rounds):
        optimizer = torch.optim.SGD(net.parameters(), row.rate, **row.sgd)
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def constant(row: Row) -> nn.Module:
    """Train with running statistics, which begin with the union's if the row measures them."""
    net = exact_statistics(row.net(), row) if row.calibrate else row.net()
    return training(row, swapped(net, Constant))


def dsgd(row: Row, new: float = 0.1, forgets: bool = False) -> nn.Module:
    """Step along m <- 0.9 m + ``new`` * gradient, with running statistics. ``forgets``: m begins anew in each round, as a control."""
    net, m = swapped(row.net(), Constant), dict[str, Tensor]()
    x, y = union(row.clients)
    for _ in range(row.rounds):
        gradients = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
        for (name, p), g in zip(net.named_parameters(), gradients, strict=True):
            m[name] = (0 if forgets else 0.9) * m.get(name, 0) + new * g
            p.data -= row.rate * m[name]
    return net


def two_stages(row: Row, share: float = 0.02) -> nn.Module:
    """Run FedTAN-II: one round of FedTAN, then FixBN's stage II."""
    return fixbn.at(0, share=share, net=training(replace(row, rounds=1)))(replace(row, rounds=row.rounds - 1, cohorts=()))


@torch.no_grad()
def exact_statistics(net: nn.Module, row: Row) -> nn.Module:
    """Give every layer the statistics of the union, under layers below that have theirs."""
    swapped(net, Exact)(union(row.clients)[0])
    return net


FBN: dict[str, Any] = {"method": "fbn", "options": {"momentum": 0.1}, "clients": make_clients(3, 7, 5)}
TAN: dict[str, Any] = {"method": "fedtan", "network": "resnet", "clients": FBN["clients"]}
BN = {"method": "fedavg", "options": {}}
FORWARD = {"no shared gradients": {"method": "fedavg-alg2", "options": {}}}
DSGD = {"torch's momentum": partial(dsgd, new=1.0), "begun anew": partial(dsgd, forgets=True), "local steps": {"local": {}}}
NETWORKS = {"resnet18": models.resnet18, "mobilenet_v2": models.mobilenet_v2, "densenet121": models.densenet121}
ROWS = [
    Row("fbn: centralised training with running statistics", constant,
        {"by batch statistics": training, "variances are averaged": BN, "a momentum of 0.2": {"options": {"momentum": 0.2}}},
        network="resnet", rounds=5, doors=(*BOTH, "flower", "application", "channels last"), **FBN),
    Row("fbn: distributed SGD, with an average of gradients as momentum", dsgd, DSGD, rounds=4, sgd={"momentum": 0.9},
        local={"update": "gradients"}, doors=("application",), **FBN),
    Row("fbn: from the union's statistics, measured by as many exchanges as layers", constant,
        {"an exchange too few": {"calibrate": 1}, "as they were": lambda row: constant(replace(row, calibrate=0))}, calibrate=2, **FBN),
    Row("fixbn: frozen from the start with the union's statistics", lambda row: exact_statistics(row.net(), row),
        {"too few exchanges": {"calibrate": 2}, "none": lambda row: row.net()}, options={"freeze_after": 0},
        **(TAN | {"method": "fixbn"}), rounds=1, calibrate=5, only=("running",)),
    Row("fedtan: rounds are steps of centralised training", training, FORWARD | {"fedavg": BN, "a step less": {"rounds": 1}},
        sgd={"weight_decay": 0.01}, doors=("federation", "flower", "channels last"), slow=("replay", "workers"), **TAN),
    Row("fedtan2: then with frozen statistics, at a fiftieth of the rate", two_stages,
        FORWARD | {"a tenth": partial(two_stages, share=0.1), "never frozen": training}, options={"freeze_after": 1}, rounds=3,
        doors=("federation", "flower"), **(TAN | {"method": "fedtan2"})),
    Row("static-bn: trained with batch statistics, evaluated with the union's", lambda row: exact_statistics(fedavg.of()(row), row),
        {"running averages": fedavg.of(), "fedavg": BN}, doors=("federation", "application"), **(TAN | {"method": "static-bn"})),
    *(
        Row(f"fedtan: torchvision's {name} as it comes", training, FORWARD, "fedtan", network=partial(made, num_classes=4), rounds=1,
            rate=0.01, clients=make_clients(2, 3, shape=(3, 32, 32)), doors=(), slow=("federation",), tolerance=1e-8)
        for name, made in NETWORKS.items()
    ),
]  # fmt: skip
