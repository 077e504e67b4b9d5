"""Gradient clipping against its definitions, transcribed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fl_bn.federation.clipping import clip
from fl_bn.models.head import head_of
from tests.networks import NETWORKS, seeded_network
from tests.oracles import clipping

Arrays = list[np.ndarray]


def clipped(network: str, how: str, limit: float) -> tuple[nn.Module, Arrays, Arrays]:
    """The network, its gradients before, and after."""
    model = seeded_network(network, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model(torch.randn(6, 3, 8, 8, dtype=torch.float64)).square().mean().backward()
    before = [p.grad.numpy().copy() for p in model.parameters()]
    head = head_of(model)
    assert head is not None
    clip(model.parameters(), how, limit, head[1].parameters())
    return model, before, [p.grad.numpy().copy() for p in model.parameters()]


def off(a: Arrays, b: Arrays) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("network", NETWORKS)
def test_by_norm_and_by_value(network: str) -> None:
    rules = {"norm": clipping.by_norm, "value": clipping.by_value}
    for how, rule in rules.items():
        _, before, after = clipped(network, how, 0.01)
        assert off(after, rule(before, 0.01)) < 1e-6 * 0.01 / 1e-3  # torch adds 1e-6 to the norm
        for other, wrong in rules.items():
            assert other == how or not off(after, wrong(before, 0.01)) < 1e-5
        _, before, after = clipped(network, how, 1e6)
        assert off(after, before) == 0


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("limit", [1e-3, 0.02])
def test_adaptive(network: str, limit: float) -> None:
    model, before, after = clipped(network, "adaptive", limit)
    weights = [p.detach().numpy() for p in model.parameters()]
    want = clipping.agc(weights, before, limit)
    assert off(after[:-2], want[:-2]) < 1e-15
    assert off(after[-2:], before[-2:]) == 0  # the head, which the paper leaves alone
    assert off(want[-2:], before[-2:]) > 1e-6
    assert off(after[:-2], before[:-2]) > 1e-6
    whole = [clipping.agc([w.ravel()], [g.ravel()], limit)[0].reshape(g.shape) for w, g in zip(weights, before, strict=True)]
    assert not off(after[:-2], whole[:-2]) < 1e-9  # control: a layer as one unit
