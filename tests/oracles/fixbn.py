# ruff: noqa: N803, N806 (the names of the paper)
"""FixBN (Zhong, Chen, Chao, section 4), transcribed: FedAvg in rounds 1..T*, then with the statistics of round T*, which stay as they are.

Here, frozen rounds have a share of the learning rate, and gradients without their mean over a unit's inputs (Yong et al., ECCV 2020,
equation 1): of weights with at least 8 inputs, but not the head's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.equivalence.row import BITS, BOTH, Row, make_clients
from tests.networks import seeded_network
from tests.oracles.fedavg import averaged, gradient


def centred(g: list[Tensor]) -> list[Tensor]:
    """Subtract from each weight's gradient the mean over the inputs of each output unit."""
    head = max(i for i, g_w in enumerate(g) if g_w.dim() > 1)
    for i, g_w in enumerate(g):
        if g_w.dim() > 1 and i != head and g_w[0].numel() >= 8:
            for unit in range(len(g_w)):
                g_w[unit] -= g_w[unit].mean()
    return g


def stages(row: Row, T_star: int, what: str = "statistics", share: float = 0.1, centre: bool = True, **start: Any) -> nn.Module:
    """Run a row's rounds; ``what`` freezes: statistics, affine or both.

    ``start``: another network, ``net``, to begin with. ``modes``: frozen rounds are in evaluation mode, as a control.
    """
    net, modes = start.get("net") or row.net(), start.get("modes", False)
    norms = [name for name, layer in net.named_modules() if isinstance(layer, nn.BatchNorm2d)]
    for t in range(1, row.rounds + 1):
        frozen = t > T_star
        constant = frozen and what != "affine"
        local = []
        for k in range(len(row.clients)):
            torch.manual_seed(1000 * t + k)  # of dropout
            w = copy.deepcopy(net).train(not (frozen and modes))
            if constant:
                for name in norms:
                    w.get_submodule(name).eval()
            for x, y in row.steps[k]:
                g = gradient(w, x, y)
                η = share * row.rate if constant else row.rate
                g = centred(g) if constant and centre else g
                with torch.no_grad():
                    for (name, p), g_p in zip(w.named_parameters(), g, strict=True):
                        if not (frozen and what != "statistics" and name.rpartition(".")[0] in norms):
                            p -= η * g_p
            local.append(w.state_dict())
        statistics = {name: b.clone() for name, b in net.named_buffers()}
        averaged(net, local, row.sizes)
        if constant:
            net.load_state_dict(statistics, strict=False)
    return net


def at(T_star: int, **options: Any) -> Callable[[Row], nn.Module]:
    return partial(stages, T_star=T_star, **options)


WRONG: dict[str, Any] = {"frozen a round late": at(3), "frozen a round early": at(1), "scale and shift freeze, too": at(2, what="both")}
WRONG |= {"at the full rate": at(2, share=1.0), "with the mean of each unit's gradient": at(2, centre=False)}
RESNET: dict[str, Any] = {"method": "fixbn", "network": "resnet", "rounds": 4}
FEDAVG: dict[str, Any] = {"method": "fedavg", "options": {}}
ROWS = [
    Row("fixbn: stages I and II", at(2), WRONG, doors=(*BOTH, "flower"), **RESNET),
    *(
        Row(f"fixbn: {what} frozen", at(2, what=what), {"the statistics alone": at(2)}, "fixbn", {"freeze_what": what}, rounds=4)
        for what in ("affine", "both")
    ),
    Row(
        "fixbn: after round 1, at another rate", at(1, share=0.3), {"half of the rounds": at(2, share=0.3), "a tenth": at(1)},
        options={"freeze_after": 1, "frozen_rate": 0.3}, clients=make_clients(6, 14, 10), doors=("federation", "application"), **RESNET,
    ),
    Row(
        "fixbn: dropout stays on", at(2), {"evaluation mode": at(2, modes=True)}, "fixbn", network=lambda: seeded_network("cnn"),
        dropout=True, rounds=4, doors=("own loop",),
    ),
    Row(
        "fixbn: not a bit of the statistics moves after T*", {"rounds": 2}, {"fedavg": FEDAVG},
        options={"freeze_after": 2}, only=("running",), tolerance=BITS, **RESNET,
    ),
    Row(
        "fixbn: never frozen it is fedavg, bit for bit", FEDAVG, {"three of four": {"options": {"freeze_after": 3}}},
        options={"freeze_after": 4}, tolerance=BITS, **RESNET,
    ),
]  # fmt: skip
