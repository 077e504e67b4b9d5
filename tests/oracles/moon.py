"""MOON, Algorithm 1 (Li, He, Song, CVPR 2021), transcribed: model-contrastive learning.

S[t]: the parties of round t. R_w(x): the input of the output layer, which is the module named ``head``. z, z_glob and z_prev are R of three
models: the one in training, the one received from the server, and the party's own at the end of the last round in which it took part.
The latter two are in evaluation mode and have no gradient, as in the authors' code (main.py, ``global_model.eval()``,
``old_nets ... net.eval()``). In a party's first round there is no z_prev, so the loss has no contrastive term, as in the authors' code,
whose pool of previous models is then empty.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.equivalence.row import Row
from tests.oracles.fedavg import FedAvg, descend
from tests.oracles.fedprox import SOME


def R(w: nn.Module, x: Tensor, head: str) -> tuple[Tensor, Tensor]:
    """Return ``(z, output)``: the input of the output layer, and the network's output."""
    seen: list[Tensor] = []
    hook = w.get_submodule(head).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    output = w(x)
    hook.remove()
    return seen[0].flatten(1), output


def sim(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of the angle between two vectors."""
    return (a * b).sum() / (a.norm() * b.norm())


def ℓ_con(z: Tensor, z_glob: Tensor, z_prev: Tensor, τ: float) -> Tensor:
    """Return the contrastive loss of equation 3, as a mean over the batch."""
    total = torch.zeros((), dtype=z.dtype)
    for b in range(len(z)):
        near = torch.exp(sim(z[b], z_glob[b]) / τ)
        far = torch.exp(sim(z[b], z_prev[b]) / τ)
        total = total - torch.log(near / (near + far))
    return total / len(z)


@dataclass
class Moon(FedAvg):
    """``head``: the output layer. ``fixed``: the fixed models are in training mode, as a control."""

    μ: float = 2.0
    τ: float = 0.5
    head: str = "head"
    fixed: bool = False
    previous: dict[int, nn.Module] = field(default_factory=dict)

    def step(self, w_i: nn.Module, i: int, x: Tensor, y: Tensor) -> None:
        z, output = R(w_i, x, self.head)
        loss = nn.functional.cross_entropy(output, y)  # ℓ_sup
        if i in self.previous:
            with torch.no_grad():
                z_glob, z_prev = (R(copy.deepcopy(w).train(self.fixed), x, self.head)[0] for w in (self.w, self.previous[i]))
            loss = loss + self.μ * ℓ_con(z, z_glob, z_prev, self.τ)
        w_i.zero_grad()
        loss.backward()
        descend(w_i, [p.grad for p in w_i.parameters()], self.row.rate)

    def server(self, S: list[int], local: list[nn.Module]) -> None:
        self.previous |= {i: copy.deepcopy(w_i) for i, w_i in zip(S, local, strict=True)}
        super().server(S, local)


of = Moon.of
WRONG = {"another layer's representation": of(head="body.1"), "half of mu": of(μ=1.0), "another temperature": of(τ=1.0)}
WRONG |= {"fixed models in training mode": of(fixed=True), "no term": of(μ=0.0)}
ROWS = [Row("moon: Algorithm 1", of(), WRONG, objective=("moon", {"mu": 2.0, "temperature": 0.5}), **SOME)]
