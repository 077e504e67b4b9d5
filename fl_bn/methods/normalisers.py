"""Define the baselines without batch statistics: group, layer and instance normalisation instead of BatchNorm.

Group Normalization, Wu and He, ECCV 2018; The Non-IID Data Quagmire of Decentralized Machine Learning, Hsieh
et al., ICML 2020.

No statistics are reported. Everything is averaged as in FedAvg.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fl_bn.bn.layers import InstanceNorm, group_norm
from fl_bn.methods.method import Method
from fl_bn.options import Options, option, takes


@dataclass(frozen=True)
class GNOptions(Options):
    """Hold the options of ``gn``. The default is 2 groups, as in the FixBN paper, whose networks have layers of only 16 channels."""

    name: ClassVar[str] = "gn"
    groups: int = option(2, "groups per layer", ">= 1", key="groups")


@takes(GNOptions)
def gn(options: GNOptions) -> Method:
    """Make the baseline with group normalisation, ``groups`` per layer."""
    return Method("gn", layer=partial(group_norm, groups=options.groups))


def ln() -> Method:
    """Make the baseline with layer normalisation over (C, *), which is one group. It has no options."""
    return Method("ln", layer=partial(group_norm, groups=1))


def instance() -> Method:
    """Make the baseline with instance normalisation, for inputs with a spatial extent. It has no options."""
    return Method("in", layer=partial(group_norm, groups=0, kind=InstanceNorm))
