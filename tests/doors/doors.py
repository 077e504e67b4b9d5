"""Train the same federation through each door, the user interfaces of fl-bn, with a user's training loop or fl-bn's own.

Network, data, batches and optimiser are the same. Each door returns the shared tensors after every round, to be compared.
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
from tests.doors.inner import Samples, batch_norms
from tests.noted import noted

Tensors = dict[str, Tensor]
Rounds = list[Tensors]
Door = Callable[..., Rounds]
Loop = Callable[[Any, Any], Any]
"""``loop(round, batches)`` trains ``round.model`` in a round of ``local_round`` or ``training``; it may return the mean loss."""
Seen = Callable[[int, int, nn.Module], None]
"""``seen(client, round, network)`` is called after a client has trained."""
RATE = 0.1  # of all doors


def constant(round: int, rounds: int) -> float:
    """Return the learning rate of every round."""
    return RATE


def train(round: Any, batches: Any) -> float:
    """Train in a plain PyTorch loop."""
    optimizer, losses = SGD(round.model.parameters(), round.instruction.learning_rate, momentum=0.9), []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(round.model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses))


def drawn(batches: Any, client: int, round: int) -> Any:
    """Return a client's batches of a round."""
    return batches.epochs(0, client, round, 1) if isinstance(batches, SeededBatches) else batches


def samples_of(batches: Any) -> int:
    return len(batches.samples) if isinstance(batches, SeededBatches) else sum(len(y) for _, y in batches)


def session_of(state: Any, clients: int) -> Session:
    """Return the session of FedTAN's exchange in a round of all clients."""
    layers = {name: Layer(layer.num_features, torch.float64) for name, layer in batch_norms(state.model).items()}
    return Session(range(clients), layers)


def federation(model: nn.Module, method: Method, clients: Sequence[Any], rounds: int, **options: Any) -> Rounds:
    """Train through door 1, ``Federation``, without clipping, as the other doors do."""
    plain = {"optimizer": partial(SGD, lr=RATE, momentum=0.9), "calibrate": 0, "unit_scale": False, "clip": "none"}
    fed = Federation(model, method, clients, **{**plain, **options})
    names = fed.server.shared.tensors()
    return [copy.deepcopy({name: fed.model.state_dict()[name] for name in names}) for _ in fed.run(rounds)]


def own_loop(
    model: nn.Module,
    method: Method,
    clients: Sequence[Any],
    rounds: int,
    *,
    loop: Loop = train,
    fresh: Callable[[], nn.Module] | None = None,
    seen: Seen | None = None,
    between: Callable[[Any], Any] | None = None,
    **options: Any,
) -> Rounds:
    """Train through door 2, ``local_round`` and ``server_round``; ``options`` are those of ``server_state``.

    ``fresh`` builds the network of a client; None: clients use ``model``. ``between`` gets the server's state after each round, and returns
    the state for the next one.
    """
    state, found = server_state(model, method, rounds, clients=len(clients), **{"rate": constant, **options}), Rounds()
    kept = dict[int, Any]()
    for _ in range(rounds):
        asked = state.instruction()
        session = session_of(state, len(clients)) if asked.phase is Phase.EXCHANGE else None
        tokens = {} if session is None else admit(session)

        def client(i: int, asked: Any = asked, tokens: dict[int, str] = tokens) -> Any:
            mine = convert(fresh() if fresh else model, method)
            connect = partial(LocalExchange, tokens[i]) if tokens else None
            with local_round(mine, method, asked, *([kept[i]] if i in kept else []), connect=connect) as round:
                if method.reports(asked.phase) is StatisticsReport.PASS:
                    round.measure(clients[i])
                loss = loop(round, drawn(clients[i], i, asked.round))
            reply, kept[i] = round.reply(samples_of(clients[i]), float("nan") if loss is None else loss, client=i)
            if seen:
                seen(i, asked.round, mine)
            return reply

        tasks = [partial(client, i) for i in range(len(clients))]
        try:
            replies = Turns(len(tasks)).run(tasks) if tokens else [task() for task in tasks]
        finally:
            dismiss(tokens)
        state, record = server_round(state, replies, session)
        assert record.aggregated, [client.refused for client in record.clients]
        found.append(copy.deepcopy(state.shared.tensors()))
        state = between(state) if between else state
    return found


def own_app(
    model: nn.Module,
    method: Method,
    clients: Sequence[Any],
    *,
    loop: Loop = train,
    fresh: Callable[[], nn.Module] | None = None,
    seen: Seen | None = None,
    mods: Sequence[Any] = (replayed,),
    give: bool = True,
) -> ClientApp:
    """Make a user's Flower app; its arguments are those of ``own_loop``. ``give``: give the batches to ``training``."""
    app, make = ClientApp(), fresh or partial(copied, model)
    answer(app, make, method, lambda context: clients[int(context.node_config["partition-id"])])

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        with training(message, context, make(), method, clients[i] if give else None) as round:
            loss = loop(round.local, drawn(clients[i], i, round.number))
        if seen:
            seen(i, round.number, round.model)
        return round.message(samples_of(clients[i]), *([] if loss is None else [loss]))

    return app


def flower(model: nn.Module, method: Method, clients: Sequence[Any], rounds: int, **options: Any) -> Rounds:
    """Train through door 3, a user's Flower app on the in-process grid; ``options`` are those of ``own_app``."""
    strategy = OwnAppStrategy(model, method, rate=constant, calibrate=0, unit_scale=False, fraction_evaluate=0)
    found, app = noted(strategy), own_app(model, method, clients, **options)
    strategy.start(InProcessGrid(app, len(clients), {}), num_rounds=rounds)
    return [{name: torch.from_numpy(array) for name, array in found[n].items()} for n in range(1, rounds + 1)]


LOOPS: dict[str, Door] = {"own loop": own_loop, "flower": flower}
"""The doors that take a loop of the user's own."""
DOORS: dict[str, Door] = {"federation": federation, **LOOPS}


def through(
    door: str, model: nn.Module, method: Method, clients: Sequence[Samples], rounds: int = 2, size: int = 4, **options: Any
) -> Rounds:
    """Train through ``door``, one local epoch in batches of ``size`` per round; return the shared tensors after each round."""
    return DOORS[door](model, method, [SeededBatches(client.x, client.y, size) for client in clients], rounds, **options)


def wide(clients: Sequence[Samples]) -> list[Samples]:
    """Return the clients' samples in float64, scaled as the network takes them."""
    like = torch.zeros((), dtype=torch.float64)
    return [Samples(*client.batch(np.arange(len(client)), like)) for client in clients]


def apart(a: Rounds, b: Rounds) -> float:
    """Return the largest absolute difference of a tensor between two runs, over all rounds."""
    assert all(one.keys() == other.keys() for one, other in zip(a, b, strict=True))
    pairs = [(one[name].detach().double(), other[name].detach().double()) for one, other in zip(a, b, strict=True) for name in one]
    return max(float((one - other).abs().max()) for one, other in pairs)
