"""FixBN (Zhong, Chen, Chao, section 4), transcribed: FedAvg in rounds 1..T*, then with the statistics of round T*, which stay as they are.

Here, frozen rounds have a share of the learning rate, and gradients without their mean over a unit's inputs (Yong et al., ECCV 2020,
equation 1): of weights with at least 8 inputs, but not the head's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.equivalence.row import BITS, BOTH, Row, make_clients
from tests.networks import seeded_network
from tests.oracles.fedavg import FedAvg, gradient


def centred(g: list[Tensor]) -> list[Tensor]:
    """Subtract from each weight's gradient the mean over the inputs of each output unit."""
    head = max(i for i, g_w in enumerate(g) if g_w.dim() > 1)
    for i, g_w in enumerate(g):
        if g_w.dim() > 1 and i != head and g_w[0].numel() >= 8:
            for unit in range(len(g_w)):
                g_w[unit] -= g_w[unit].mean()
    return g


@dataclass
class FixBN(FedAvg):
    """``what`` freezes after round T_star: statistics, affine or both.

    ``net``: another network to begin with. ``modes``: frozen rounds are in evaluation mode, as a control.
    """

    T_star: int = 2
    what: str = "statistics"
    share: float = 0.1
    centre: bool = True
    net: nn.Module | None = None
    modes: bool = False

    def start(self) -> nn.Module:
        return self.net or self.row.net()

    @property
    def constant(self) -> bool:
        return self.t > self.T_star and self.what != "affine"

    def step(self, w: nn.Module, k: int, x: Tensor, y: Tensor) -> None:
        norms = {name: layer.train(not self.constant) for name, layer in w.named_modules() if isinstance(layer, nn.BatchNorm2d)}
        if self.modes and self.t > self.T_star:
            w.eval()
        g, η = gradient(w, x, y), self.row.rate * (self.share if self.constant else 1)
        g = centred(g) if self.constant and self.centre else g
        with torch.no_grad():
            for (name, p), g_p in zip(w.named_parameters(), g, strict=True):
                if self.t <= self.T_star or self.what == "statistics" or name.rpartition(".")[0] not in norms:
                    p -= η * g_p

    def server(self, S: list[int], local: list[nn.Module]) -> None:
        statistics = {name: b.clone() for name, b in self.w.named_buffers()}
        super().server(S, local)
        if self.constant:
            self.w.load_state_dict(statistics, strict=False)


def at(T_star: int, **options: Any) -> Callable[[Row], nn.Module]:
    return FixBN.of(T_star=T_star, **options)


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
