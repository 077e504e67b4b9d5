"""FedAvg with BatchNorm, transcribed: plain SGD; all tensors but integer counters are averaged with weights n_k / n.

Other papers' algorithms derive from ``FedAvg``, and say what differs: a local step, a client's part of a round, or the server's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.equivalence.row import BOTH, Row, make_clients

State = dict[str, Tensor]


def gradient(net: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Return the gradient of the batch's mean loss, in the order of ``net.parameters()``; 0 for what the loss does not reach."""
    net.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    return [torch.zeros_like(w) if w.grad is None else w.grad.clone() for w in net.parameters()]


def descend(net: nn.Module, g: Sequence[Tensor], η: float) -> None:
    """Step once: w <- w - η g."""
    with torch.no_grad():
        for w, g_w in zip(net.parameters(), g, strict=True):
            w -= η * g_w


def averaged(net: nn.Module, local: Sequence[State], n_k: Sequence[float]) -> None:
    """Average the clients' tensors into ``net``, as the server does: w <- sum n_k / n * w_k, for all floating-point tensors."""
    n = sum(n_k)
    state = net.state_dict()
    for key in state:
        if state[key].is_floating_point():
            total = torch.zeros_like(state[key])
            for k in range(len(local)):
                total = total + n_k[k] / n * local[k][key]
            state[key].copy_(total)


@dataclass
class FedAvg:
    """Run a row's rounds. w: the server's network; t: the number of the round; S: its clients.

    ``n_k``: the clients' weights; empty: their numbers of samples.
    """

    row: Row
    n_k: Sequence[float] = ()
    t: int = 0

    def __post_init__(self) -> None:
        self.w = self.start()

    @classmethod
    def of(cls, **options: Any) -> Callable[[Row], Any]:
        """Return the algorithm with these options as a reference or a wrong rule of a row."""
        return lambda row: cls(row, **options).run()

    def start(self) -> nn.Module:
        return self.row.net()

    def step(self, w_k: nn.Module, k: int, x: Tensor, y: Tensor) -> None:
        descend(w_k, gradient(w_k, x, y), self.row.rate)

    def client(self, k: int) -> nn.Module:
        """Return client k's network after its local steps of a round."""
        torch.manual_seed(1000 * self.t + k)  # of dropout
        w_k = copy.deepcopy(self.w).train()
        for x, y in self.row.steps[k]:
            self.step(w_k, k, x, y)
        return w_k

    def server(self, S: list[int], local: list[nn.Module]) -> None:
        n_k = self.n_k or self.row.sizes
        averaged(self.w, [w_k.state_dict() for w_k in local], [n_k[k] for k in S])

    def run(self) -> Any:
        for S in self.row.schedule:
            self.t += 1
            self.server(S, [self.client(k) for k in S])
        return self.w


of = FedAvg.of


def by_client(nets: Sequence[nn.Module]) -> State:
    return {f"{k}/{name}": t for k, net in enumerate(nets) for name, t in net.state_dict().items()}


EQUAL = {"equal weights": of(n_k=[1, 1, 1])}
WRONG = EQUAL | {"statistics stay at clients": {"method": "silobn"}, "one round less": {"rounds": 2}}
ROWS = [
    Row("fedavg", of(), WRONG, network="resnet", rounds=3, doors=(*BOTH, "flower", "channels last")),
    Row("fedavg: batches of all samples", of(), EQUAL, clients=make_clients(6, 14, 10), epochs=2, doors=("application",)),
]
