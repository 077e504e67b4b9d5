"""Define FedSAM: each local step uses the gradient at a nearby point of high loss.

Generalized Federated Learning via Sharpness Aware Minimization, Qu, Li, Duan, Liu,
Tang, Lu, ICML 2022, Algorithm 1. It is also in Improving Generalization in
Federated Learning by Seeking Flat Minima, Caldarola, Caputo, Ciccone, ECCV 2022.

A step makes two passes, at the weights and at the nearby point, with the same
dropout masks. Only the first updates or reports statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fl_bn.objectives.objective import Objective, Round, Start, Step
from fl_bn.options import option


class _Sharpness(Round):
    def __init__(self, trained: list[nn.Parameter], rho: float) -> None:
        self.trained, self.rho = trained, rho

    def gradient(self, step: Step) -> Tensor:
        loss = step.forward()
        loss.backward()
        parameters = [p for p in self.trained if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        with torch.no_grad():
            before = [p.detach().clone() for p in parameters]
            norm = torch.stack([g.norm() for g in gradients]).norm()
            for p, g in zip(parameters, gradients, strict=True):
                p.add_(g * (self.rho / (norm + 1e-12)))
                p.grad = None
        step.again().backward()
        with torch.no_grad():
            for p, w in zip(parameters, before, strict=True):
                p.copy_(w)
        return loss


@dataclass(frozen=True)
class FedSAM(Objective):
    """Compute gradients after FedSAM's ascent step, of Euclidean length ``rho`` in all."""

    rho: float = option(0.05, "radius of the ascent step (rho in the paper); 0: off", ">= 0")
    name: ClassVar[str] = "fedsam"
    switch: ClassVar[str] = "rho"
    repeats: ClassVar[bool] = True

    def begin(self, start: Start) -> Round:
        """Begin a round with two passes per step."""
        return _Sharpness(list(start.trained.values()), self.rho)
