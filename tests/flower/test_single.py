"""SingleSet: each client's run is the one that it would make alone, and no tensor travels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from fl_bn.data.batches import draw_batches
from fl_bn.federation.defence import Defence
from fl_bn.federation.local import Samples, torch_seed
from fl_bn.federation.settings import LocalTraining, seeded
from fl_bn.federation.sources import BATCHES, DROPOUT
from fl_bn.methods import METHODS, attacked
from tests.in_process import TWO_STEPS, Run, WatchedGrid, client_app, run, sections
from tests.networks import seeded_network

Clients = Callable[..., list[Samples]]
DSGD = LocalTraining(batch_size=64, steps=1, momentum=0.9, update="gradients")
CPU = torch.device("cpu")


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((6, 4, 5))


def saved(
    method: str, clients: list[Samples], folder: Path, settings: LocalTraining = TWO_STEPS, **policy: float
) -> tuple[Run, list[dict]]:
    grid = WatchedGrid(client_app(METHODS[method](), clients, settings, folder=folder), 3)
    ran = run(METHODS[method](), clients, 3, settings=settings, grid=grid, save_clients=method, policy=policy)
    return ran, [load_file(folder / method / "clients" / f"client-{i}.safetensors") for i in range(3)]


def alone(samples: Samples, client: int, rounds: int = 3) -> dict[str, Tensor]:
    """Plain torch: TWO_STEPS per round, a fresh optimiser each round, the client's own batches and dropout."""
    model = seeded_network("cnn").train()
    for round in range(1, rounds + 1):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with torch_seed(int(seeded(0, client, round, DROPOUT).integers(2**62)), CPU):
            for index in draw_batches(len(samples), 4, seeded(0, client, round, BATCHES), epochs=0, steps=2):
                x, y = samples.batch(index, next(model.parameters()))
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    return model.state_dict()


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_every_client_is_where_it_would_be_alone_bit_for_bit(clients: list[Samples], tmp_path: Path) -> None:
    _, models = saved("single", clients, tmp_path)
    _, federated = saved("fedbn", clients, tmp_path)
    for client, samples in enumerate(clients):
        want = alone(samples, client)
        assert equal(models[client], want)
        assert not equal(models[client], alone(samples, client, rounds=2))  # controls: a round less, ...
        assert not equal(federated[client], want)  # ... weights averaged
    assert not torch.equal(models[0]["9.weight"], models[1]["9.weight"])


def test_no_tensor_travels_and_every_client_is_evaluated(clients: list[Samples], tmp_path: Path) -> None:
    ran, _ = saved("single", clients, tmp_path, evaluate_every=2)
    for message in [*ran.grid.sent, *ran.grid.received]:
        assert not any(arrays for arrays in sections(message.content).values())
    assert all(record.aggregated and len(record.accepted) == 3 for record in ran.records)
    assert [sorted(record.client_evaluation) for record in ran.records] == [[], [0, 1, 2], [0, 1, 2]]
    assert {"accuracy", "accuracy-std", "accuracy-min"} <= set(ran.records[-1].evaluation)
    assert not ran.trajectory[3]
    control = run(METHODS["fedbn"](), clients, 1)
    assert any(arrays for message in control.grid.sent for arrays in sections(message.content).values())


def test_a_client_without_a_round_stays_where_it_was(clients: list[Samples], tmp_path: Path) -> None:
    ran, models = saved("single", clients, tmp_path, fraction=0.4)
    rounds = [sum(c.client == client for record in ran.records for c in record.accepted) for client in range(3)]
    assert sum(rounds) == 3
    assert sorted(rounds)[0] == 0
    never, start = models[int(np.argmin(rounds))], seeded_network("cnn").state_dict()
    assert equal(never, start)
    assert not equal(models[int(np.argmax(rounds))], start)  # control


@pytest.mark.parametrize("defence", [Defence(), Defence(1, "median", "median")])
def test_gradients_and_robust_rules_find_nothing_to_combine(defence: Defence, clients: list[Samples]) -> None:
    ran = run(METHODS["single"](), clients, 2, settings=DSGD, defence=defence)
    assert all(record.aggregated for record in ran.records)
    states = [state.array_records["fl-bn/local"]["9.weight"].numpy() for state in ran.grid.states()]  # type: ignore[union-attr]
    start = seeded_network("cnn").state_dict()["9.weight"].numpy()
    assert not any(np.array_equal(state, start) for state in states)  # the clients step by themselves


def test_the_servers_model_stays_at_the_start(clients: list[Samples]) -> None:
    ran = run(METHODS["single"](), clients, 2)
    start = copy.deepcopy(seeded_network("cnn").state_dict())
    assert equal(dict(ran.strategy.shared.model.state_dict()), dict(start))


def test_nobody_can_attack_what_is_not_shared() -> None:
    with pytest.raises(ValueError, match="single shares no tensors"):
        attacked(METHODS["single"](), "sign-flip", 1)
