"""Build small networks whose scales, shifts and running statistics are not those of a new one."""

from __future__ import annotations

import torch
from torch import nn

from tests.equivalence.row import Row


def rough_network(name: str = "resnet", dtype: torch.dtype = torch.float64) -> nn.Module:
    return Row(name, {}, {}, network=name).net().to(dtype)
