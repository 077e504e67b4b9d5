"""Run a federation around a user's own training loop, in plain torch (``local_round``) and in a Flower app (``training``)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import convert, local_round, server_round, server_state
from fl_bn.bn.moments import Moments
from fl_bn.bn.roles import batch_norms
from fl_bn.exchange import local
from fl_bn.exchange.local import LocalExchange, Turns
from fl_bn.federation.contract import ContractBroken
from fl_bn.federation.optimizers import SERVER_OPTIMIZERS, server_optimizer
from fl_bn.federation.server import Server
from fl_bn.federation.values import NOTHING, ClientState, Reply
from fl_bn.flower import InProcessGrid, OwnAppStrategy, answer, replayed, training
from fl_bn.methods import Method, Phase, StatisticsReport
from tests.doors.doors import session_of
from tests.noted import noted

__all__ = ["NOTHING", "ContractBroken", "SERVER_OPTIMIZERS", "ClientState", "Moments", "batch_norms", "server_optimizer"]
"""Names that are not public, for the tests of this folder."""

RATE = 0.1
Batch = tuple[Any, Tensor]
Loop = Callable[[Any, Any, Tensor], None]
"""``loop(round, x, y)`` trains ``round.model`` on one batch, inside the ``with`` block of ``local_round`` or ``training``."""


def net(seed: int = 0) -> nn.Sequential:
    """Build a network of float64 with two BatchNorm layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()


def clients() -> list[tuple[Tensor, Tensor]]:
    """Return a batch of each of three clients, of 16, 8 and 12 samples."""
    rng = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 4, generator=rng, dtype=torch.float64) * 3 + 5, torch.randint(0, 2, (n,), generator=rng)) for n in (16, 8, 12)]


def opened(method: Method, model: nn.Module | None = None, network: Callable[[], nn.Module] = net, **options: Any) -> Any:
    """Open a client's round 1 of 2, of ``model`` or of a network that is converted for it."""
    asked = server_state(network(), method, rounds=2, **options).instruction()
    return local_round(convert(network(), method) if model is None else model, method, asked, **options)


def trained(method: Method, loop: Loop, network: Callable[[], nn.Module] = net) -> Any:
    """Return the round after ``loop`` trained the first client's batch, and the statistics pass before it."""
    x, y = clients()[0]
    with opened(method, network=network) as round:
        if method.reports(Phase.TRAIN) is StatisticsReport.PASS:
            round.measure([(x, y)])
        loop(round, x, y)
    return round


def step(model: Callable[..., Tensor], own: nn.Module, x: Any, y: Tensor) -> None:
    """Make one step of SGD on the parameters of ``own``, along the gradient of the cross-entropy of ``model(x)``."""
    optimizer = torch.optim.SGD(own.parameters(), RATE)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def plain(round: Any, x: Any, y: Tensor) -> None:
    step(round.model, round.model, x, y)


def door_2(
    model: nn.Module,
    method: Method,
    clients: Sequence[Batch],
    loop: Loop,
    rounds: int = 2,
    between: Callable[[Server], Server] = lambda state: state,
    **options: Any,
) -> list[dict[str, Tensor]]:
    """Train with ``loop`` inside ``local_round``; return the shared tensors after every round.

    After each round, ``between`` gets the server's state, and returns the state for the next round.
    """
    state, found = server_state(model, method, rounds, clients=len(clients), **options), []
    kept: list[ClientState] = [NOTHING] * len(clients)
    for _ in range(rounds):
        asked, tokens, session = state.instruction(), dict[int, str](), None
        if asked.phase is Phase.EXCHANGE:
            session = session_of(state, len(clients))
            tokens = local.admit(session)

        def client(i: int, asked: Any = asked, tokens: dict[int, str] = tokens) -> Reply:
            (x, y), connect = clients[i], partial(LocalExchange, tokens[i]) if tokens else None
            with local_round(convert(model, method), method, asked, kept[i], connect=connect) as round:
                if method.reports(asked.phase) is StatisticsReport.PASS:
                    round.measure([(x, y)])
                loop(round, x, y)
            reply, kept[i] = round.reply(len(y), client=i)
            return reply

        tasks = [partial(client, i) for i in range(len(clients))]
        try:
            replies = Turns(len(tasks)).run(tasks) if tokens else [task() for task in tasks]
        finally:
            local.dismiss(tokens)
        state, record = server_round(state, replies, session)
        assert record.aggregated, [client.refused for client in record.clients]
        found.append(copy.deepcopy(state.shared.tensors()))
        state = between(state)
    return found


def door_3(model: nn.Module, method: Method, clients: Sequence[Batch], loop: Loop, rounds: int = 2) -> list[dict[str, Tensor]]:
    """Train with ``loop`` inside ``training``, in a user's own Flower app; return the shared tensors after every round."""
    app, found = ClientApp(), list[dict[str, Tensor]]()
    answer(app, lambda: copy.deepcopy(model), method, lambda context: [clients[int(context.node_config["partition-id"])]])

    @app.train(mods=[replayed])
    def train(message: Message, context: Context) -> Message:
        x, y = clients[int(context.node_config["partition-id"])]
        with training(message, context, copy.deepcopy(model), method, [(x, y)]) as round:
            loop(round, x, y)
        return round.message(len(y))

    strategy = OwnAppStrategy(model, method, fraction_evaluate=0, calibrate=0, unit_scale=False)
    found = noted(strategy)
    strategy.start(InProcessGrid(app, len(clients), {}), num_rounds=rounds)
    return [{name: torch.from_numpy(array) for name, array in found[n].items()} for n in range(1, rounds + 1)]


DOORS = {"own loop": door_2, "flower": door_3}


def cells(methods: Iterable[str], loops: Iterable[Loop], quick: Loop) -> list[Any]:
    """Return test cases: every method with every loop, in plain torch and in a Flower app.

    In the Flower app, all loops but ``quick`` are slow tests.
    """
    return [
        pytest.param(method, loop, door, id=f"{method}-{loop.__name__}-{door}", marks=[pytest.mark.slow] if slow else [])
        for method in methods
        for loop in loops
        for door in DOORS
        for slow in [door == "flower" and loop is not quick]
    ]
