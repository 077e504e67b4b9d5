"""A client's own network in a loop of one's own: the server's tensors and what the client keeps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import client_model, convert, local_round, methods, server_round, server_state
from fl_bn.federation.values import ClientState
from fl_bn.objectives import PLAIN, Objective, Scaffold


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def data(client: int) -> tuple[Tensor, Tensor]:
    return torch.randn(12, 4, generator=torch.Generator().manual_seed(client)) + client, torch.arange(12) % 2


@pytest.mark.parametrize("objective", [PLAIN, Scaffold()], ids=["plain", "scaffold"])
@pytest.mark.parametrize("method", ["fedavg", "fedbn", "silobn", "fbn", "fixbn"])
def test_it_is_the_network_with_which_the_client_would_begin_its_next_round(method: str, objective: Objective) -> None:
    made = methods.METHODS[method]()
    state, kept = server_state(net(), made, rounds=3, clients=2, objective=objective), dict[int, ClientState]()
    for _ in range(2):
        instruction, replies = state.instruction(), []
        for client in range(2):
            x, y = data(client)
            before = [kept[client]] if client in kept else []
            with local_round(convert(net(), made), made, instruction, *before, objective=objective) as round:
                optimizer = torch.optim.SGD(round.model.parameters(), lr=0.1)
                round.backward(lambda model=round.model, x=x, y=y: F.cross_entropy(model(x), y), x)
                optimizer.step()
            reply, kept[client] = round.reply(samples=12, client=client)
            replies.append(reply)
        state, _ = server_round(state, replies)
    instruction, given = state.instruction(), net()
    before = copy.deepcopy(given.state_dict())
    models = [client_model(given, made, instruction, kept[client]) for client in range(2)]
    with local_round(convert(net(), made), made, instruction, kept[1], objective=objective) as round:
        expected = copy.deepcopy(round.model.state_dict())
        optimizer = torch.optim.SGD(round.model.parameters(), lr=0.1)
        round.backward(lambda: F.cross_entropy(round.model(data(1)[0]), data(1)[1]), data(1)[0])
        optimizer.step()
    assert not models[1].training
    assert all(torch.equal(tensor, expected[name]) for name, tensor in models[1].state_dict().items())
    differ = any(not torch.equal(tensor, expected[name]) for name, tensor in models[0].state_dict().items())
    assert differ == (method in ("fedbn", "silobn"))  # control: where clients keep nothing, all have one network
    assert all(torch.equal(tensor, before[name]) for name, tensor in given.state_dict().items())


def test_a_client_before_its_first_round_has_the_server_s_start() -> None:
    trained = net()
    trained[1].running_mean.fill_(3)  # type: ignore[operator,union-attr]
    made = methods.fedbn()
    fresh = client_model(net(), made, server_state(trained, made, rounds=1).instruction())
    assert float(fresh[1].running_mean.mean()) == 3  # type: ignore[index]
    with pytest.raises(ValueError, match="Give the server's network, converted for its method"):
        client_model(net(), methods.fedavg(), server_state(trained, made, rounds=1).instruction())
