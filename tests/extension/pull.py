"""A user's own local objective: FedProx written by hand.

``tests/experiment/test_options.py`` copies this file into a package.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fl_bn.objectives import OBJECTIVES, Objective, Round, Start, Step
from fl_bn.options import option


class Pulled(Round):
    def __init__(self, start: Start, strength: float) -> None:
        self.start, self.anchors, self.strength = start, start.anchors(), strength

    @torch.no_grad()
    def gradient(self, step: Step) -> Tensor:
        with torch.enable_grad():
            loss = super().gradient(step)
        for name, anchor in self.anchors.items():
            p = self.start.trained[name]
            pull = self.strength * (p - anchor)
            p.grad = pull if p.grad is None else p.grad + pull
        return loss


@dataclass(frozen=True)
class Pull(Objective):
    name: ClassVar[str] = "pull"
    anchored: ClassVar[bool] = True
    strength: float = option(0.1, "of the pull towards the received weights; 0: off", ">= 0")
    kind: str = option("linear", "how the pull grows with the distance", ("linear",))

    def begin(self, start: Start) -> Round:
        return Pulled(start, self.strength)

    @property
    def on(self) -> bool:
        return self.strength > 0


OBJECTIVES["pull"] = Pull
