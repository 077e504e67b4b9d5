"""Compute a row of the table with fl-bn, through each of its interfaces: the only file of the table that imports fl_bn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD

from fl_bn import Federation, SeededBatches, convert, flower, local_round, server_round, server_state
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.aggregation import Defence
from fl_bn.federation.optimizers import server_optimizer
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import METHODS, StatisticsReport
from fl_bn.objectives import OBJECTIVES
from tests.equivalence.row import Row, union
from tests.kept import Kept

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


def train(row: Row, round: Any, client: int) -> None:
    """Train in a loop of one's own."""
    torch.manual_seed(1000 * round.instruction.round + client)
    optimizer = SGD(round.model.parameters(), round.instruction.learning_rate, **row.sgd)
    for x, y in row.steps[client]:
        optimizer.zero_grad()
        round.backward(lambda x=x, y=y: F.cross_entropy(round.model(x), y), x)
        optimizer.step()


def own_loop(row: Row) -> Computed:
    """Compute with ``local_round`` and ``server_round``."""
    net, kept, (method, objective, server, defence) = row.net(), dict[int, Any](), parts(row)
    common: dict[str, Any] = {"clients": len(row.clients), "rate": lambda *_: row.rate, "objective": objective, "defence": defence}
    state = server_state(net, method, row.rounds, optimizer=server, **common)
    for cohort in row.schedule:
        replies, asked = [], state.instruction()
        for k in cohort:
            mine, before = convert(net, method), [kept[k]] if k in kept else []
            with local_round(mine, method, asked, *before, objective=objective) as round:
                if method.reports(asked.phase) is StatisticsReport.PASS:
                    round.measure(row.clients[k])
                train(row, round, k)
            reply, kept[k] = round.reply(1 if row.uniform else row.sizes[k], client=k)
            replies.append(reply)
        state, record = server_round(state, replies)
        assert record.aggregated
    return row.schedule, state.shared.tensors()


def own_app(row: Row, carrier: str = "auto") -> Computed:
    """Compute with a Flower app of one's own."""
    app, (method, objective, server, defence) = ClientApp(), parts(row)

    def mine(context: Context) -> int:
        return int(context.node_config["partition-id"])

    flower.answer(app, row.net, method, lambda context: row.clients[mine(context)])

    @app.train(mods=[flower.replayed])
    def trained(message: Message, context: Context) -> Message:
        own = row.clients[mine(context)]
        with flower.training(message, context, row.net(), method, own, objective=objective) as round:
            train(row, round.local, mine(context))
        return round.message(row.sizes[mine(context)])

    options = {"optimizer": server, "defence": defence, "objective": objective, "exchange": ExchangeSettings(carrier)}
    calendar = {"rate": lambda *_: row.rate, "calibrate": row.calibrate, "unit_scale": False, "fraction_evaluate": 0}
    strategy = flower.OwnAppStrategy(row.net(), method, **options, **calendar)
    return row.schedule, arrays_of(strategy.start(flower.InProcessGrid(app, len(row.clients), {}), num_rounds=row.rounds))


def arrays_of(result: Any) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array.numpy()) for name, array in result.arrays.items()}


def application(row: Row) -> Computed:
    """Compute with the client and the strategy of ``flwr run .``: a batch is all of a client's samples."""
    net, count, (method, objective, server, defence) = row.net(), len(row.clients), parts(row)
    settings = LocalTraining(10**6, steps=row.epochs, objective=objective, **row.sgd, **row.local)
    own = [SeededBatches(*union([client]), batch_size=2).samples for client in row.clients]
    sites = [flower.Site(i, count, data, data, torch.device("cpu"), None, (len(data),)) for i, data in enumerate(own)]
    made = partial(flower.BatchNormClient, convert(net, method), method, settings)
    app = flower.make_client_app(lambda context: made(sites[context.node_config["partition-id"]], context.state))
    calendar = {"rate": lambda *_: row.rate, "calibrate": row.calibrate, "unit_scale": False, "wait": 0.0}
    rounds = flower.Rounds(count, fraction=len(row.schedule[0]) / count, update=settings.update, auxiliary=settings.auxiliary, **calendar)
    kept = Kept()
    strategy = flower.BatchNormStrategy(net, method, rounds, optimizer=server, defence=defence, callbacks=[kept])
    found = arrays_of(strategy.start(flower.InProcessGrid(app, count, {}), num_rounds=row.rounds))
    return [[client.client for client in record.clients] for record in kept.records], found


DOORS: dict[str, Callable[[Row], Computed]] = {
    "federation": federation,
    "workers": partial(federation, workers=2),
    "vectorised": partial(federation, engine="vectorised"),
    "channels last": lambda row: federation(replace(row, network=lambda: row.net().to(memory_format=torch.channels_last))),
    "own loop": own_loop,
    "flower": own_app,
    "replay": partial(own_app, carrier="replay"),
    "application": application,
}


def compute(row: Row, door: str) -> Computed:
    with torch.random.fork_rng(devices=[]):
        return DOORS[door](row)
