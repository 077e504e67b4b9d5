"""Normalisers without batch statistics, as baselines: group, layer and instance normalisation in place of every BatchNorm.

Group Normalization, Wu and He, ECCV 2018; The Non-IID Data Quagmire of Decentralized Machine Learning, Hsieh et al., ICML 2020.

Nothing about statistics is reported; everything is averaged as in FedAvg.
"""

from functools import partial

from fl_bn.layers import InstanceNorm, group_norm
from fl_bn.methods.method import Method


def gn(groups: int = 2) -> Method:
    """``groups`` per layer; 2 as in the FixBN paper, whose layers have as few as 16 channels."""
    if groups < 1:
        raise ValueError(f"gn needs at least 1 group, but got {groups}")
    return Method("gn", layer=partial(group_norm, groups=groups))


def ln() -> Method:
    """Layer normalisation over (C, *): one group."""
    return Method("ln", layer=partial(group_norm, groups=1))


def instance() -> Method:
    """One group per channel; for inputs with a spatial extent only."""
    return Method("in", layer=partial(group_norm, groups=0, kind=InstanceNorm))
