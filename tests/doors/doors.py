"""Train the same federation through each door, the user interfaces of fl-bn, with a user's training loop or fl-bn's own.

Network, data, batches and optimiser are the same. Each door returns the shared tensors after every round, to be compared.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD

from fl_bn import Federation, SeededBatches, convert, local_round, server_round, server_state
from fl_bn.bn.modules import copied
from fl_bn.exchange import Layer, LocalExchange, Session, Turns, admit, dismiss
from fl_bn.flower import InProcessGrid, OwnAppStrategy, answer, replayed, training
from fl_bn.methods import Method, Phase, StatisticsReport
from fl_bn.objectives import PLAIN, Objective
from tests.doors.inner import Samples
from tests.noted import noted

Tensors = dict[str, Tensor]
Rounds = list[Tensors]
Door = Callable[..., Rounds]
Loop = Callable[[Any, Any], Any]
"""``loop(round, batches)`` trains ``round.model`` in a round of ``local_round`` or ``training``; it may return the mean loss."""
Seen = Callable[[int, int, nn.Module], None]
"""``seen(client, round, network)`` is called after a client has trained."""
RATE = 0.1  # of all doors
PLAIN_START: dict[str, Any] = {"calibrate": 0, "unit_scale": False}
SAME_STEPS: dict[str, Any] = {"optimizer": partial(SGD, lr=RATE, momentum=0.9), "clip": "none"}
"""Arguments by which ``Federation`` trains as ``train`` does."""


def constant(round: int, rounds: int) -> float:
    """Return the learning rate of every round."""
    return RATE


def train(round: Any, batches: Any) -> float:
    """Train in a plain PyTorch loop; return the mean loss."""
    return steps(round.model, batches, round.instruction.learning_rate)


def steps(model: nn.Module, batches: Any, rate: float) -> float:
    """Make a step of SGD on each batch; return the mean loss."""
    optimizer, losses = SGD(model.parameters(), rate, momentum=0.9), []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses))


def pickled(state: Any) -> Any:
    """Return what is left of an object after it was saved."""
    return pickle.loads(pickle.dumps(state))


def drawn(batches: Any, client: int, round: int) -> Any:
    """Return a client's batches of a round."""
    return batches.epochs(0, client, round, 1) if isinstance(batches, SeededBatches) else batches


def samples_of(batches: Any) -> int:
    return len(batches.samples) if isinstance(batches, SeededBatches) else sum(len(y) for _, y in batches)


def client_of(context: Context) -> int:
    return int(context.node_config["partition-id"])


def session_of(model: nn.Module, cohort: Sequence[int]) -> Session:
    """Return the session of FedTAN's exchange in a round of these clients."""
    norms = {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
    return Session(cohort, {name: Layer(layer.num_features, torch.float64) for name, layer in norms.items()})


def federation(model: nn.Module, method: Method, clients: Sequence[Any], rounds: int, **options: Any) -> Rounds:
    """Train through door 1, ``Federation``, without clipping, as the other doors do."""
    fed = Federation(model, method, clients, **{**PLAIN_START, **SAME_STEPS, **options})
    names = fed.server.shared.tensors()
    return [copy.deepcopy({name: fed.model.state_dict()[name] for name in names}) for _ in fed.run(rounds)]


class Done(NamedTuple):
    """Hold a round of a loop of one's own: the server's state after it, its record, the replies, and what clients keep."""

    state: Any
    record: Any
    replies: list[Any]
    kept: dict[int, Any]


def own_rounds(
    model: nn.Module,
    method: Method,
    clients: Sequence[Any],
    cohorts: Sequence[Sequence[int]],
    *,
    loop: Loop = train,
    draw: Callable[[Any, int, int], Any] = drawn,
    samples: Sequence[int] = (),
    fresh: Callable[[], nn.Module] | None = None,
    seen: Seen | None = None,
    between: Callable[[Any], Any] | None = None,
    objective: Objective = PLAIN,
    **options: Any,
) -> Iterator[Done]:
    """Train through door 2, ``local_round`` and ``server_round``, a round for each of ``cohorts``.

    Args:
        draw: Returns a client's batches of a round.
        samples: The numbers of samples that clients report; empty: those that they have.
        fresh: Builds the network of a client; None: clients use ``model``.
        between: Gets the server's state and what clients keep after each round, and returns both for the next one.
        options: Further arguments of ``server_state``.
    """
    options = {"clients": len(clients), "rate": constant, "objective": objective, **options}
    state, kept = server_state(model, method, len(cohorts), **options), dict[int, Any]()

    def client(i: int, asked: Any, tokens: Mapping[int, str]) -> Any:
        mine = convert(fresh() if fresh else model, method)
        connect = partial(LocalExchange, tokens[i]) if tokens else None
        with local_round(mine, method, asked, *([kept[i]] if i in kept else []), objective=objective, connect=connect) as round:
            if method.reports(asked.phase) is StatisticsReport.PASS:
                round.measure(clients[i])
            loss = loop(round, draw(clients[i], i, asked.round))
        reply, kept[i] = round.reply(samples[i] if samples else samples_of(clients[i]), float("nan") if loss is None else loss, client=i)
        if seen:
            seen(i, asked.round, mine)
        return reply

    for cohort in cohorts:
        asked = state.instruction()
        session = session_of(state.model, cohort) if asked.phase is Phase.EXCHANGE else None
        tokens = {} if session is None else admit(session)
        tasks = [partial(client, i, asked, tokens) for i in cohort]
        try:
            replies = Turns(len(tasks)).run(tasks) if tokens else [task() for task in tasks]
        finally:
            dismiss(tokens)
        state, record = server_round(state, replies, session)
        yield Done(state, record, replies, kept)
        state, kept = between((state, kept)) if between else (state, kept)


def own_loop(model: nn.Module, method: Method, clients: Sequence[Any], rounds: int, **options: Any) -> Rounds:
    """Train through door 2 in rounds of all clients, which must succeed; ``options`` are those of ``own_rounds``."""
    found = Rounds()
    for done in own_rounds(model, method, clients, [range(len(clients))] * rounds, **options):
        assert done.record.aggregated, [client.refused for client in done.record.clients]
        found.append(copy.deepcopy(done.state.shared.tensors()))
    return found


def own_app(
    model: nn.Module,
    method: Method,
    clients: Sequence[Any],
    *,
    loop: Loop = train,
    draw: Callable[[Any, int, int], Any] = drawn,
    samples: Sequence[int] = (),
    fresh: Callable[[], nn.Module] | None = None,
    seen: Seen | None = None,
    objective: Objective = PLAIN,
    mods: Sequence[Any] = (replayed,),
    spies: Sequence[Any] = (),
    give: bool = True,
) -> ClientApp:
    """Make a user's Flower app; its arguments are those of ``own_rounds``.

    ``mods`` are those of training, ``spies`` those of the whole app. ``give``: give the batches to ``training``.
    """
    app, make = ClientApp(mods=list(spies)), fresh or partial(copied, model)
    answer(app, make, method, lambda context: clients[client_of(context)])

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        i = client_of(context)
        with training(message, context, make(), method, clients[i] if give else None, objective=objective) as round:
            loss = loop(round.local, draw(clients[i], i, round.number))
        if seen:
            seen(i, round.number, round.model)
        return round.message(samples[i] if samples else samples_of(clients[i]), *([] if loss is None else [loss]))

    return app


def flower(model: nn.Module, method: Method, clients: Sequence[Any], rounds: int, **options: Any) -> Rounds:
    """Train through door 3, a user's Flower app on the in-process grid; ``options`` are those of ``own_app``."""
    strategy = OwnAppStrategy(model, method, rate=constant, fraction_evaluate=0, **PLAIN_START)
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
