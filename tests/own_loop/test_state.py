"""The server's state and a client's network in a loop of one's own: pickled, taken up again, and refused where they do not fit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import client_model, convert, local_round, methods, server_round, server_state
from fl_bn.methods import METHODS, attacked
from fl_bn.objectives import PLAIN, FedProx, Objective, Scaffold
from fl_bn.robust.attacks import ATTACKS
from tests.conformance.cases import every_method
from tests.doors.doors import apart, own_loop
from tests.doors.inner import SERVER_OPTIMIZERS
from tests.listed import listed
from tests.refusals import naming

FEDAVG = methods.fedavg()


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).double()


def data(client: int, n: int = 12) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(client)
    return torch.randn(n, 1, 4, 4, generator=made, dtype=torch.float64) + client, torch.arange(n) % 2


def pickled(state: Any) -> Any:
    return pickle.loads(pickle.dumps(state))


@listed("name", SERVER_OPTIMIZERS)
def test_a_server_s_optimizer_goes_on_from_a_pickle_bit_for_bit(name: str) -> None:
    """As the state of every method does in tests/conformance."""

    def forgetful(state: Any) -> Any:
        state.optimizer = SERVER_OPTIMIZERS[name]()
        return state

    def ends(between: Callable[[Any], Any]) -> list[dict[str, Tensor]]:
        clients = [[data(0, 6)], [data(1, 4)]]
        return own_loop(net(), FEDAVG, clients, 3, between=between, optimizer=SERVER_OPTIMIZERS[name]())

    want, found, forgotten = map(ends, (lambda state: state, pickled, forgetful))
    assert apart(found, want) == 0
    assert (apart(forgotten, want) > 0) is (name != "fedavg")  # control: FedAvg alone has no buffers


def falling(round: int, rounds: int) -> float:
    return 0.1 / round


@listed("objective", [Scaffold(), FedProx(0.1)])
def test_a_rate_of_a_module_and_an_objective_are_pickled_with_the_state(objective: Objective) -> None:
    """As docs/how-to/loop.md says. Python itself pickles no lambda."""
    state = server_state(net(), FEDAVG, rounds=3, rate=falling, objective=objective)
    found, want = pickled(state).instruction(), state.instruction()
    assert found.learning_rate == want.learning_rate == 0.1
    assert found.sections.keys() == want.sections.keys()
    assert all(
        torch.equal(found.sections[section][name], tensor) for section in want.sections for name, tensor in want.sections[section].items()
    )
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickled(server_state(net(), methods.fbn(), rounds=3, rate=lambda round, rounds: 0.1))


def test_a_method_under_attack_can_be_pickled() -> None:
    for attack in ATTACKS:
        assert pickled(attacked(FEDAVG, attack, 1)).adversary.f == 1


def trained(round: Any, client: int) -> None:
    x, y = data(client)
    optimizer = torch.optim.SGD(round.model.parameters(), lr=0.1)
    round.backward(lambda: F.cross_entropy(round.model(x), y), x)
    optimizer.step()


@pytest.mark.parametrize("objective", [PLAIN, Scaffold()], ids=["plain", "scaffold"])
@every_method
def test_a_client_s_network_is_that_with_which_it_would_begin_its_next_round(method_name: str, objective: Objective) -> None:
    made = METHODS[method_name]()
    if made.exchanges or made.measures_first or method_name in ("single", "fedwon"):  # whose rounds take more, or less, than a loop
        return
    state, kept = server_state(net(), made, rounds=3, clients=2, objective=objective), dict[int, Any]()
    for _ in range(2):
        instruction, replies = state.instruction(), []
        for client in range(2):
            before = [kept[client]] if client in kept else []
            with local_round(convert(net(), made), made, instruction, *before, objective=objective) as round:
                trained(round, client)
            reply, kept[client] = round.reply(samples=12, client=client)
            replies.append(reply)
        state, _ = server_round(state, replies)
    instruction, given = state.instruction(), net()
    before = copy.deepcopy(given.state_dict())
    models = [client_model(given, made, instruction, kept[client]) for client in range(2)]
    with local_round(convert(net(), made), made, instruction, kept[1], objective=objective) as round:
        expected = copy.deepcopy(round.model.state_dict())
        trained(round, 1)
    assert not models[1].training
    assert all(torch.equal(tensor, expected[name]) for name, tensor in models[1].state_dict().items())
    differ = any(not torch.equal(tensor, expected[name]) for name, tensor in models[0].state_dict().items())
    assert differ == made.personal  # control: where clients keep nothing, all have one network
    assert all(torch.equal(tensor, before[name]) for name, tensor in given.state_dict().items())


def test_a_client_before_its_first_round_has_the_server_s_start() -> None:
    server, made = net(), methods.fedbn()
    server[1].running_mean.fill_(3)  # type: ignore[operator,union-attr]
    fresh = client_model(net(), made, server_state(server, made, rounds=1).instruction())
    assert float(fresh[1].running_mean.mean()) == 3  # type: ignore[index]
    with naming("give the server's network"):
        client_model(net(), FEDAVG, server_state(server, made, rounds=1).instruction())


def with_ids() -> nn.Module:
    model = net()
    model.register_buffer("ids", torch.arange(3))
    return model


OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "shape": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), *net()[1:]), "0.weight"),
    "dtype": (lambda: net().float(), "0.weight"),
    "missing": (lambda: net()[:4], "4.weight"),
    "extra": (lambda: nn.Sequential(*net(), nn.Linear(2, 2)), "5.weight"),
    "at home": (with_ids, "fl-bn layers"),
}


@listed("make, key", [pytest.param(*case, id=name) for name, case in OTHERS.items()])
def test_a_client_with_another_network_is_told_the_first_tensor_that_differs(make: Any, key: str) -> None:
    asked = server_state(net(), FEDAVG, rounds=1).instruction()
    with naming(key), local_round(convert(make(), FEDAVG), FEDAVG, asked):
        pass
    with local_round(convert(net(), FEDAVG), FEDAVG, asked) as round:  # control
        assert round.trains
