"""Compute a row of the table with fl-bn, through each of its interfaces: the only file of the table that imports fl_bn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD

from fl_bn import Federation, SeededBatches
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.aggregation import Defence
from fl_bn.federation.optimizers import server_optimizer
from fl_bn.federation.settings import LocalTraining
from fl_bn.flower import InProcessGrid, OwnAppStrategy
from fl_bn.methods import METHODS
from fl_bn.objectives import OBJECTIVES
from tests.doors.doors import own_app, own_rounds
from tests.equivalence.row import Row, union
from tests.in_process import run

Computed = tuple[list[list[int]], dict[str, Tensor]]
"""The clients of each round, and the tensors after the last one."""


def parts(row: Row) -> tuple[Any, Any, Any, Any]:
    """Return the method, the local objective, the server optimizer and the defence."""
    (objective, of_objective), (server, of_server) = row.objective, row.server
    objective = OBJECTIVES[objective](**of_objective)
    return METHODS[row.method](**row.options), objective, server_optimizer(server, **of_server), Defence(*row.defence)


def federation(row: Row, **options: Any) -> Computed:
    """Compute with ``Federation``. Which clients take part is up to it: as many in each round as in the row's first cohort."""
    method, objective, server, defence = parts(row)
    loaders: Any = row.clients
    if "engine" in options:  # it takes no lists of batches
        loaders = [SeededBatches(*union([own]), batch_size=len(union([own])[1])) for own in row.clients]
    options |= {"objective": objective, "server_optimizer": server, "defence": defence, "optimizer": partial(SGD, lr=row.rate, **row.sgd)}
    options |= {"calibrate": row.calibrate, "unit_scale": False, "clip": "none", "local_epochs": row.epochs}
    fed = Federation(row.net(), method, loaders, fraction=len(row.schedule[0]) / len(row.clients), **options)
    cohorts = [[client.client for client in record.clients] for record in fed.run(row.rounds)]
    own = {f"{i}/{name}": t for i in range(len(row.clients)) for name, t in fed.client_model(i).state_dict().items()}
    return cohorts, {**fed.model.state_dict(), **own}


def drawn(row: Row, batches: Any, client: int, round: int) -> Any:
    """Return a client's batches of a round, after seeding what its network draws."""
    torch.manual_seed(1000 * round + client)
    return row.steps[client]


def train(row: Row, round: Any, batches: Any) -> None:
    """Train in a loop of one's own."""
    optimizer = SGD(round.model.parameters(), round.instruction.learning_rate, **row.sgd)
    for x, y in batches:
        optimizer.zero_grad()
        round.backward(lambda x=x, y=y: F.cross_entropy(round.model(x), y), x)
        optimizer.step()


def own_loop(row: Row) -> Computed:
    """Compute with ``local_round`` and ``server_round``."""
    method, objective, server, defence = parts(row)
    how: dict[str, Any] = {"loop": partial(train, row), "draw": partial(drawn, row), "samples": [1] * len(row.clients) * row.uniform}
    how |= {"optimizer": server, "defence": defence, "objective": objective, "rate": lambda *_: row.rate}
    for done in own_rounds(row.net(), method, row.clients, row.schedule, **how):
        assert done.record.aggregated
    return row.schedule, done.state.shared.tensors()


def flower(row: Row, carrier: str = "auto") -> Computed:
    """Compute with a Flower app of one's own."""
    method, objective, server, defence = parts(row)
    how: dict[str, Any] = {"loop": partial(train, row), "draw": partial(drawn, row), "fresh": row.net, "objective": objective}
    options = {"optimizer": server, "defence": defence, "objective": objective, "exchange": ExchangeSettings(carrier)}
    calendar = {"rate": lambda *_: row.rate, "calibrate": row.calibrate, "unit_scale": False, "fraction_evaluate": 0}
    grid = InProcessGrid(own_app(row.net(), method, row.clients, **how), len(row.clients), {})
    return row.schedule, arrays_of(OwnAppStrategy(row.net(), method, **options, **calendar).start(grid, num_rounds=row.rounds))


def arrays_of(result: Any) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array.numpy()) for name, array in result.arrays.items()}


def application(row: Row) -> Computed:
    """Compute with the client and the strategy of ``flwr run .``: a batch is all of a client's samples."""
    method, objective, server, defence = parts(row)
    settings = LocalTraining(10**6, steps=row.epochs, objective=objective, **row.sgd, **row.local)
    own = [SeededBatches(*union([client]), batch_size=2).samples for client in row.clients]
    policy = {"fraction": len(row.schedule[0]) / len(own), "auxiliary": settings.auxiliary, "calibrate": row.calibrate}
    policy["rate"] = lambda *_: row.rate
    ran = run(method, own, row.rounds, settings=settings, policy=policy, model=row.net(), optimizer=server, defence=defence)
    return [[client.client for client in record.clients] for record in ran.records], arrays_of(ran.result)


DOORS: dict[str, Callable[[Row], Computed]] = {
    "federation": federation,
    "workers": partial(federation, workers=2),
    "vectorised": partial(federation, engine="vectorised"),
    "channels last": lambda row: federation(replace(row, network=lambda: row.net().to(memory_format=torch.channels_last))),
    "own loop": own_loop,
    "flower": flower,
    "replay": partial(flower, carrier="replay"),
    "application": application,
}


def compute(row: Row, door: str) -> Computed:
    with torch.random.fork_rng(devices=[]):
        return DOORS[door](row)
