"""HBN (Hybrid Batch Normalisation), equations 7 to 11, with the ablations of Table 6, transcribed in plain PyTorch.

μ_b, σ2_b: mean and variance of a batch; G: the global ones; α = sigmoid(p), one p per channel and client; λ: the weight of a round.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.equivalence.row import Found, Row, make_clients
from tests.oracles.centralised import exact_statistics
from tests.oracles.fedavg import averaged

Part = tuple[int, Tensor, Tensor]  # count, mean and biased variance


@dataclass(frozen=True)
class Variant:
    """Choose what differs from HBN; the numbers are those of the ablations."""

    moving: bool = False  # (1): equation 7 by moving averages over the training batches, without separation
    averaged: bool = False  # (2): equation 8 by a weighted average
    mixing: str = "learned"  # (3), (4), (5): equation 9 with global statistics only, batch statistics only, or half of each
    mixture: bool = False  # clients report the statistics by which inputs are normalised, as the authors' code does
    shared: bool = False  # in the pass of equation 7, lower layers normalise with G alone
    uniform: bool = False  # clients are merged with equal weights, as a control


class Layer(nn.BatchNorm2d):
    """A BatchNorm layer of one client; ``running_mean`` and ``running_var`` are G."""

    p: Tensor
    a: Variant
    seen: list[tuple[Part, Part]]  # of each batch: its moments, and those by which it was normalised

    def forward(self, x: Tensor) -> Tensor:
        μ_b = x.mean((0, 2, 3))
        σ2_b = ((x - μ_b[:, None, None]) ** 2).mean((0, 2, 3))
        α = {"learned": torch.sigmoid(self.p), "half": 0.5, "batch": 1.0, "global": 0.0}[self.a.mixing]
        μ, σ2 = α * μ_b + (1 - α) * self.running_mean, α * σ2_b + (1 - α) * self.running_var  # equation 9
        if not self.training:
            μ, σ2 = self.running_mean, self.running_var
        n = x.numel() // x.shape[1]
        self.seen.append(((n, μ_b.detach(), σ2_b.detach()), (n, μ.detach(), σ2.detach())))
        y = (x - μ[:, None, None]) / torch.sqrt(σ2 + self.eps)[:, None, None]  # equation 10
        return self.weight[:, None, None] * y + self.bias[:, None, None]


def merge(parts: Sequence[Part], a: Variant = Variant()) -> Part:  # noqa: B008 (frozen)
    """Merge counts, means and biased variances by equation 8."""
    M = sum(n for n, _, _ in parts)
    w = [1 / len(parts) if a.uniform else n / M for n, _, _ in parts]
    μ = sum(w_i * μ_i for w_i, (_, μ_i, _) in zip(w, parts, strict=True))
    spread = 0.0 if a.averaged else 1.0
    return M, μ, sum(w_i * (σ2_i + spread * (μ_i - μ) ** 2) for w_i, (_, μ_i, σ2_i) in zip(w, parts, strict=True))  # type: ignore[return-value]


def unbiased(part: Part) -> tuple[Tensor, Tensor]:
    n, μ, σ2 = part
    return μ, σ2 * n / (n - 1)


class Rounds:
    """Run HBN's rounds: ``net`` has the global weights and G, ``p`` every client's mixing logits, ``evaluated`` the last evaluation's."""

    def __init__(self, row: Row, λ: float, a: Variant) -> None:
        self.row, self.λ, self.a, self.net = row, λ, a, row.net()
        self.names = [name for name, layer in self.net.named_modules() if isinstance(layer, nn.BatchNorm2d)]
        if row.calibrate:
            exact_statistics(self.net, row)
        self.p = [{name: torch.zeros_like(self.net.get_submodule(name).bias) for name in self.names} for _ in row.clients]
        self.evaluated: dict[str, tuple[Tensor, Tensor]] = {}

    def network(self, k: int) -> nn.Module:
        """Return client k's network."""
        net = copy.deepcopy(self.net).train()
        for name in self.names:
            layer: Any = net.get_submodule(name)
            layer.__class__, layer.p, layer.a, layer.seen = Layer, self.p[k][name], self.a, []
        return net

    @torch.no_grad()
    def report(self, k: int, used: bool, shared: bool = False) -> dict[str, Part]:
        """Make a pass over a client's batches; report their moments, or those ``used`` to normalise them."""
        net = self.network(k).train(not shared)
        for x, _ in self.row.clients[k]:
            net(x)
        return {name: merge([pair[used] for pair in net.get_submodule(name).seen]) for name in self.names}  # type: ignore[union-attr]

    def round(self, cohort: list[int], momentum: float = 0.1) -> None:
        reports, local = [], []
        for k in cohort:
            client, net, report = self.row.steps[k], self.network(k), self.report(k, self.a.mixture, self.a.shared)
            G = {name: (layer.running_mean.clone(), layer.running_var.clone()) for name, layer in self.layers(net)}
            learned = list(self.p[k].values()) if self.a.mixing == "learned" else []
            for x, y in client:
                for layer in self.layers(net):
                    layer[1].seen = []
                weights = [*net.parameters(), *(p.requires_grad_(True) for p in learned)]
                gradients = torch.autograd.grad(F.cross_entropy(net(x), y), weights)
                with torch.no_grad():
                    for p, g in zip(weights, gradients, strict=True):
                        p -= self.row.rate * g
                for name, layer in self.layers(net):
                    new = unbiased(layer.seen[0][0])
                    G[name] = tuple((1 - momentum) * old + momentum * own for old, own in zip(G[name], new, strict=True))  # type: ignore[assignment]
            if self.a.moving:
                report = {name: (len(client) * n, *G[name]) for name, (n, _, _) in report.items()}
            reports.append(report)
            local.append(net.state_dict())
        statistics = {name: b.clone() for name, b in self.net.named_buffers()}
        averaged(self.net, local, [self.row.sizes[k] for k in cohort])
        self.net.load_state_dict(statistics, strict=False)
        merged = {name: unbiased(merge([report[name] for report in reports], self.a)) for name in self.names}
        for name, layer in self.layers(self.net):
            layer.running_mean.lerp_(merged[name][0], self.λ)  # equation 11
            layer.running_var.lerp_(merged[name][1], self.λ)
        self.evaluated = merged if self.a.moving else self.hybrid(cohort)

    def layers(self, net: nn.Module) -> list[tuple[str, Any]]:
        return [(name, net.get_submodule(name)) for name in self.names]

    def hybrid(self, cohort: Sequence[int]) -> dict[str, tuple[Tensor, Tensor]]:
        """Measure what training normalises with, as the authors' code does before an evaluation."""
        reports = [self.report(k, True) for k in cohort]
        return {name: unbiased(merge([report[name] for report in reports], self.a)) for name in self.names}


def of(a: Variant = Variant(), λ: float = 0.3, evaluated: str = "") -> Callable[[Row], Found]:  # noqa: B008 (frozen)
    """Return the weights, the clients' mixing logits, and the statistics that are evaluated.

    ``evaluated``: those measured by ``all`` clients, the union's (``exact``), or the ``global`` ones. Empty: measured by the last cohort.
    """

    def compute(row: Row) -> Found:
        rounds = Rounds(row, λ, a)
        for cohort in row.schedule:
            rounds.round(cohort)
        if evaluated == "exact":
            return exact_statistics(rounds.net, row)
        found = dict(rounds.net.state_dict())
        if evaluated != "global":
            statistics = rounds.hybrid(range(len(row.clients))) if evaluated == "all" else rounds.evaluated
            for name, (μ, σ2) in statistics.items():
                found |= {f"{name}.running_mean": μ, f"{name}.running_var": σ2}
            found |= {f"{k}/{name}.mixing_logit": p for k, own in enumerate(rounds.p) for name, p in own.items()}
        return found

    return compute


ABLATIONS: dict[str, tuple[dict[str, Any], Variant]] = {
    "equations 7 to 11": ({}, Variant()),
    "ablation 1": ({"separate": False}, Variant(moving=True)),
    "ablation 2": ({"merge": "average"}, Variant(averaged=True)),
    "ablation 3": ({"mixing": "shared"}, Variant(mixing="global")),
    "ablation 4": ({"mixing": "batch"}, Variant(mixing="batch")),
    "ablation 5": ({"mixing": "half"}, Variant(mixing="half")),
    "the authors' pass": ({"measured": "normalisers"}, Variant(mixture=True)),
    "ablations 1 and 2": ({"separate": False, "merge": "average"}, Variant(moving=True, averaged=True)),
}
HBN: dict[str, Any] = {"method": "hbn", "clients": make_clients(3, 7, 5), "epochs": 3}
SOME = HBN | {"clients": make_clients(4, 7, 5, 6), "cohorts": [[0, 1]] * 2}
LAM, COHORT = {"lam": 0.3}, {"lam": 0.3, "evaluate_clients": "cohort"}
EQUAL, SHARED, MOVING = Variant(uniform=True), Variant(shared=True), Variant(moving=True)
WRONG = {"equal weights": of(EQUAL), "another lambda": of(λ=0.15)}
G, ALL = partial(of, evaluated="global"), of(evaluated="all")


def ablation(name: str) -> Row:
    options, variant = ABLATIONS[name]
    others = list(ABLATIONS)[list(ABLATIONS).index(name) + 1 :] or ["ablation 1"]  # those before it have it as a wrong rule
    wrong = {other: of(ABLATIONS[other][1]) for other in others} | (WRONG if not options else {})
    doors = ("federation", "application") if name in ("ablation 1", "ablation 3", "the authors' pass") else ("federation",)
    only = () if variant.mixing in ("learned", "half") else ("weight", "bias", "running")  # fl-bn's fixed logits are not 0
    return Row(f"hbn: {name}", of(variant), wrong, options=COHORT | options, doors=doors, only=only, **HBN)


ROWS = [
    *map(ablation, ABLATIONS),
    Row("hbn: global statistics", G(), {"equal weights": G(EQUAL), "ablation 2": G(Variant(averaged=True)), "another lambda": G(λ=0.15)},
        options=LAM, doors=("own loop",), **HBN),
    Row("hbn: lower layers normalise with the global statistics in the pass", G(SHARED),
        {"as in training": G(), "averaged": G(Variant(shared=True, averaged=True))}, options=LAM | {"lower_layers": "shared"},
        network="resnet", doors=("own loop",), **HBN),
    Row("hbn: hybrid statistics of several batches", ALL, {"the union's": of(evaluated="exact"), "the global ones": G(), **WRONG},
        options=LAM, **(HBN | {"clients": make_clients(6, 14, 10, pieces=2)})),
    Row("hbn: the round's cohort is evaluated", of(), {"all clients": ALL, "ablation 1": of(MOVING)}, options=COHORT, **SOME),
    Row("hbn: all clients are evaluated", ALL, {"the cohort": of()}, options=LAM, **SOME),
    Row("hbn: the cohort's moving averages are evaluated", of(MOVING), {"a pass": of()}, options=COHORT | {"separate": False}, **SOME),
    Row("hbn: the union's statistics are evaluated", of(λ=1.0, evaluated="exact"),
        {"by one pass of each client": of(λ=1.0, evaluated="all"), "the global ones": G(λ=1.0)}, options={"lam": 1.0}, network="resnet",
        doors=("federation", "flower", "application"), **HBN),
    Row("hbn: from the union's statistics, measured by as many exchanges as layers", of(), {"too few": {"calibrate": 1}}, options=COHORT,
        calibrate=2, **HBN),
]  # fmt: skip
