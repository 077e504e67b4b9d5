"""FedBN, Algorithm 1 (Li et al., ICLR 2021), transcribed: clients keep some tensors, and the server averages the others.

The algorithm says "layer l is BatchNorm" in words; here that is the layer's type. User k has the weight n_k / sum n; the paper's is 1 / K.
SiloBN (Andreux et al., DCL 2020) is the same for the running statistics alone, and a client that trains alone keeps everything.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from tests.equivalence.row import BITS, Row, make_clients
from tests.oracles.fedavg import FedAvg, by_client


@dataclass
class Kept(FedAvg):
    """``home(name, layer)`` tells whether a layer's tensors stay at home, or its tensors of this name."""

    home: Callable[[str, nn.Module], bool] = lambda name, layer: isinstance(layer, nn.BatchNorm2d)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.own = [name for name in self.w.state_dict() if self.home(name, self.w.get_submodule(name.rpartition(".")[0]))]
        self.nets = [copy.deepcopy(self.w).train() for _ in self.row.clients]

    def sent(self, k: int) -> nn.Module:
        """Return user k's network with what the server sends."""
        self.nets[k].load_state_dict({name: t for name, t in self.w.state_dict().items() if name not in self.own}, strict=False)
        return self.nets[k]

    def client(self, k: int) -> nn.Module:
        net = self.sent(k)
        for x, y in self.row.steps[k]:
            self.step(net, k, x, y)
        return net

    def run(self) -> dict[str, Tensor]:
        super().run()
        shared = {name: t for name, t in self.w.state_dict().items() if name not in self.own}
        return {**by_client([self.sent(k) for k in range(len(self.nets))]), **shared}


of = Kept.of
silobn, alone = of(home=lambda name, layer: "running" in name), of(home=lambda name, layer: True)
SPELLING = of(home=lambda name, layer: isinstance(layer, nn.BatchNorm2d) and "bn" in name)
EQUALLY = {"n_k": [1, 1, 1]}
WRONG = {"BatchNorm is what has bn in its name": SPELLING, "users of equal weight": of(**EQUALLY)}
ROWS = [
    Row("fedbn: Algorithm 1", of(), WRONG | {"scale and shift are shared": silobn}, "fedbn", network="resnet"),
    Row("fedbn: Algorithm 1, users of equal weight", of(**EQUALLY), {"by samples": of()}, "fedbn", network="resnet", uniform=True,
        doors=("own loop",), only=("head", "first")),
    Row("silobn", silobn, {"scale and shift stay at home": of()}, "silobn", network="resnet"),
    Row("single", alone, {"fedbn": {"method": "fedbn"}}, "single", only=("/",)),
    Row("fedbn: with equal clients it is fedavg, bit for bit", {"method": "fedavg"},
        {"other clients": {"clients": make_clients(8, 8, 8, 8, pieces=2)}}, "fedbn", clients=make_clients(8, pieces=2) * 4,
        only=("0/", "3/"), tolerance=BITS),
]  # fmt: skip
