"""Networks without dropout: as in evaluation there, while BatchNorm and everything else train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fl_bn.models.dropout import without_dropout
from tests.networks import seeded_network


def test_its_dropout_layers_leave_everything_as_it_is() -> None:
    x = torch.randn(4, 3, 8, 8)
    plain, cut = (seeded_network("cnn").train() for _ in range(2))
    assert torch.equal(without_dropout(cut)(x), seeded_network("plain").train()(x))
    assert not torch.equal(plain(x), seeded_network("plain").train()(x))  # control: with dropout
    assert cut.state_dict().keys() == plain.state_dict().keys()


def test_a_network_without_dropout_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="dropout=false is for networks with dropout layers, but Sequential has none"):
        without_dropout(nn.Sequential(nn.Linear(2, 2)))
