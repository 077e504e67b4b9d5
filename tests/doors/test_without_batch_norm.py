"""A network without BatchNorm: every door says, or refuses, the same before round 1."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fl_bn import convert, local_round, methods, server_state
from fl_bn.flower import OwnAppStrategy
from fl_bn.methods import METHODS, Role
from tests.conformance.cases import every_method
from tests.doors.doors import DOORS, apart, through, wide
from tests.federation import random_samples
from tests.refusals import naming
from tests.test_roles import InPlace


def bare(norm: type[nn.Module] | None = nn.LayerNorm) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)]
    return nn.Sequential(*layers[:2], *([norm(8)] if norm else []), *layers[2:]).double()


DATA = wide([random_samples(n, size=2, seed=n) for n in (5, 9)])


@pytest.mark.parametrize("door", DOORS)
@every_method
def test_a_method_about_statistics_is_refused_and_one_that_is_averaging_says_so(
    method_name: str, door: str, log: pytest.LogCaptureFixture
) -> None:
    """Those say so whose numbers are FedAvg's, but for FedAvg and for methods that change other layers, too."""
    method = METHODS[method_name]()
    if method.has_statistics and method.name != "fedavg":
        with naming(f"method {method_name} is about"):
            through(door, bare(), method, DATA, 1)
        with naming("BatchNorm"):
            local_round(convert(bare(), method), method, server_state(bare(), methods.fedavg(), rounds=1).instruction()).__enter__()
        with naming("BatchNorm"):
            OwnAppStrategy(bare(), method)
        return
    if method_name == "fedwon":  # which takes no network of linear layers
        return
    found = through(door, bare(), method, DATA, 1)
    said = [record.levelname for record in log.records if f"method {method_name} is plain" in record.getMessage()]
    averaged = through(door, bare(), methods.fedavg(), DATA, 1)
    is_averaging = method.shares(Role.WEIGHT) and found[0].keys() == averaged[0].keys() and apart(found, averaged) == 0
    assert said == ["WARNING"] * (is_averaging and method_name not in ("fedavg", "gn-ws", "fixup", "fedfn"))
    log.clear()
    if method_name != "in":  # which is undefined without a spatial extent
        through(door, bare(nn.BatchNorm1d), method, DATA, 1)
    assert "no BatchNorm layer" not in log.text  # control


def test_a_batch_norm_that_is_none_by_type_is_named_with_the_way_to_register_it(log: pytest.LogCaptureFixture) -> None:
    """``tests/loops/test_kinds.py`` registers such layers."""
    network = nn.Sequential(nn.Linear(4, 8), InPlace(8), nn.Linear(8, 2))
    for name in ("fedavg", "fedbn"):
        server_state(network, METHODS[name](), rounds=1)
        assert "1 (InPlace)" in log.text
        assert "fl_bn.register_batch_norm(InPlace, convert=...)" in log.text
        log.clear()
    with naming("register_batch_norm"):
        server_state(network, methods.fbn(), rounds=1)
    server_state(bare(nn.BatchNorm1d), methods.fedavg(), rounds=1)
    assert "register" not in log.text  # control
