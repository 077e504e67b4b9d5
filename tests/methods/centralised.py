"""Compute what FedTAN must equal: one step of plain torch on the union of the batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining
from tests.networks import NETWORKS, SmallCNN

ONE_STEP = LocalTraining(64, steps=1, momentum=0.9, weight_decay=0.01)
RATE = 0.1


def rough(build: Callable[[], nn.Module], seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Build a network without dropout, with random affine parameters and running statistics.

    The affine parameters are normal, so some are negative. The running means are not 0, and the running variances are not 1.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = build()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, _BatchNorm):
                for tensor in (module.weight, module.bias, module.running_mean):
                    if tensor is not None:
                        nn.init.normal_(tensor)
                nn.init.uniform_(module.running_var, 0.5, 2)
    return model.to(dtype)


def rough_network(name: str = "resnet", seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    return rough(NETWORKS.get(name, partial(SmallCNN, dropout=0.0)), seed, dtype)


def batch_of(client: Samples, index: np.ndarray | None = None, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return client.batch(np.arange(len(client)) if index is None else index, torch.zeros((), dtype=dtype))


def make_sgd(model: nn.Module, settings: LocalTraining = ONE_STEP) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=settings.momentum, weight_decay=settings.weight_decay)


def centralised(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Make one step of plain torch on the batch (x, y) with a copy of ``model``; return the copy's floating-point tensors."""
    model = copy.deepcopy(model).train()
    optimizer = make_sgd(model)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return {key: tensor for key, tensor in model.state_dict().items() if tensor.is_floating_point()}
