"""Methods, local objectives and server optimizers go together: nothing diverges, no statistic passes an optimizer, off is off."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD

from fl_bn import Federation
from fl_bn.federation.optimizers import SERVER_OPTIMIZERS, server_optimizer
from fl_bn.methods import METHODS, Method, Role
from fl_bn.objectives import OBJECTIVES
from tests.doors.doors import Rounds, Tensors
from tests.federation import random_samples
from tests.listed import COMMON, slow
from tests.networks import NETWORKS, seeded_network

SAMPLES = [random_samples(12, brightness=i / 2, seed=i) for i in range(3)]
CLIENTS = [[(own.x[i::2] / 127.5 - 1, own.y[i::2]) for i in range(2)] for own in SAMPLES]
ON: dict[str, dict[str, Any]] = {"moon": {"mu": 2.0}, "fedprox": {"mu": 0.5}}
OFF = {"fedprox": {"mu": 0.0}, "moon": {"mu": 0.0}, "fedsam": {"rho": 0.0}, "scaffold": {"strength": 0.0}}
Cell = tuple[str, str, str, str]


def federation(method: str, objective: str = "none", server: str = "fedavg", network: str = "resnet", **strength: float) -> Federation:
    of_server = {"learning_rate": 0.02} if server in ("fedadagrad", "fedadam", "fedyogi") else {}
    momentum = {"momentum": 0.0} if strength and objective == "none" else {}
    return Federation(
        seeded_network(network),
        METHODS[method](),
        CLIENTS,
        objective=OBJECTIVES[objective](**(ON.get(objective, {}) | (strength if objective != "none" else {}))),
        server_optimizer=server_optimizer(server, **of_server, **momentum),
        optimizer=partial(SGD, lr=0.05),
        fraction=0.67,
        evaluate_every=10,
        workers=1,
    )


def made(*cell: str, rounds: int = 3, **strength: float) -> tuple[Rounds, list[Any]]:
    """Return the shared tensors after each round, and the rounds' records."""
    fed, found = federation(*cell, **strength), Rounds()
    records = []
    for record in fed.run(rounds):
        records.append(record)
        found.append(copy.deepcopy({**fed.server.shared.tensors()}))
    return found, records


def refused(method: Method) -> tuple[str, ...]:
    """Return the objectives that need the contrary of an exact step of the union, or of weights that stay at home."""
    return ("scaffold", "fedsam") if method.exchanges else () if method.shares(Role.WEIGHT) else ("fedprox", "scaffold", "moon")


def pairwise() -> Iterator[Cell]:
    """Yield combinations in which any two choices occur together that are allowed together."""
    for i, method in enumerate(METHODS):
        allowed = [objective for objective in OBJECTIVES if objective not in refused(METHODS[method]())]
        for j, server in enumerate(SERVER_OPTIMIZERS):
            if method != "single" or server == "fedavg":  # whose clients share nothing on which a server could step
                yield method, allowed[(i + j) % len(allowed)], server, [*NETWORKS][(i // 2 + j + j // len(allowed)) % 2]


def of_statistics(tensors: Tensors, statistics: bool = True) -> Tensors:
    return {name: t for name, t in tensors.items() if name.endswith(("running_mean", "running_var")) == statistics}


def identical(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


@pytest.mark.sample(3)
@pytest.mark.parametrize("cell", [cell if cell[0] in COMMON else slow(cell) for cell in pairwise()], ids=" ".join)
def test_any_two_go_together(cell: Cell) -> None:
    """Three rounds are aggregated, everything is finite, every variance above 0, and training goes on to the last."""
    rounds, records = made(*cell)
    for record in records:
        assert record.aggregated
        assert len(record.accepted) == len(record.clients) == 2
        assert all(torch.tensor(client.loss).isfinite() for client in record.clients)
        assert ("control" in record.bytes_up) == (cell[1] == "scaffold")
    for tensors in rounds:
        assert all(t.isfinite().all() for t in tensors.values())
        assert all((t > 0).all() for name, t in tensors.items() if name.endswith("running_var"))
    for before, after in zip(rounds[:-1], rounds[1:], strict=True):
        assert not before or not identical(of_statistics(before, False), of_statistics(after, False))


@pytest.mark.sample("[fbn-", "[fedtan-", "[fedavg-")
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", COMMON)
def test_an_objective_of_strength_0_is_none_bit_for_bit(method: str, network: str) -> None:
    plain, records = made(method, "none", "fedavg", network, rounds=2)
    variants = [((objective, "fedavg"), off) for objective, off in OFF.items()]  # also what is refused where it is on
    variants += [(("none", server), {"momentum": 0.0}) for server in ("fedavgm", "fedacg")]
    for chosen, off in variants:
        found, others = made(method, *chosen, network, rounds=2, **off)
        assert all(identical(a, b) for a, b in zip(found, plain, strict=True)), chosen
        assert [record.bytes_up for record in others] == [record.bytes_up for record in records]
        if method == "fedavg":  # control
            assert not all(identical(a, b) for a, b in zip(made(method, *chosen, network, rounds=2)[0], plain, strict=True)), chosen
