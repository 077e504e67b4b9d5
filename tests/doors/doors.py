"""Train the same federation through each door, the user interfaces of fl-bn.

Network, data, batches and optimiser are the same. Each function returns the shared tensors after every round, to be compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from fl_bn import Federation, SeededBatches, convert, local_round, server_round, server_state
from fl_bn.bn.modules import copied
from fl_bn.exchange import Layer, LocalExchange, Session, Turns, admit, dismiss
from fl_bn.flower import InProcessGrid, OwnAppStrategy, answer, replayed, training
from fl_bn.methods import Method, Phase, StatisticsReport
from fl_bn.objectives import PLAIN, Objective
from tests.doors.inner import AS_METHOD, NO_DEFENCE, Defence, ExchangeSettings, LocalTraining, Samples, batch_norms
from tests.in_process import run
from tests.noted import noted

Tensors = dict[str, Tensor]
Rounds = list[Tensors]
Door = Callable[..., Rounds]
Seen = Callable[[int, int, nn.Module], None]
RATE = 0.1  # of all doors
sgd = partial(SGD, lr=RATE, momentum=0.9)


def ignore(client: int, round: int, model: nn.Module) -> None:
    """Do nothing; the default of ``seen``."""


def momentum_for(objective: Objective) -> float:
    """Return the momentum of the local SGD: 0 for SCAFFOLD, whose control variates need plain SGD, else 0.9."""
    return 0.0 if objective.travels else 0.9


def wide(clients: Sequence[Samples]) -> list[Samples]:
    """Return the clients' samples in float64, scaled as the network takes them."""
    like = torch.zeros((), dtype=torch.float64)
    return [Samples(*client.batch(np.arange(len(client)), like)) for client in clients]


def epoch(client: SeededBatches, index: int, round: int) -> Any:
    return client.epochs(0, index, round, 1)


def my_loop(model: nn.Module, batches: Any, rate: float = RATE) -> float:
    """Train on the batches in a plain PyTorch loop at learning rate ``rate``; return the mean loss."""
    optimizer, losses = SGD(model.parameters(), rate, momentum=0.9), []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses))


def corrected_loop(round: Any, batches: Any) -> float:
    """Train as ``my_loop`` does, but call ``round.backward``, which adds the local objective's term."""
    objective = round.settings.objective
    optimizer, losses = SGD(round.parameters.values(), round.instruction.learning_rate, momentum_for(objective)), []
    for x, y in batches:
        optimizer.zero_grad()
        losses.append(float(round.backward(lambda x=x, y=y: F.cross_entropy(round.model(x), y), x).detach()))
        optimizer.step()
    return float(np.mean(losses))


def federation(
    model: nn.Module,
    method: Method,
    clients: Sequence[Samples],
    rounds: int,
    size: int,
    defence: Defence,
    objective: Objective = PLAIN,
    passes: bool = False,
) -> Rounds:
    """Train through door 1, ``Federation``.

    ``passes``: scale the network to unit variance, and measure the statistics before round 1.
    """
    loaders = [SeededBatches(client.x, client.y, size) for client in clients]
    optimizer = partial(SGD, lr=RATE, momentum=momentum_for(objective))
    before = {"calibrate": AS_METHOD if passes else 0, "unit_scale": passes}
    once = {"optimizer": optimizer, "defence": defence, "objective": objective, "clip": "none"}  # the other doors do not clip
    fed = Federation(model, method, loaders, **once, **before)
    names = fed.server.shared.tensors()
    return [{name: fed.model.state_dict()[name] for name in names} for _ in fed.run(rounds)]


def own_loop(
    model: nn.Module,
    method: Method,
    clients: Sequence[Samples],
    rounds: int,
    size: int,
    defence: Defence,
    objective: Objective = PLAIN,
    fresh: Callable[[], nn.Module] | None = None,
    seen: Seen = ignore,
) -> Rounds:
    """Train through door 2, ``local_round`` and ``server_round``.

    Args:
        model: The server's network.
        method: The method.
        clients: The samples of each client.
        rounds: The number of rounds.
        size: The batch size.
        defence: The robust rule of the server.
        objective: The local objective.
        fresh: Builds the network of a client; None: clients use ``model``.
        seen: Called after a client has trained, with the client's index, the round and its model.
    """
    loaders = [SeededBatches(client.x, client.y, size) for client in clients]
    state = server_state(model, method, rounds, clients=len(clients), defence=defence, objective=objective, rate=same_rate)
    found = Rounds()
    kept: dict[int, Any] = {}
    for number in range(1, rounds + 1):
        asked, tokens, session = state.instruction(), dict[int, str](), None
        if asked.phase is Phase.EXCHANGE:
            session = session_of(state, len(clients))
            tokens = admit(session)

        def client(i: int, asked: Any = asked, tokens: dict[int, str] = tokens) -> Any:
            mine = convert(fresh() if fresh else model, method)
            connect = partial(LocalExchange, tokens[i]) if tokens else None
            with local_round(mine, method, asked, *([kept[i]] if i in kept else []), objective=objective, connect=connect) as round:
                if method.reports(asked.phase) is StatisticsReport.PASS:
                    round.measure(loaders[i])
                batches = epoch(loaders[i], i, asked.round)
                loss = my_loop(mine, batches, asked.learning_rate) if objective is PLAIN else corrected_loop(round, batches)
            reply, kept[i] = round.reply(len(clients[i]), loss, client=i)
            seen(i, asked.round, mine)
            return reply

        tasks = [partial(client, i) for i in range(len(clients))]
        replies = Turns(len(tasks)).run(tasks) if tokens else [task() for task in tasks]
        dismiss(tokens)
        state, record = server_round(state, replies, session)
        assert record.aggregated
        assert record.round == number
        found.append(copy.deepcopy(state.shared.tensors()))
    return found


def same_rate(round: int, rounds: int) -> float:
    """Return the learning rate, which is the same in every round and through every door."""
    return RATE


def session_of(state: Any, clients: int) -> Session:
    layers = {name: Layer(layer.num_features, torch.float64) for name, layer in batch_norms(state.model).items()}
    return Session(range(clients), layers)


def flower(
    model: nn.Module,
    method: Method,
    clients: Sequence[Samples],
    rounds: int,
    size: int,
    defence: Defence,
    objective: Objective = PLAIN,
    carrier: str = "auto",
    passes: bool = False,
    fresh: Callable[[], nn.Module] | None = None,
    seen: Seen = ignore,
    **options: Any,
) -> Rounds:
    """Train through door 3: a user's Flower app on the in-process grid.

    ``fresh`` and ``seen`` are as in ``own_loop``, ``passes`` as in ``federation``. ``options`` are passed to the strategy.
    """
    loaders = [SeededBatches(client.x, client.y, size) for client in clients]
    app = ClientApp()
    make = fresh or partial(copied, model)
    answer(app, make, method, lambda context: loaders[context.node_config["partition-id"]])

    @app.train(mods=[replayed])
    def train(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        with training(message, context, make(), method, loaders[i], objective=objective) as round:
            batches = epoch(loaders[i], i, round.local.instruction.round)
            rate = round.local.instruction.learning_rate
            loss = my_loop(round.model, batches, rate) if objective is PLAIN else corrected_loop(round.local, batches)
        seen(i, round.local.instruction.round, round.model)
        return round.message(len(clients[i]), loss)

    strategy = OwnAppStrategy(
        model,
        method,
        fraction_evaluate=0,
        calibrate=AS_METHOD if passes else 0,
        unit_scale=passes,
        defence=defence,
        rate=same_rate,
        objective=objective,
        exchange=ExchangeSettings(carrier),
        **options,
    )
    found = noted(strategy)
    strategy.start(InProcessGrid(app, len(clients), {}), num_rounds=rounds)
    return [{name: torch.from_numpy(array) for name, array in found[n].items()} for n in range(1, rounds + 1)]


def application(
    model: nn.Module,
    method: Method,
    clients: Sequence[Samples],
    rounds: int,
    size: int,
    defence: Defence,
    objective: Objective = PLAIN,
    passes: bool = False,
) -> Rounds:
    """Train with ``BatchNormClient`` and ``BatchNormStrategy``, as ``flwr run .`` does."""
    settings = LocalTraining(batch_size=size, epochs=1, momentum=momentum_for(objective), objective=objective)
    policy = {"auxiliary": settings.auxiliary} | ({"calibrate": AS_METHOD, "unit_scale": True} if passes else {})
    ran = run(method, clients, rounds, settings=settings, model=model, defence=defence, policy=policy)
    return [{name: torch.from_numpy(array.copy()) for name, array in ran.trajectory[n].items()} for n in range(1, rounds + 1)]


DOORS: dict[str, Door] = {"federation": federation, "own loop": own_loop, "flower": flower}
ALL: dict[str, Door] = {"application": application, **DOORS}


def through(
    door: Door, model: nn.Module, method: Method, clients: Sequence[Samples], rounds: int = 2, size: int = 4, **options: Any
) -> Rounds:
    """Train through ``door``, one local epoch per round; return the shared tensors after each round."""
    found = door(model, method, clients, rounds, size, options.pop("defence", NO_DEFENCE), **options)
    assert len(found) == rounds
    return found


def apart(a: Rounds, b: Rounds) -> float:
    """Return the largest absolute difference of a tensor between two runs, over all rounds."""
    assert all(one.keys() == other.keys() for one, other in zip(a, b, strict=True))
    return max(float((one[k].double() - other[k].double()).abs().max()) for one, other in zip(a, b, strict=True) for k in one)
