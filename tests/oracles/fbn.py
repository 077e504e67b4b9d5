"""FBN, Algorithm 2 (Guerraoui et al.), transcribed: one batch-normalisation layer, one local step per round (E = 1).

The names are those of the paper: u and s are the running mean and the (unbiased) running variance, β is the weight of the new batch, K
the number of values per channel of a client's batch, and n the number of clients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.equivalence.row import BOTH, Row, make_clients
from tests.oracles.fedavg import FedAvg
from tests.oracles.nnm import nnm

Array = np.ndarray
Rule = Callable[[Array, Array, list[Array], float], tuple[Array, Array]]  # (u, s, the clients' data, β) -> new u and s


def μ(x: Array) -> Array:
    """Return the mean of a batch x (K, C), summed row by row."""
    total = np.zeros(x.shape[1])
    for row in x:
        total = total + row
    return total / len(x)


def σ2(x: Array) -> Array:
    """Return the biased variance of a batch x (K, C)."""
    return μ((x - μ(x)) ** 2)


def algorithm_2(u: Array, s: Array, batches: list[Array], β: float) -> tuple[Array, Array]:
    """Return the new u and s by the algorithm as the paper prints it, for batches of one size K."""
    n, K = len(batches), len(batches[0])
    assert all(len(x) == K for x in batches)
    u_i, s_i = [], []
    for x in batches:  # every client
        u_i.append((1 - β) * u + β * μ(x))
        s_i.append((1 - β) * s + β * (K * n / (K * n - 1)) * σ2(x))
    u_plus = np.zeros_like(u)
    for i in range(n):  # the server
        u_plus = u_plus + u_i[i] / n
    s_plus = np.zeros_like(s)
    for i in range(n):
        s_plus = s_plus + s_i[i] / n
    for i in range(n):
        s_plus = s_plus + (K * n / ((K * n - 1) * β)) * (u_i[i] - u_plus) ** 2 / n
    return u_plus, s_plus


def merged(
    u: Array, s: Array, data: list[Array], β: float, spread: float = 1.0, bessel: int = 1, equal: bool = False, copies: int = 1
) -> tuple[Array, Array]:
    """Move u and s towards the moments of all data by β: Algorithm 2 for batches of any sizes. Other arguments make wrong rules."""
    M = copies * sum(len(x) for x in data)
    w = [1 / len(data) if equal else copies * len(x) / M for x in data]
    mean = sum(w_i * μ(x) for w_i, x in zip(w, data, strict=True))
    var = sum(w_i * (σ2(x) + spread * (μ(x) - mean) ** 2) for w_i, x in zip(w, data, strict=True)) * M / (M - bessel)
    return (1 - β) * u + β * mean, (1 - β) * s + β * var


def robust(
    u: Array, s: Array, data: list[Array], β: float, average: Callable[[Array], Array], mixed_first: bool = False
) -> tuple[Array, Array]:
    """Robust FBN (section 5): u_r = average(μ_i), then average(σ2_i + (μ_i - u_r)^2); all clients count as one of median size.

    ``mixed_first``: the deviations are those of the means after NNM with f = 1, as a control.
    """
    means, M = np.stack([μ(x) for x in data]), len(data) * int(np.median([len(x) for x in data]))
    u_r = average(means)
    t = np.stack([σ2(x) for x in data]) + ((nnm(means, 1) if mixed_first else means) - u_r) ** 2
    return (1 - β) * u + β * u_r, (1 - β) * s + β * M / (M - 1) * average(t)


class Constant(nn.Module):
    """Normalise with the running statistics, and note the inputs as rows of C values."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [*self.__dict__.get("seen", ()), x.detach().movedim(1, -1).reshape(-1, x.shape[1]).numpy()]
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


@dataclass
class FBN(FedAvg):
    """Clients report the ``first`` batch, ``all`` batches, or a ``pass`` before training.

    ``once``: β is the weight of all batches together, as a control.
    """

    β: float = 0.1
    report: str = "first"
    rule: Rule = merged
    once: bool = False

    def start(self) -> nn.Module:
        net = self.row.net()
        self.names = [name for name, layer in net.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        for name in self.names:
            net.get_submodule(name).__class__ = Constant
        return net

    def reported(self, k: int, w_k: nn.Module) -> dict[str, Array]:
        """Return the values that client k reports, by layer."""
        if self.report == "pass":
            w_k = copy.deepcopy(self.w)
            with torch.no_grad():
                w_k(torch.cat([x for x, _ in self.row.steps[k]]))
        seen = {name: w_k.get_submodule(name).__dict__["seen"] for name in self.names}
        return {name: np.concatenate(noted) if self.report == "all" else noted[0] for name, noted in seen.items()}

    def server(self, S: list[int], local: list[nn.Module]) -> None:
        reports = [self.reported(k, w_k) for k, w_k in zip(S, local, strict=True)]
        super().server(S, local)
        for name in self.names:
            layer, values = self.w.get_submodule(name), [report[name] for report in reports]
            E = sum(len(self.row.steps[k]) * len(x) for k, x in zip(S, values, strict=True)) / sum(map(len, values))
            b = 1 - (1 - self.β) ** E if self.report == "all" and not self.once else self.β
            u, s = self.rule(layer.running_mean.numpy().copy(), layer.running_var.numpy().copy(), values, b)
            layer.running_mean.copy_(torch.from_numpy(u))
            layer.running_var.copy_(torch.from_numpy(s))


def inputs() -> nn.Module:
    """Make a network whose BatchNorm sees the data themselves, so that one layer's rounds are those of the algorithm."""
    return nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 4))


of = FBN.of


def median(values: Array) -> Array:
    return np.median(nnm(values, 1), axis=0)


def trimmed_mean(values: Array) -> Array:
    return np.sort(nnm(values, 1), axis=0)[1:-1].mean(0)


def defended(rule: str, average: Callable[[Array], Array], other: Callable[[Array], Array]) -> Row:
    """Make a row of five clients, of which one may be Byzantine. They count equally, also in the average of the weights."""

    def against(average: Callable[[Array], Array], **options: Any) -> Callable[[Row], nn.Module]:
        return of(rule=partial(robust, average=average, **options), n_k=[1] * 5)

    wrong = {"another rule": against(other), "without mixing": against(lambda values: np.median(values, axis=0)), "no defence": of()}
    wrong |= {"the means are mixed before their deviations": against(average, mixed_first=True)}
    given = {"defence": (1, f"nnm+{rule}", "mean"), "clients": make_clients(3, 7, 5, 6, 4), "doors": BOTH}
    return Row(f"robust fbn: nnm+{rule}", against(average), wrong, **METHOD, **given)


METHOD: dict[str, Any] = {"method": "fbn", "options": {"momentum": 0.1}}
equally, naive = partial(merged, equal=True), partial(merged, spread=0.0)
WRONG: dict[str, Any] = {"variances are averaged": of(rule=naive), "without Bessel's factor": of(rule=partial(merged, bessel=0))}
WRONG |= {"a momentum of 0.2": of(β=0.2)}
EQUAL = {"equal weights": of(rule=equally)}
ALL = {"the momentum of one batch": of(report="all", once=True), "the first": of(), "equal weights": of(rule=equally, report="all")}
PASS = {"all": of(report="all"), "the first": of(), "variances are averaged": of(rule=naive, report="pass")}
ROWS = [
    Row("fbn: Algorithm 2 as printed", of(rule=algorithm_2), WRONG, network=inputs, clients=make_clients(5, 5, 5, shape=(5,)), **METHOD),
    Row("fbn: Algorithm 2, unequal batches", of(), WRONG | EQUAL, network=inputs, clients=make_clients(1, 2, 9, shape=(5,)), **METHOD),
    Row("fbn: the first of several batches is reported", of(),
        WRONG | EQUAL | {"all": of(report="all"), "the weights are averaged equally": of(n_k=[1, 1, 1])}, network="resnet",
        doors=(*BOTH, "flower"), **METHOD),
    Row("fbn: all batches are reported", of(report="all"), ALL, "fbn", {"momentum": 0.1, "report": "all"}, doors=BOTH,
        clients=[*make_clients(6, pieces=2), *make_clients(14, pieces=3), *make_clients(10)]),
    Row("fbn: a pass before training is reported", of(report="pass"), PASS, "fbn", {"momentum": 0.1, "report": "pass"}, doors=BOTH),
    Row("fbn with fedsam: the first pass alone is reported", of(), {"both passes": of(rule=partial(merged, copies=2))}, network=inputs,
        clients=make_clients(3, 7, 5, shape=(5,)), objective=("fedsam", {"rho": 0.3}), only=("running",), **METHOD),
    Row("robust fbn: against nobody, NNM and median are Algorithm 2", of(rule=algorithm_2),
        {"a median": {"defence": (0, "median", "mean")}}, clients=make_clients(5, 5, 5), defence=(0, "nnm+median", "mean"), **METHOD),
    defended("median", median, trimmed_mean),
    defended("trimmed-mean", trimmed_mean, median),
]  # fmt: skip
