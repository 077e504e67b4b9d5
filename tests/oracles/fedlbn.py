"""FedLBN: FedBN's Algorithm 1 for the first BatchNorm layer, FBN's Algorithm 2 for the others, one federation of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from tests.equivalence.row import BOTH, Row, make_clients
from tests.oracles.fbn import FBN, merged
from tests.oracles.fedbn import Kept


@dataclass
class FedLBN(FBN, Kept):
    """``layers``: which BatchNorm layers stay at home: those that FBN does not change."""

    layers: slice = field(default_factory=lambda: slice(1))

    def start(self) -> nn.Module:
        net = super().start()
        for name in self.names[self.layers]:
            self.names.remove(name)
            net.get_submodule(name).__class__ = nn.BatchNorm2d
        return net

    def client(self, k: int) -> nn.Module:
        for name in self.names:
            self.nets[k].get_submodule(name).__dict__["seen"] = ()
        return super().client(k)


of = FedLBN.of
FEDLBN: dict[str, Any] = {"method": "fedlbn", "options": {"momentum": 0.1}}
WRONG: dict[str, Any] = {"all layers stay at home": {"method": "fedbn", "options": {}}, "none stays at home": {"method": "fbn"}}
WRONG |= {"the first two": of(layers=slice(2)), "the second": of(layers=slice(1, 2))}
WRONG |= {"variances are averaged": of(rule=partial(merged, spread=0.0))}
ROWS = [
    Row("fedlbn", of(), WRONG, network="resnet", doors=(*BOTH, "flower"), **FEDLBN),
    Row("fedlbn: one batch", of(), WRONG, clients=make_clients(6, 14, 10), slow=("workers",),
        doors=("federation", "vectorised", "application"), **FEDLBN),
]  # fmt: skip
