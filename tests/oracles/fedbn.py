# ruff: noqa: N803, N806 (the names of the paper)
"""FedBN, Algorithm 1 (Li et al., ICLR 2021), transcribed: K users, L layers, E local updates between averagings.

The algorithm says "layer l is BatchNorm" in words. Here the caller gives a list of the names of these layers.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.oracles.fedavg import Client, sgd


def algorithm_1(net: nn.Module, bn: list[str], T: int, E: int, users: list[Client], η: float) -> list[nn.Module]:
    """Make T updates; return every user's network. The t-th batch of user k is ``users[k][(t - 1) % E]``."""
    K = len(users)
    nets = [copy.deepcopy(net).train() for _ in range(K)]
    for t in range(1, T + 1):
        for k in range(K):  # for each user k and each layer l: w <- SGD(w)
            x, y = users[k][(t - 1) % E]
            sgd(nets[k], x, y, η)
        if t % E == 0:
            for layer in dict(nets[0].named_modules()):
                if layer in bn:
                    continue
                own = dict(nets[0].get_submodule(layer).named_parameters(recurse=False))
                for name in own:
                    total = torch.zeros_like(own[name])
                    for k in range(K):
                        total = total + getattr(nets[k].get_submodule(layer), name).detach() / K
                    for k in range(K):
                        getattr(nets[k].get_submodule(layer), name).data.copy_(total)
    return nets
