"""The server's state and a client's network in a loop of one's own: pickled, taken up again, and refused where they do not fit."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from fl_bn import convert, local_round, methods, server_state
from fl_bn.objectives import Scaffold
from tests.doors.doors import apart, own_loop, pickled
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


@listed("name", SERVER_OPTIMIZERS)
def test_a_server_s_optimizer_goes_on_from_a_pickle_bit_for_bit(name: str) -> None:
    """As the state of every method does in tests/conformance."""

    def forgetful(saved: Any) -> Any:
        saved[0].optimizer = SERVER_OPTIMIZERS[name]()
        return saved

    def ends(between: Callable[[Any], Any]) -> list[dict[str, Tensor]]:
        clients = [[data(0, 6)], [data(1, 4)]]
        return own_loop(net(), FEDAVG, clients, 3, between=between, optimizer=SERVER_OPTIMIZERS[name]())

    want, found, forgotten = map(ends, (lambda saved: saved, pickled, forgetful))
    assert apart(found, want) == 0
    assert (apart(forgotten, want) > 0) is (name != "fedavg")  # control: FedAvg alone has no buffers


def test_a_new_run_begins_without_the_control_variates_of_an_earlier_one() -> None:
    def anew(saved: Any) -> Any:
        return server_state(net(), FEDAVG, rounds=2, clients=2, objective=Scaffold()), saved[1]

    def loop(round: Any, batches: Any) -> None:
        round.backward(lambda: F.cross_entropy(round.model(batches[0]), batches[1]), batches[0])
        SGD(round.model.parameters(), 0.1).step()

    first, again = own_loop(net(), FEDAVG, [data(0, 6), data(1, 4)], 2, between=anew, objective=Scaffold(), loop=loop, samples=(6, 4))
    assert apart([again], [first]) == 0


def falling(round: int, rounds: int) -> float:
    return 0.1 / round


def test_a_rate_of_a_module_and_an_objective_are_pickled_with_the_state() -> None:
    """As docs/how-to/loop.md says. Python itself pickles no lambda."""
    state = server_state(net(), FEDAVG, rounds=3, rate=falling, objective=Scaffold())
    found, want = pickled(state).instruction(), state.instruction()
    assert found.learning_rate == want.learning_rate == 0.1
    assert found.sections.keys() == want.sections.keys()
    assert all(apart([found.sections[section]], [tensors]) == 0 for section, tensors in want.sections.items())
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickled(server_state(net(), methods.fbn(), rounds=3, rate=lambda round, rounds: 0.1))


OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "shape": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), *net()[1:]), "0.weight"),
    "dtype": (lambda: net().float(), "0.weight"),
    "missing": (lambda: net()[:4], "4.weight"),
    "extra": (lambda: nn.Sequential(*net(), nn.Linear(2, 2)), "5.weight"),
}


@listed("make, key", [pytest.param(*case, id=name) for name, case in OTHERS.items()])
def test_a_client_with_another_network_is_told_the_first_tensor_that_differs(make: Any, key: str) -> None:
    asked = server_state(net(), FEDAVG, rounds=1).instruction()
    with naming(key), local_round(convert(make(), FEDAVG), FEDAVG, asked):
        pass
    with local_round(convert(net(), FEDAVG), FEDAVG, asked) as round:  # control
        assert round.trains
