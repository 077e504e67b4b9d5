"""Define FedProx: a client's weights are pulled towards those that it received.

Federated Optimization in Heterogeneous Networks, Li, Sahu, Zaheer, Sanjabi,
Talwalkar, Smith, MLSys 2020, Algorithm 2, equation 2.

Symbols: w^t -> anchors, mu -> mu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fl_bn.objectives.objective import Objective, Round, Start, Step
from fl_bn.options import option


def proximal_term(weights: Sequence[Tensor], anchors: Sequence[Tensor], mu: float) -> Tensor:
    """Compute ``mu / 2 * sum ||w - w^t||^2``, a scalar."""
    return mu / 2 * torch.stack([(w - a).square().sum() for w, a in zip(weights, anchors, strict=True)]).sum()


class _Proximal(Round):
    def __init__(self, start: Start, mu: float) -> None:
        anchors = start.anchors()
        self.mu, self.anchors, self.weights = mu, list(anchors.values()), [start.trained[name] for name in anchors]

    def gradient(self, step: Step) -> Tensor:
        loss = step.forward()
        (loss + proximal_term(self.weights, self.anchors, self.mu) if self.weights else loss).backward()
        return loss


@dataclass(frozen=True)
class FedProx(Objective):
    """Add FedProx's proximal term, over trained shared weights, to the loss."""

    mu: float = option(0.01, "strength of mu/2 times the squared distance from the received weights (mu in the paper); 0: off", ">= 0")
    name: ClassVar[str] = "fedprox"
    switch: ClassVar[str] = "mu"
    anchored: ClassVar[bool] = True

    def begin(self, start: Start) -> Round:
        """Begin a round with the proximal term."""
        return _Proximal(start, self.mu)
