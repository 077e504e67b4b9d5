"""HBN with its ablations (Table 6), rounds of full batches transcribed in plain PyTorch: never imports fl_bn.

A network is a list of layers; its BatchNorm layers are computed here. ``Ablation`` has one switch per row of the table:

(1) ``moving``: equation 7 by moving averages over the training batches, without separation;
(2) ``averaged``: equation 8 by a weighted average;
(3), (4), (5) ``mixing``: equation 9 with ``global`` statistics only, ``batch`` statistics only, or ``half`` of each.

``mixture``: in the pass of equation 7, clients report the mixed statistics by which the inputs are normalised, as the authors' code does.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Statistics = dict[int, tuple[Tensor, Tensor]]
"""Mean and variance of the BatchNorm layer at each place of the network."""


@dataclass
class Ablation:
    moving: bool = False
    averaged: bool = False
    mixing: str = "learned"
    mixture: bool = False


@dataclass
class Client:
    """Hold a client's data ``x`` and ``y``, and ``factor``: BatchNorm layer -> the client's own mixing logits."""

    x: Tensor
    y: Tensor
    factor: dict[int, Tensor] = field(default_factory=dict)


def mixed(a: Ablation, logit: Tensor, batch: tuple[Tensor, Tensor], shared: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Mix the statistics of the batch and the shared ones by equation 9, or as the ablation says."""
    if a.mixing == "global":
        return shared
    if a.mixing == "batch":
        return batch
    alpha = torch.full_like(logit, 0.5) if a.mixing == "half" else torch.sigmoid(logit)
    return tuple(alpha * own + (1 - alpha) * other for own, other in zip(batch, shared, strict=True))  # type: ignore[return-value]


def forward(
    net: nn.Sequential, x: Tensor, shared: Statistics, factor: dict[int, Tensor], a: Ablation
) -> tuple[Tensor, dict[int, tuple[int, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]]:
    """Run the network on ``x`` in training.

    Returns:
        The output, and for each BatchNorm layer: the count, the batch's mean and biased variance, and the mean and variance by which the
        layer normalised.
    """
    seen = {}
    for place, layer in enumerate(net):
        if not isinstance(layer, nn.BatchNorm2d):
            x = layer(x)
            continue
        mean = x.mean((0, 2, 3))
        var = ((x - mean[None, :, None, None]) ** 2).mean((0, 2, 3))
        used = mixed(a, factor[place], (mean, var), shared[place])
        seen[place] = (x.numel() // x.shape[1], (mean.detach(), var.detach()), tuple(t.detach() for t in used))
        x = (x - used[0][None, :, None, None]) / torch.sqrt(used[1] + layer.eps)[None, :, None, None]
        x = x * layer.weight[None, :, None, None] + layer.bias[None, :, None, None]
    return x, seen  # type: ignore[return-value]


def merge(parts: list[tuple[int, Tensor, Tensor]], averaged: bool) -> tuple[Tensor, Tensor]:
    """Merge the clients' counts, means and variances by equation 8; with ``averaged``, average the variances (the ablation)."""
    total = sum(count for count, _, _ in parts)
    mean = sum(count * m for count, m, _ in parts) / total
    spread = 0.0 if averaged else 1.0
    m2 = sum(count * (v + spread * (m - mean) ** 2) for count, m, v in parts)
    return mean, m2 / (total - 1)  # type: ignore[operator, return-value]


class Server:
    """Run HBN's rounds.

    Attributes:
        net: The global network.
        shared: The global statistics.
        evaluated: The statistics of the last evaluation.
    """

    def __init__(self, net: nn.Sequential, clients: list[Client], lam: float, a: Ablation) -> None:
        self.net, self.clients, self.lam, self.a = copy.deepcopy(net), clients, lam, a
        places = [place for place, layer in enumerate(net) if isinstance(layer, nn.BatchNorm2d)]
        self.shared: Statistics = {p: (net[p].running_mean.clone(), net[p].running_var.clone()) for p in places}  # type: ignore[union-attr, operator]
        self.evaluated: Statistics = {}
        for client in clients:
            client.factor = {p: torch.zeros_like(self.shared[p][0]) for p in places}

    def round(self, steps: int, rate: float, cohort: list[int]) -> None:
        """Run one round of the clients in ``cohort``.

        A client reports statistics and makes ``steps`` steps of SGD, each on all its data. The server then averages and merges.
        """
        a, reports, nets, total = self.a, [], [], sum(len(self.clients[k].y) for k in cohort)
        for k in cohort:
            client, net = self.clients[k], copy.deepcopy(self.net)
            own = [] if a.mixing != "learned" else list(client.factor.values())
            for logit in own:
                logit.requires_grad_(True)
            with torch.no_grad():
                _, seen = forward(net, client.x, self.shared, client.factor, a)
            report = {p: (n, *(used if a.mixture else batch)) for p, (n, batch, used) in seen.items()}
            running = dict(self.shared)
            for _ in range(steps):
                y, seen = forward(net, client.x, self.shared, client.factor, a)
                learning = [*net.parameters(), *own]
                gradients = torch.autograd.grad(F.cross_entropy(y, client.y), learning, allow_unused=True)
                with torch.no_grad():
                    for p, g in zip(learning, gradients, strict=True):
                        p -= rate * g
                for p, (n, (mean, var), _) in seen.items():
                    before = running[p]
                    running[p] = (0.9 * before[0] + 0.1 * mean, 0.9 * before[1] + 0.1 * var * n / (n - 1))
            if a.moving:
                report = {p: (steps * n, *running[p]) for p, (n, _, _) in seen.items()}
            reports.append(report)
            nets.append((len(client.y) / total, net))
        with torch.no_grad():
            for name, parameter in self.net.named_parameters():
                parameter.copy_(sum(share * dict(net.named_parameters())[name] for share, net in nets))  # type: ignore[arg-type]
        merged = {p: merge([report[p] for report in reports], a.averaged) for p in self.shared}
        self.shared = {  # equation 11
            p: tuple((1 - self.lam) * old + self.lam * new for old, new in zip(self.shared[p], merged[p], strict=True))  # type: ignore[misc]
            for p in self.shared
        }
        self.evaluated = merged if a.moving else self.synchronised(cohort)

    @torch.no_grad()
    def synchronised(self, cohort: list[int]) -> Statistics:
        """Update the statistics once more before an evaluation, by the same clients as in the round, as the authors' code does."""
        parts = []
        for k in cohort:
            client = self.clients[k]
            _, seen = forward(self.net, client.x, self.shared, client.factor, self.a)
            parts.append({p: (n, *used) for p, (n, _, used) in seen.items()})
        return {p: merge([part[p] for part in parts], self.a.averaged) for p in self.shared}
