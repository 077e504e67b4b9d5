"""The server's state survives a pickle in the middle of a run, for every method and server optimiser."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_bn import methods, server_state
from fl_bn.federation.optimizers import SERVER_OPTIMIZERS
from fl_bn.federation.server import Server
from fl_bn.methods import METHODS, Method, attacked
from fl_bn.objectives import FedProx, Objective, Scaffold
from fl_bn.robust.attacks import ATTACKS
from tests.doors.doors import apart
from tests.loops.loops import door_2, plain


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).double()


def clients() -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 1, 4, 4, generator=rng, dtype=torch.float64) + n, torch.randint(0, 2, (n,), generator=rng)) for n in (6, 4)]


def pickled(state: Server) -> Server:
    found: Server = pickle.loads(pickle.dumps(state))
    return found


def ends(method: Method, between: Callable[[Server], Server], **options: Any) -> list[dict[str, Tensor]]:
    options = {"loop": plain, "rounds": 3, **options}
    return door_2(net(), method, clients(), between=between, **options)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "single"])  # which shares nothing
def test_a_run_goes_on_from_a_pickle_bit_for_bit(name: str) -> None:
    assert apart(ends(METHODS[name](), pickled), ends(METHODS[name](), lambda state: state)) == 0


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS)
def test_so_do_the_server_s_optimizers(name: str) -> None:
    def forgetful(state: Server) -> Server:
        state.optimizer = SERVER_OPTIMIZERS[name]()
        return state

    want, found, forgotten = (
        ends(methods.fedavg(), between, optimizer=SERVER_OPTIMIZERS[name]()) for between in (lambda state: state, pickled, forgetful)
    )
    assert apart(found, want) == 0
    assert (apart(forgotten, want) > 0) is (name != "fedavg")  # control: FedAvg alone has no buffers


def falling(round: int, rounds: int) -> float:
    return 0.1 / round


def test_a_rate_of_a_module_is_pickled_with_the_state() -> None:
    """As docs/how-to/loop.md says. Python itself pickles no lambda."""
    state = server_state(net(), methods.fbn(), rounds=3, rate=falling)
    assert pickled(state).instruction().learning_rate == state.instruction().learning_rate == 0.1
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickled(server_state(net(), methods.fbn(), rounds=3, rate=lambda round, rounds: 0.1))


@pytest.mark.parametrize("objective", [Scaffold(), FedProx(0.1)], ids=lambda objective: str(objective.name))
def test_so_do_tensors_that_accompany_the_weights(objective: Objective) -> None:
    state = server_state(net(), methods.fedavg(), rounds=2, objective=objective)
    found, want = pickled(state).instruction().sections, state.instruction().sections
    assert found.keys() == want.keys()
    assert all(torch.equal(found[section][name], tensor) for section in want for name, tensor in want[section].items())


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_method_under_attack_can_be_pickled(attack: str) -> None:
    method = attacked(methods.fedavg(), attack, 1)
    assert pickle.loads(pickle.dumps(method)).adversary.f == 1
