"""Every method on networks with norm layers in awkward places: what all of them must do."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fl_bn.bn.conversion import convert
from fl_bn.bn.roles import Role, batch_norms, roles
from fl_bn.federation.local import Samples, evaluate, statistics_pass
from fl_bn.methods import METHODS, Method, Phase, Place, StatisticsPass, StatisticsReport
from tests.federation import Federation
from tests.networks import NETWORKS, seeded_network

Clients = Callable[..., list[Samples]]
pytestmark = [pytest.mark.parametrize("network", NETWORKS), pytest.mark.parametrize("name", METHODS)]

ROUNDS = {"fixup": range(1, 11)}  # its head, then the last layers of branches, then slowly the others leave their start


def converted(network: str, name: str) -> tuple[nn.Module, Method]:
    method = METHODS[name]()
    return convert(seeded_network(network), method), method


def test_the_network_is_one_that_a_rule_by_name_would_miss(network: str, name: str) -> None:
    assert not any("bn" in key for key in seeded_network(network).state_dict())
    assert name == METHODS[name]().name


def test_every_tensor_has_a_role_and_the_right_one(network: str, name: str) -> None:
    model, method = converted(network, name)
    role = roles(model)
    assert list(role) == list(model.state_dict())
    norms = [prefix for prefix, module in seeded_network(network).named_modules() if isinstance(module, nn.BatchNorm2d)]
    for key in role:
        assert (role[key] is Role.WEIGHT) == (key.rpartition(".")[0] not in norms)
    assert all(model.state_dict()[key].is_floating_point() for key in role if method.shares(role[key]))


def test_evaluation_changes_no_tensor_and_is_deterministic(network: str, name: str) -> None:
    model, _ = converted(network, name)
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(4, 3, 8, 8)
    model.eval()
    assert torch.equal(model(x), model(x))
    assert all(torch.equal(before[k], model.state_dict()[k]) for k in before)
    model.train()
    model(x)
    moved = [k for k in before if not torch.equal(before[k], model.state_dict()[k])]
    method = METHODS[name]()  # control: in training torch's own layers move, and those whose running statistics are reported
    assert bool(moved) == (method.layer is None or method.local_in is not None or method.report is StatisticsReport.RUNNING)


def test_gradients_are_finite_and_reach_every_parameter(network: str, name: str) -> None:
    model, _ = converted(network, name)
    if name == "fixup":  # starts where whole layers are 0
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.train()(torch.randn(6, 3, 8, 8)).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert name == "in" or parameter.grad.abs().max() > 0, key


def test_two_rounds(network: str, name: str, tiny_clients: Clients) -> None:
    clients = tiny_clients((4, 7, 5))
    model, method = converted(network, name)
    federation = Federation(seeded_network(network), method, clients)
    start = copy.deepcopy(federation.server.state_dict())
    for number in ROUNDS.get(name, (1, 2)):
        for result, client in zip(federation.round(number), clients, strict=True):
            assert np.isfinite(result.loss)
            assert (result.steps, result.samples) == (1, len(client))
            of_batches = method.report in (StatisticsReport.BATCHES, StatisticsReport.FIRST)
            assert set(result.moments) == (set(batch_norms(model)) if of_batches else set())
    after = federation.server.state_dict()
    for key, place in federation.locality.place.items():
        assert after[key].isfinite().all()
        moves = place is Place.SHARED or (place is Place.STATISTIC and method.report is not StatisticsReport.NOTHING)
        assert torch.equal(after[key], start[key]) != moves, key
    for client in clients:
        found = evaluate(federation.server, client)
        assert np.isfinite(found.loss)
        assert 0 <= found["accuracy"] <= 1


def test_a_frozen_round_reports_nothing_and_changes_no_statistic(network: str, name: str, tiny_clients: Clients) -> None:
    federation = Federation(seeded_network(network), METHODS[name](), tiny_clients((4, 7, 5)))
    before = [copy.deepcopy(federation.client(i).state_dict()) for i in range(3)]
    for number in ROUNDS.get(name, (1,)):
        assert all(not result.moments for result in federation.round(number, phase=Phase.FROZEN))
    for i in range(3):
        after = federation.client(i).state_dict()
        for key, role in federation.role.items():
            if role in (Role.STATISTIC, Role.COUNTER):
                assert torch.equal(after[key], before[i][key]), key
            elif role is Role.AFFINE:
                assert not torch.equal(after[key], before[i][key]), key


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
