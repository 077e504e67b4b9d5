"""A user's own server optimiser: SGD whose options are a learning rate (``share``) and a momentum.

``tests/experiment/test_options.py`` copies this file into a package.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch.optim import SGD

from fl_bn.federation.optimizers import SERVER_OPTIMIZERS, ServerOptimizer
from fl_bn.options import Options, option, takes


@dataclass(frozen=True)
class HalfwayOptions(Options):
    name: ClassVar[str] = "halfway"
    share: float = option(0.5, "share of the way to the clients' average", "(0, 1]")
    momentum: float = option(0.0, "momentum", "[0, 1)")


@takes(HalfwayOptions)
def halfway(options: HalfwayOptions) -> ServerOptimizer:
    return ServerOptimizer(lambda parameters: SGD(parameters, lr=options.share, momentum=options.momentum))


SERVER_OPTIMIZERS["halfway"] = halfway
