"""A client's first BatchNorm is the one that the run starts with, in every door: the server's, and not what the client built."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Message
from torch import Tensor, nn
from torch.optim import SGD

from fl_bn import Federation, SeededBatches, convert, local_round, server_state
from fl_bn.flower import OwnAppStrategy
from fl_bn.methods import METHODS
from tests.doors.doors import LOOPS, RATE, Seen, Tensors, drawn, own_app, through, wide
from tests.doors.inner import START, evaluate, roles
from tests.federation import random_samples
from tests.in_process import WatchedGrid
from tests.listed import listed
from tests.refusals import refused

SIZE, FEDBN = 4, METHODS["fedbn"]()
Models = dict[tuple[int, int], Tensors]
"""By client and round: the state of its network after training."""


def fresh() -> nn.Sequential:
    """Build what a client builds: torch's own initial BatchNorm."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).double()


def pretrained() -> nn.Sequential:
    """Build what the server has."""
    model = fresh()
    torch.manual_seed(8)
    for tensor in model.state_dict().values():
        tensor.copy_(torch.rand_like(tensor) + 0.5 if tensor.is_floating_point() else torch.tensor(33))
    return model


CLIENTS = wide([random_samples(n, size=2, brightness=i / 3, seed=i) for i, n in enumerate((8, 9, 10, 11))])
TEST = CLIENTS.pop()
LOADERS = [SeededBatches(samples.x, samples.y, SIZE) for samples in CLIENTS]


def remember(found: Models, fails: tuple[int, int] = (-1, 0)) -> Seen:
    """Return a function that notes networks; in the round ``fails`` of a client it raises an error."""

    def seen(client: int, round: int, model: nn.Module) -> None:
        found[client, round] = copy.deepcopy(model.state_dict())
        if (client, round) == fails:
            raise RuntimeError("its power failed")

    return seen


def alone(model: nn.Module, client: int, round: int = 1) -> Tensors:
    """Train in plain PyTorch, as a client does that starts with ``model`` in this round."""
    mine = copy.deepcopy(model).train()
    optimizer = SGD(mine.parameters(), RATE, momentum=0.9)
    for x, y in drawn(LOADERS[client], client, round):
        optimizer.zero_grad()
        nn.functional.cross_entropy(mine(x), y).backward()
        optimizer.step()
    return mine.state_dict()


def same(found: Tensors, wanted: Tensors) -> bool:
    return all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())


def of_federation(method: str) -> Models:
    found, optimizer = Models(), partial(SGD, lr=RATE, momentum=0.9)
    fed = Federation(pretrained(), METHODS[method](), LOADERS, optimizer=optimizer, calibrate=0, unit_scale=False, clip="none")
    for record in fed.run(2):
        found |= {(i, record.round): copy.deepcopy(fed.client_model(i).state_dict()) for i in range(len(LOADERS))}
    return found


@pytest.mark.parametrize("method", [name for name, make in METHODS.items() if make().personal])
def test_a_client_s_first_batch_norm_is_the_server_s_in_every_door(method: str) -> None:
    chosen = METHODS[method]()
    home = {name for name, role in roles(fresh()).items() if role in chosen.local}
    found: dict[str, Models] = {"federation": of_federation(method)}
    for door in LOOPS:
        found[door] = {}
        through(door, pretrained(), chosen, CLIENTS, fresh=fresh, seen=remember(found[door]))
    for models in found.values():
        assert set(models) == {(i, round) for i in range(3) for round in (1, 2)}
        assert all(same(models[i, 1], {name: alone(pretrained(), i)[name] for name in home}) for i in range(3))
        assert all(same(state, {name: found["federation"][place][name] for name in home}) for place, state in models.items())
    assert not any(torch.equal(alone(fresh(), 0)[name], alone(pretrained(), 0)[name]) for name in home)  # control


def of_an_app(model: nn.Module, found: Models, rounds: int, *initial: ArrayRecord, fails: Any = (-1, 0), **options: Any) -> WatchedGrid:
    """Run a Flower app of one's own with FedBN; return the grid with all messages."""
    grid = WatchedGrid(own_app(fresh(), FEDBN, LOADERS, fresh=fresh, seen=remember(found, fails)), 3)
    options |= {"rate": lambda *_: RATE, "calibrate": 0, "unit_scale": False, "fraction_evaluate": 0}
    OwnAppStrategy(model, FEDBN, **options).start(grid, *initial, num_rounds=rounds)
    return grid


def started(messages: list[Message], round: int) -> set[int]:
    """Return the nodes that were sent a start in ``round``."""
    trained = [m for m in messages if m.metadata.message_type == "train" and m.metadata.group_id == str(round)]
    return {m.metadata.dst_node_id for m in trained if f"fl-bn/{START}" in m.content}


def test_a_client_that_joins_later_starts_with_it_and_nobody_is_sent_it_twice() -> None:
    found: Models = {}
    grid = of_an_app(pretrained(), found, 4, fraction_train=0.34, min_train_nodes=1)
    firsts = {client: min(round for c, round in found if c == client) for client, _ in found}
    late, round = max(firsts.items(), key=lambda item: item[1])
    assert round > 1
    for client, number in found:
        assert len(started(grid.sent, number)) == (firsts[client] == number)
    mine = pretrained()
    (down,) = grid.train(round)
    mine.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in down["weights"].items()}, strict=False)
    assert same(found[late, round], alone(mine, late, round))


def test_a_client_whose_reply_was_lost_is_sent_it_again_and_goes_on_from_what_it_kept() -> None:
    found: Models = {}
    grid = of_an_app(pretrained(), found, 2, fails=(1, 1))
    assert (len(started(grid.sent, 1)), len(started(grid.sent, 2))) == (3, 1)
    kept = torch.from_numpy(grid.states()[1]["fl-bn/local"]["2.running_mean"].numpy().copy())
    assert torch.equal(kept, found[1, 2]["2.running_mean"])
    assert not torch.equal(found[1, 1]["2.running_mean"], pretrained()[2].running_mean)  # control


def test_initial_arrays_with_batch_norm_are_the_start() -> None:
    """Flower's own way to begin from pre-trained weights: ``start(grid, ArrayRecord(net.state_dict()))``, and a strategy of ``Net()``."""
    found: Models = {}
    of_an_app(fresh(), found, 1, ArrayRecord({k: v.clone() for k, v in pretrained().state_dict().items()}))
    assert same(found[0, 1], alone(pretrained(), 0))


Forge = Callable[[dict[str, Tensor]], dict[str, Tensor]]
FORGED: list[tuple[Forge, str]] = [
    (lambda t: {k: v for k, v in t.items() if k != "2.bias"}, "2.bias"),
    (lambda t: t | {"4.weight": torch.ones(4, 8).double()}, "4.weight"),
    (lambda t: t | {"2.bias": torch.full((8,), torch.nan).double()}, "2.bias"),
]


@listed("forge, tensor", FORGED, ids=["a tensor short", "a tensor more", "no number"])
def test_a_start_that_is_none_is_refused_by_name(forge: Forge, tensor: str) -> None:
    asked, fedavg = server_state(pretrained(), FEDBN, rounds=1).instruction(), METHODS["fedavg"]()
    wrong = replace(asked, sections={**asked.sections, START: forge(asked.sections[START])})
    with refused(START, tensor), local_round(convert(fresh(), FEDBN), FEDBN, wrong):
        pass
    unasked = server_state(pretrained(), fedavg, rounds=1).instruction()
    extra = replace(unasked, sections={**unasked.sections, START: asked.sections[START]})
    with refused(START), local_round(convert(fresh(), fedavg), fedavg, extra):
        pass


# Evaluations are of clients that have trained


def test_federation_evaluates_clients_that_have_trained() -> None:
    fed = Federation(pretrained(), FEDBN, LOADERS, fraction=0.34, test=[(TEST.x, TEST.y)])
    assert fed.evaluate()["loss"] == evaluate(pretrained(), TEST).result()["loss"]
    (record,) = fed.run(1)
    (trained,) = [client.client for client in record.clients]
    losses = [evaluate(fed.client_model(i), TEST).result()["loss"] for i in range(3)]
    assert record.evaluation["loss"] == losses[trained]
    assert record.evaluation["loss"] != sum(losses) / 3  # control


@listed("method", ["fbn", "hbn"])
def test_statistics_are_measured_before_round_1_unless_the_run_says_otherwise(method: str) -> None:
    pooled = torch.cat([samples.x for samples in CLIENTS]).flatten(1).mean(0)
    for options, measured in (({}, True), ({"calibrate": 0}, False)):
        model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 4)).double()
        fed = Federation(model, METHODS[method](tracking=1e-6), LOADERS, **options)
        list(fed.run(1))
        assert torch.allclose(fed.model.get_buffer("1.running_mean"), pooled, atol=0.01) is measured
