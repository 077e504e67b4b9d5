"""The client's half: DSGD's gradients and clipping against their definitions, the learning rate's calendar."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import convert
from fl_bn.federation.gradients import clip, norm_in_round
from fl_bn.methods import METHODS, Phase, Role
from fl_bn.models.head import head_of
from tests.federation import largest_deviation
from tests.local import train
from tests.networks import NETWORKS, seeded_network
from tests.oracles import clipping
from tests.training.core import (
    LocalTraining,
    Samples,
    Schedule,
    average,
    milestones_of,
    roles,
    seeded,
    server_optimizer,
    statistics_pass,
    torch_seed,
)

Clients = Callable[..., list[Samples]]
CPU = torch.device("cpu")
DSGD = LocalTraining(batch_size=4, steps=1, momentum=0.99, weight_decay=0.01, update="gradients")


def test_frozen_training_switches_off_no_dropout(tiny_clients: Clients) -> None:
    (client,) = tiny_clients((8,))
    model = seeded_network("cnn")
    modes: list[list[bool]] = []
    parts = [next(m for m in model.modules() if isinstance(m, kind)) for kind in (nn.Dropout, nn.BatchNorm2d)]
    model.register_forward_hook(lambda *_: modes.append([m.training for m in parts]))
    for phase in (Phase.FROZEN, Phase.TRAIN):
        train(model, client, [np.arange(8)], LocalTraining(8, steps=1), 0.1, METHODS["fixbn"](), phase)
    assert modes == [[True, False], [True, True]]


@pytest.mark.parametrize("method", ["fedavg", "fbn"])
def test_gradients_with_client_momentum_are_dsgd(method: str, tiny_clients: Clients) -> None:
    """Four rounds against a loop by hand: m <- 0.99 m + 0.01 g at the client, w <- w - rate * average(m) at the server."""
    clients, rate, rounds = tiny_clients((3, 7, 5)), 0.5, 4
    server = convert(seeded_network("plain", dtype=torch.float64), METHODS[method]())
    by_hand, plain = copy.deepcopy(server), copy.deepcopy(server)
    optimizer = server_optimizer("fedavg", 1.0)
    momentum: list[dict[str, Tensor]] = [{}, {}, {}]
    heavy = [[torch.zeros_like(p) for p in by_hand.parameters()] for _ in clients]
    for number in range(rounds):
        for i, client in enumerate(clients):
            model, before = copy.deepcopy(server), copy.deepcopy(server)
            plain_gradients = replace(METHODS[method](), centre=False)
            result = train(model, client, [np.arange(len(client))], DSGD, rate, plain_gradients, kept={"momentum": momentum[i] or {}})
            momentum[i] = result.gradients
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))  # the server steps
        mean = average(momentum, [3.0, 7.0, 5.0])
        server.load_state_dict(optimizer.step(server.state_dict(), mean, rate), strict=False)
        steps = [[torch.zeros_like(p) for p in by_hand.parameters()] for _ in range(2)]
        for i, client in enumerate(clients):
            for model, step in ((by_hand, steps[0]), (plain, steps[1])):
                work = copy.deepcopy(model).train()
                x, y = client.batch(np.arange(len(client)), torch.zeros((), dtype=torch.float64))
                gradients = torch.autograd.grad(F.cross_entropy(work(x), y), list(work.parameters()))
                for j, (g, w) in enumerate(zip(gradients, work.parameters(), strict=True)):
                    direction = g + 0.01 * w.detach()
                    if model is by_hand:
                        heavy[i][j] = 0.99 * heavy[i][j] + 0.01 * direction
                        direction = heavy[i][j]
                    step[j] += (3, 7, 5)[i] / 15 * direction
        with torch.no_grad():
            for model, step in ((by_hand, steps[0]), (plain, steps[1])):
                for w, d in zip(model.parameters(), step, strict=True):
                    w -= rate * d
        assert largest_deviation(server.state_dict(), dict(by_hand.named_parameters())) < 1e-12, number
    assert not largest_deviation(server.state_dict(), dict(plain.named_parameters())) < 1e-12  # control: no momentum


@pytest.mark.parametrize(("name", "home"), [("fedbn", Role.AFFINE), ("hbn", Role.MIXING)])
def test_with_gradients_the_client_steps_what_stays_home(name: str, home: Role, tiny_clients: Clients) -> None:
    (client,) = tiny_clients((8,))
    method = METHODS[name]()
    model = convert(seeded_network("plain"), method)
    before, role = copy.deepcopy(model.state_dict()), roles(model)
    result = train(model, client, [np.arange(8)], DSGD, 0.5, method)
    for key, parameter in model.named_parameters():
        want = before[key] - 0.5 * result.gradients[key] if role[key] is home else before[key]
        assert torch.equal(parameter, want), key
        assert torch.equal(parameter, before[key]) == (role[key] is not home)


def test_learning_rate_schedules() -> None:
    assert [Schedule(0.1, "constant", 0.5)(t, 4) for t in range(1, 5)] == [0.1] * 4
    assert [Schedule(1.0, "step", 0.1)(t, 8) for t in range(1, 9)] == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])
    assert [Schedule(1.0, "exponential", 0.5)(t, 4) for t in range(1, 5)] == [1, 0.5, 0.25, 0.125]
    assert [Schedule(1.0, "cosine", 0.5)(t, 4) for t in (1, 3)] == pytest.approx([1, 0.5])
    steps = Schedule(2.0, "milestones", 0.9, milestones_of("0.25:0.5, 0.75:0.1"))
    assert [steps(t, 8) for t in (1, 2, 3, 6, 7, 8)] == pytest.approx([2, 2, 1, 1, 0.2, 0.2])


def test_seeded_depends_on_the_key_alone() -> None:
    draws = {key: seeded(*key).integers(2**62) for key in [(0, 1, 2), (0, 2, 1), (1, 1, 2), (0, 1, 2, 0)]}
    assert seeded(0, 1, 2).integers(2**62) == draws[(0, 1, 2)]
    assert len(set(draws.values())) >= 3


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


def test_a_round_of_more_steps_has_a_smaller_limit_and_one_of_none_that_of_one() -> None:
    assert [norm_in_round(20.0, 0.1, steps, 0.5) for steps in (0, 1, 4)] == pytest.approx([100.0, 100.0, 25.0])


@pytest.mark.parametrize("lower_layers", ["shared", "hybrid"])
def test_a_failing_statistics_pass_restores_modes_and_hooks(lower_layers: str, tiny_clients: Clients) -> None:
    (client,) = tiny_clients((8,))
    method = METHODS["hbn"](lower_layers=lower_layers)
    model = convert(nn.Sequential(seeded_network("cnn"), nn.Linear(5, 2)), method).train()
    with pytest.raises(RuntimeError):
        statistics_pass(model, client, method.statistics_pass, np.random.default_rng(0))
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_torch_seed_leaves_the_global_generator_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.get_rng_state()
    draws = []
    for seed in (1, 1, 2):
        with torch_seed(seed, CPU):
            draws.append(torch.rand(3))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(RuntimeError), torch_seed(1, CPU):
        torch.rand(3).reshape(2)
    assert torch.equal(state, torch.get_rng_state())
    reseeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", reseeded.append)
    with torch_seed(3, CPU):
        assert not reseeded
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
    assert reseeded == [3]  # control: a plain seed touches every accelerator
