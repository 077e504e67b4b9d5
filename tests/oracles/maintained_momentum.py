"""FedAvg whose local SGD has momentum that is reset every round, kept at the client, or averaged by the server (FixBN, appendix C.4).

m: SGD's momentum buffer, m <- β m + g, w <- w - η m. It starts at zero if no buffer was kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.equivalence.row import Row, make_clients
from tests.oracles.fedavg import FedAvg, descend, gradient


@dataclass
class Maintained(FedAvg):
    """Hold the buffers that clients keep, and M, the server's."""

    maintain: str = "reset"
    β: float = 0.8
    kept: dict[int, list[Tensor]] = field(default_factory=dict)
    M: list[Tensor] | None = None

    def client(self, k: int) -> nn.Module:
        start = {"reset": None, "local": self.kept.get(k), "global": self.M}[self.maintain]
        self.kept[k] = start or [torch.zeros_like(p) for p in self.w.parameters()]
        return super().client(k)

    def step(self, w_k: nn.Module, k: int, x: Tensor, y: Tensor) -> None:
        self.kept[k] = [self.β * b + g for b, g in zip(self.kept[k], gradient(w_k, x, y), strict=True)]
        descend(w_k, self.kept[k], self.row.rate)

    def server(self, S: list[int], local: list[nn.Module]) -> None:
        super().server(S, local)
        n = {k: self.row.sizes[k] / sum(self.row.sizes[j] for j in S) for k in S}
        self.M = [sum(n[k] * self.kept[k][i] for k in S) for i in range(len(self.kept[S[0]]))]  # type: ignore[misc]


of, KINDS = Maintained.of, ("reset", "local", "global")
FIELDS: dict[str, Any] = {"sgd": {"momentum": 0.8}, "cohorts": [[0, 1]] * 5, "rounds": 5, "epochs": 2, "doors": ("application",)}
ROWS = [
    Row(
        f"maintained momentum: {kind}", of(maintain=kind), {other: of(maintain=other) for other in KINDS if other != kind},
        clients=make_clients(6, 14, 10), local={"maintain": kind}, **FIELDS,
    )
    for kind in KINDS
]  # fmt: skip
