"""Max pooling without gradients: the same bits in the same layout, and nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_bn.federation.pooling import quick_pooling

SHAPES = ((4, 16, 32, 32), (3, 5, 7, 9), (2, 1, 8, 8), (5, 24, 4, 4))
SETTINGS: list[dict[str, Any]] = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 2, "dilation": 2},
]


def awkward(shape: tuple[int, ...]) -> Tensor:
    """With many ties, both zeros, and values that are not finite."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=draw).round(decimals=1)
    x[torch.rand(shape, generator=draw) < 0.2] = -0.0
    x.view(-1)[:3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    return x


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_same_bits_in_the_same_layout(shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    pool, x = nn.MaxPool2d(**settings), awkward(shape)
    expected = pool(x)
    with torch.no_grad(), quick_pooling(pool):
        found = pool(x)
    assert found.stride() == expected.stride()
    assert pool.forward.__func__ is nn.MaxPool2d.forward  # nothing is left behind
    assert torch.equal(bits(found), bits(expected))
