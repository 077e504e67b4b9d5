"""Carry out client's and server's rounds around a user's own training loop and messages."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from fl_bn.bn.conversion import check_converted, convert
from fl_bn.bn.roles import buffers_in_words
from fl_bn.exchange.session import Session
from fl_bn.federation.aggregation import NO_DEFENCE, Defence
from fl_bn.federation.client import LocalRound
from fl_bn.federation.composition import OBJECTS, check_composition, check_layers, check_learns
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.policy import ServerPolicy, constant_rate
from fl_bn.federation.record import RoundRecord, over_samples
from fl_bn.federation.recording import Connect
from fl_bn.federation.replies import TRAINED, checked
from fl_bn.federation.schema import START
from fl_bn.federation.server import Server
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.values import NOTHING, ClientState, Instruction, Reply
from fl_bn.methods import Method, Phase
from fl_bn.objectives import PLAIN, Objective
from fl_bn.options import check_fits

LOGGER = logging.getLogger("flwr")
_SAID = set[tuple[str, str]]()
"""Networks and methods whose lower learning rate is in the log already."""


@contextmanager
def local_round(
    model: nn.Module,
    method: Method,
    instruction: Instruction,
    kept: ClientState = NOTHING,
    *,
    objective: Objective = PLAIN,
    connect: Connect | None = None,
) -> Iterator[LocalRound]:
    """Open the client's half of a round around a training loop of your own.

    >>> from fl_bn import convert, local_round, methods, server_state
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    >>> state, model = server_state(net, methods.fixbn(), rounds=2), convert(net, methods.fixbn())
    >>> with local_round(model, methods.fixbn(), state.instruction()) as round:
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     model(torch.randn(16, 4)).square().mean().backward()
    ...     optimizer.step()
    >>> reply, kept = round.reply(samples=16)  # send the reply, keep the state; more: docs/how-to/loop.md

    Args:
        model: ``convert(net, method)``, the client's own copy of the network, which
            is trained.
        method: The server's method.
        instruction: The server's instruction.
        kept: The state from the client's last ``round.reply``. Default: none, at
            first.
        objective: The local objective. With one, the loop must call
            ``round.backward``.
        connect: Joins FedTAN's layer-wise exchange, see ``recording.Connect``.

    Yields:
        The client's round. After the block, its ``reply`` makes the reply to the
        server.

    Raises:
        ValueError: The arguments do not fit, or another round still trains
            ``model``.
        ContractBroken: The network or the loop did not keep docs/contract.md.
    """
    check_fits(OBJECTS, {"model": model, "method": method, "instruction": instruction, "kept": kept, "objective": objective})
    settings = LocalTraining(batch_size=2, epochs=1, objective=objective)
    check_composition(method, settings)
    check_layers(model, method)
    check_converted(model, method)
    if instruction.trains and kept.round >= instruction.round:
        # of the state of an earlier run, the client's own tensors stay, not its control variates and buffers
        own_tensors = {name: tensors for name, tensors in kept.sections.items() if name == "local"}
        kept = replace(kept, round=0, sections=own_tensors)
    round = LocalRound(
        model,
        method,
        instruction,
        kept,
        settings,
        connect,
        in_own_loop=True,
    )
    if not round.trains:
        yield round
        return
    _say_rate(round)
    with round.open():
        yield round


def client_model(model: nn.Module, method: Method, instruction: Instruction, kept: ClientState = NOTHING) -> nn.Module:
    """Return a client's network in evaluation mode: the server's tensors, and its own ones (FedBN).

    >>> from fl_bn import client_model, methods, server_state
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    >>> state = server_state(net, methods.fedbn(), rounds=2)
    >>> client_model(net, methods.fedbn(), state.instruction()).training
    False

    Args:
        model: The unconverted network. It stays unchanged.
        method: The server's method.
        instruction: The server's newest instruction.
        kept: The state from the client's last ``round.reply``. Default: none, at
            first.

    Raises:
        ValueError: ``model`` or ``method`` differs from the server's.
    """
    sections = {name: own for name, own in instruction.sections.items() if name in ("weights", "statistics", START)}
    own = LocalRound(convert(model, method), method, replace(instruction, phase=Phase.MEASURE, sections=sections), kept)
    return own.model.eval()


def _say_rate(round: LocalRound) -> None:
    """Say once that the learning rate drops with frozen statistics."""
    instruction, key = round.instruction, (round.network.signature, round.method.name)
    if instruction.rate_share < 1 and key not in _SAID:
        _SAID.add(key)
        LOGGER.info(
            "round %d: the statistics are frozen from now on, and %s lowers the learning rate to %.3g: step with round.instruction."
            "learning_rate, or multiply your own rate by round.instruction.rate_share (%.3g), or the network may collapse",
            instruction.round, round.method.name, instruction.learning_rate, instruction.rate_share,
        )  # fmt: skip


def server_state(
    model: nn.Module,
    method: Method,
    rounds: int,
    *,
    clients: int = 1,
    optimizer: ServerOptimizer | None = None,
    defence: Defence = NO_DEFENCE,
    objective: Objective = PLAIN,
    rate: Callable[[int, int], float] = constant_rate,
) -> Server:
    """Make the server's state before round 1, for ``server_round``.

    >>> from fl_bn import methods, server_state
    >>> state = server_state(nn.Linear(2, 1), methods.fedavg(), rounds=5)
    >>> state.instruction().round
    1

    Args:
        model: The unconverted network. The run starts with its tensors.
        method: The method of the run.
        rounds: The run's number of rounds, at least 1, for phases and learning
            rates.
        clients: The number of all clients.
        optimizer: Steps along the pseudo-gradient of the weights. Default: they
            become the clients' average.
        defence: Rules against Byzantine clients. Default: none.
        objective: The clients' local objective. Default: the loss alone.
        rate: ``rate(round, rounds)`` returns the instructions' learning rate,
            finite and >= 0, which your own loop may ignore. To pickle the state,
            give no ``lambda``. Default: 0.05.

    Returns:
        The state. Its ``instruction()`` is for the next round's clients.

    Raises:
        ValueError: The arguments do not fit, the method needs BatchNorm but
            ``model`` has none, ``rounds`` is no whole number >= 1, or ``rate``
            gives a wrong rate.
    """
    parts = {"optimizer": optimizer, "defence": defence, "objective": objective}
    check_fits(OBJECTS, {"model": model, "method": method, "rounds": rounds, **parts})
    settings = LocalTraining(batch_size=2, epochs=1, objective=objective)
    check_composition(method, settings, robust=defence.active)
    check_learns(model)
    policy = ServerPolicy(clients=clients, rate=rate, auxiliary=settings.auxiliary, objective=objective.described)
    for number in (1, rounds):
        policy.scheduled(number, rounds)
    server = Server(model, method, policy, rounds, optimizer=optimizer, defence=defence)
    if buffers := buffers_in_words(server.model):
        LOGGER.info("%s", buffers)
    return server


def server_round(state: Server, replies: Sequence[Reply], exchange: Session | None = None) -> tuple[Server, RoundRecord]:
    """Combine the clients' ``replies`` to ``state.instruction()``.

    >>> from fl_bn import convert, local_round, methods, server_round, server_state
    >>> net, method = nn.Linear(2, 1), methods.fedavg()
    >>> state, model = server_state(net, method, rounds=1), convert(net, method)
    >>> with local_round(model, method, state.instruction()) as round:
    ...     model(torch.randn(10, 2)).square().mean().backward()
    ...     torch.optim.SGD(model.parameters(), lr=0.1).step()
    >>> server_round(state, [round.reply(samples=10)[0]])[1].aggregated
    True

    Args:
        state: The state before the round. It stays unchanged.
        replies: The clients' replies, the first value of ``round.reply``.
        exchange: The session of FedTAN's layer-wise exchange, if any.

    Returns:
        The state after the round, and its record, with refused replies and the
        reasons.

    Raises:
        ValueError: The run is over, or ``rate`` gives a wrong learning rate.
    """
    if state.round >= state.rounds:
        raise ValueError(
            f"the run of {state.rounds} rounds is over: make the state with the number of all rounds, server_state(..., rounds=...)"
        )
    new = copy.deepcopy(state, {id(state.source): state.source})  # the network that was given stays as it is
    instruction = new.begin(state.round + 1)
    new.conclude(checked(replies, new.expects(instruction.round, instruction.phase), new.policy.clients, exchange))
    new.record = _with_metrics(new.record, replies)
    for warning in new.warnings(last=new.round == new.rounds):
        LOGGER.warning("%s", warning)
    return new, new.record


def _with_metrics(record: RoundRecord, replies: Sequence[Reply]) -> RoundRecord:
    """Return the record with the metrics of ``round.reply``, and their weighted means."""
    samples = {client.client: client.samples for client in record.accepted}
    known = [one for one in replies if isinstance(one, Reply) and type(one.client) is int and one.client in samples]
    replies = sorted(known, key=lambda one: one.client)
    given = {one.client: {name: value for name, value in one.metrics.items() if name not in TRAINED.fields} for one in replies}
    given = {client: own for client, own in given.items() if own}
    return replace(record, client_metrics=given, own_metrics=over_samples([(samples[client], own) for client, own in given.items()]))
