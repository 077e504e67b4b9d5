"""A user's own option of local training: SGD with dampening, whose momentum adds only a part of each gradient.

``test_additions.py`` copies this file.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from fl_bn.app.run_keys import VALUES
from fl_bn.federation.settings import LocalTraining
from fl_bn.options import option, used_with


@dataclass(frozen=True)
class Dampened(LocalTraining):
    dampening: float = option(0.0, "share of a gradient that momentum leaves out", "[0, 1)", used=used_with("optimizer", "sgd"))

    def make_optimizer(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> Optimizer:
        optimizer = super().make_optimizer(parameters, learning_rate)
        for group in optimizer.param_groups if self.dampening else ():
            group["dampening"] = self.dampening
        return optimizer


VALUES[LocalTraining] = Dampened
