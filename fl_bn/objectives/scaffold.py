"""Define SCAFFOLD: control variates correct the drift of the clients.

SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, Karimireddy, Kale,
Mohri, Reddi, Stich, Suresh, ICML 2020, Algorithm 1.

Each client has a control variate c_i that never leaves it. The server sends c, and
clients send the change of c_i, as section ``control``. If a message is lost, the
next one includes its change. So c stays the mean of all c_i. Statistics have no
gradient, so they are not corrected.

Symbols: x -> anchors, y_i -> the trained parameters, c -> received, c_i -> own, K
-> steps, eta_l -> learning_rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fl_bn.objectives.objective import Finish, Objective, Round, Start, Step
from fl_bn.options import option

OWN, KNOWN = "", "known/"  # prefixes of the kept tensors: the client's c_i, and the c_i that the server's c already contains


class _Controlled(Round):
    def __init__(self, start: Start, strength: float) -> None:
        self.trained, self.strength = start.trained, strength
        self.anchors = start.anchors()
        self.server = {name: start.received[name].to(p) for name, p in start.trained.items() if name in start.shared}
        self.own = self._kept(start, OWN)
        self.known = self.own if start.counted else self._kept(start, KNOWN)
        self.kept = start.kept
        self.correction = {name: (c - self.own[name]) * strength for name, c in self.server.items()}

    def _kept(self, start: Start, which: str) -> dict[str, Tensor]:
        return {k: start.kept[which + k].to(c) if which + k in start.kept else torch.zeros_like(c) for k, c in self.server.items()}

    def gradient(self, step: Step) -> Tensor:
        loss = super().gradient(step)
        for name, correction in self.correction.items():
            p = self.trained[name]
            p.grad = correction.clone() if p.grad is None else p.grad.add_(correction)
        return loss

    def finish(self, steps: int, learning_rate: float) -> Finish:
        with torch.no_grad():
            new = {name: self._own(name, steps, learning_rate) for name in self.own}
        keep = {OWN + name: c for name, c in new.items()} | {KNOWN + name: c for name, c in self.known.items()}
        return Finish({**self.kept, **keep}, {name: new[name] - known for name, known in self.known.items()})

    def _own(self, name: str, steps: int, learning_rate: float) -> Tensor:
        """Compute a client's new control variate for a parameter (c_i+, line 12)."""
        moved = (self.anchors[name] - self.trained[name].detach()) / (steps * learning_rate)
        return moved - self.correction[name] if learning_rate else self.own[name]  # at rate 0, nothing moved: no gradient is known


@dataclass(frozen=True)
class Scaffold(Objective):
    """Correct gradients by SCAFFOLD's control variates.

    A client's is the mean gradient of its local steps: option II in line 12.
    ``strength`` multiplies the correction, 1 in the paper.
    """

    strength: float = option(1.0, "strength of the correction; 0: off", ">= 0", hidden=True)
    name: ClassVar[str] = "scaffold"
    switch: ClassVar[str] = "strength"
    travels: ClassVar[bool] = True
    anchored: ClassVar[bool] = True
    corrects: ClassVar[bool] = True

    def begin(self, start: Start) -> Round:
        """Begin a round with corrected gradients."""
        return _Controlled(start, self.strength)
