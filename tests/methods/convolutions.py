"""List convolutions of every kind that methods without batch statistics replace, each with the shape of an input."""

from __future__ import annotations

import pytest
from torch import nn

CONVOLUTIONS = [
    pytest.param(nn.Conv1d(3, 4, 3), (2, 3, 8), id="1d"),
    pytest.param(nn.Conv2d(3, 4, 3, stride=2, padding=1, padding_mode="reflect"), (2, 3, 8, 8), id="2d"),
    pytest.param(nn.Conv2d(4, 4, 3, groups=4, bias=False), (2, 4, 8, 8), id="depthwise"),
    pytest.param(nn.Conv3d(3, 4, 3), (2, 3, 8, 8, 8), id="3d"),
]
