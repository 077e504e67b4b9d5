"""Every method on networks with norm layers in awkward places: what all of them must do."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fl_bn.bn.conversion import convert
from fl_bn.bn.roles import batch_norms
from fl_bn.federation.local import Samples, statistics_pass
from fl_bn.methods import METHODS, Method, StatisticsPass
from tests.networks import NETWORKS, seeded_network

Clients = Callable[..., list[Samples]]
pytestmark = [pytest.mark.parametrize("network", NETWORKS), pytest.mark.parametrize("name", METHODS)]

def converted(network: str, name: str) -> tuple[nn.Module, Method]:
    method = METHODS[name]()
    return convert(seeded_network(network), method), method


@pytest.mark.sample(3)
def test_the_statistics_pass_measures_every_batch_norm_and_changes_nothing(network: str, name: str, tiny_clients: Clients) -> None:
    (client,) = tiny_clients((9,))
    model, method = converted(network, name)
    model.train()
    model.get_submodule("head" if network == "resnet" else "9").eval()  # a mode of its own
    before, modes, state = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()], torch.get_rng_state()
    for how in (method.statistics_pass, StatisticsPass(lower_layers="hybrid")):  # dropout is off in either
        found = statistics_pass(model, client, how, np.random.default_rng(0), batch_size=4)
        assert set(found) == set(batch_norms(model))
        assert all(part.count % 9 == 0 for part in found.values())
    assert all(torch.equal(before[k], model.state_dict()[k]) for k in before)
    assert modes == [m.training for m in model.modules()]
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module._forward_pre_hooks for module in model.modules())
    model(torch.randn(4, 3, 8, 8))
    assert not torch.equal(state, torch.get_rng_state())  # control: a training pass draws dropout
