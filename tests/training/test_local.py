"""The client's half: what training reports, DSGD's gradients, and what must leave no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn.conversion import convert
from fl_bn.data.batches import draw_batches
from fl_bn.federation.aggregation import average
from fl_bn.federation.local import Samples, evaluate, statistics_pass, torch_seed
from fl_bn.federation.optimizers import server_optimizer
from fl_bn.federation.settings import LocalTraining, seeded
from fl_bn.methods import METHODS, Phase
from fl_bn.roles import Role, roles
from tests.federation import largest_deviation
from tests.local import train
from tests.networks import seeded_network

Clients = Callable[..., list[Samples]]
CPU = torch.device("cpu")
DSGD = LocalTraining(batch_size=4, steps=1, momentum=0.99, weight_decay=0.01, update="gradients")


def test_training_is_torchs_own_loop(tiny_clients: Clients) -> None:
    (client,) = tiny_clients((11,))
    settings = LocalTraining(4, epochs=2, momentum=0.9, weight_decay=0.01)
    batches = list(draw_batches(11, 4, seeded(0), epochs=2))
    model, by_hand = (seeded_network("plain") for _ in range(2))
    result = train(model, client, batches, settings, 0.1, METHODS["fedavg"]())
    optimizer, total = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01), 0.0
    for index in batches:
        loss = F.cross_entropy(by_hand((client.x[index].float() / 255 - 0.5) / 0.5), client.y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * len(index)
    assert largest_deviation(model.state_dict(), by_hand.state_dict()) == 0
    assert (result.steps, result.samples, result.moments, result.gradients) == (6, 11, {}, {})
    assert result.loss == pytest.approx(total / 22, rel=1e-6)
    other = seeded_network("plain")
    train(other, client, batches[:-1], settings, 0.1, METHODS["fedavg"]())
    assert largest_deviation(other.state_dict(), by_hand.state_dict()) > 0


def test_samples_are_counted_once_and_no_batch_is_no_sample(tiny_clients: Clients) -> None:
    (client,) = tiny_clients((11,))
    settings = LocalTraining(4, steps=3)
    one = np.arange(4)
    assert train(seeded_network("plain"), client, [one, one, one + 2], settings, 0.1, METHODS["fedavg"]()).samples == 6
    model = seeded_network("plain")
    nothing = train(model, client, [], settings, 0.1, METHODS["fbn"]())
    assert (nothing.samples, nothing.steps, nothing.loss, nothing.moments) == (0, 0, 0.0, {})
    assert largest_deviation(model.state_dict(), seeded_network("plain").state_dict()) == 0


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


def test_parameters_that_do_not_require_gradients_stay(tiny_clients: Clients) -> None:
    (client,) = tiny_clients((8,))
    model = seeded_network("plain")
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    assert "0.weight" not in train(model, client, [np.arange(8)], DSGD, 0.5, METHODS["fedavg"]()).gradients
    train(model, client, [np.arange(8)], LocalTraining(8, steps=1, weight_decay=0.1), 0.5, METHODS["fedavg"]())
    assert torch.equal(model[0].weight, before)


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


def test_the_same_seed_gives_the_same_bits(tiny_clients: Clients) -> None:
    (client,) = tiny_clients((16,))

    def trained(batches: int, dropout: int) -> dict[str, Tensor]:
        model = seeded_network("cnn")
        with torch_seed(dropout, CPU):
            drawn = draw_batches(16, 4, seeded(batches), epochs=2)
            train(model, client, drawn, LocalTraining(4, epochs=2, momentum=0.9), 0.1, METHODS["fedavg"]())
        return model.state_dict()

    want = trained(0, 0)
    torch.rand(5)  # whatever happens in between
    assert largest_deviation(trained(0, 0), want) == 0
    assert largest_deviation(trained(0, 1), want) > 0
    assert largest_deviation(trained(1, 0), want) > 0


def test_evaluation_is_the_mean_over_samples_whatever_the_batches(tiny_clients: Clients) -> None:
    (client,) = tiny_clients((11,))
    model = seeded_network("cnn", dtype=torch.float64)
    whole, pieces = evaluate(model, client), evaluate(model, client, batch_size=4)
    assert (pieces.loss, pieces["accuracy"]) == (pytest.approx(whole.loss, rel=1e-12), whole["accuracy"])
    x, y = client.batch(np.arange(11), torch.zeros((), dtype=torch.float64))
    with torch.no_grad():
        out = model.eval()(x)
    assert whole.loss == pytest.approx(float(F.cross_entropy(out, y)), rel=1e-12)
    assert whole["accuracy"] == float((out.argmax(1) == y).double().mean())
