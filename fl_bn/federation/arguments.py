"""Check what a ``Federation`` is given: once for all clients, or as one value per client.

Its optimisers and schedulers are tried once before round 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_bn.bn.conversion import check_complete, hooked_parameters
from fl_bn.bn.copying import copied
from fl_bn.bn.roles import inputs_like
from fl_bn.federation.checkpoint import of_optimizer
from fl_bn.federation.composition import rate_for
from fl_bn.federation.defence import Defence
from fl_bn.federation.engines.clients import check_parameters
from fl_bn.federation.engines.vectorised import ENGINES, VECTORISED
from fl_bn.federation.engines.workers import MOST_WORKERS
from fl_bn.federation.loaders import Loader, check_clients, check_loader
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.methods import Method
from fl_bn.objectives import Objective
from fl_bn.support.names import check_name
from fl_bn.task import MetricObject, Task, extended

Loss = Callable[[Any, Any], Tensor]
Metrics = Mapping[str, MetricObject]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]


def check_arguments(
    model: nn.Module,
    method: Method,
    clients: Sequence[Loader],
    *,
    objective: Objective,
    server_optimizer: ServerOptimizer | None,
    defence: Defence,
    schedule: Callable[[int, int], float],
    local_epochs: int,
    evaluate_every: int,
    engine: str,
    workers: int,
) -> None:
    """Check arguments of a ``Federation`` each by itself; ``Federation`` says what they are.

    Raises:
        ValueError: An argument has a wrong type or value.
    """
    check_name("engine", engine, ENGINES)
    if not isinstance(workers, int) or not 0 <= workers <= MOST_WORKERS or (engine == VECTORISED and workers > 1):
        raise ValueError(
            f"workers must be 0..{MOST_WORKERS}; with engine='vectorised' it must be 0 or 1, since one process computes the cohort; "
            f"but got workers={workers} and engine={engine!r}"
        )
    check_clients(clients)
    wrong = [one for one in (local_epochs, evaluate_every) if isinstance(one, bool) or not isinstance(one, int) or one < 1]
    if not len(clients) or wrong:
        raise ValueError(
            f"a federation needs at least 1 client, and whole numbers >= 1 as local_epochs and evaluate_every, but got {len(clients)} "
            f"clients, local_epochs={local_epochs!r} and evaluate_every={evaluate_every!r}"
        )
    for argument, value, kind, such in (
        ("model", model, nn.Module, "a torch network"),
        ("method", method, Method, "methods.fbn()"),
        ("objective", objective, Objective, "FedProx(0.01)"),
        ("server_optimizer", server_optimizer, ServerOptimizer | None, "fedadam()"),
        ("defence", defence, Defence, "Defence(...)"),
    ):
        if not isinstance(value, kind):
            raise ValueError(f"{argument} must be an object such as {such}, but got {value!r}")
    if not callable(schedule):
        raise ValueError(f"schedule must be a function of (round, rounds) that returns a factor, but got {schedule!r}")
    for number, loader in enumerate(clients):
        check_loader(f"client {number}", loader)


def device_of(device: torch.device | str | None, model: nn.Module) -> torch.device:
    """Return the device on which clients train: ``device``, or the network's own if it is None.

    Raises:
        ValueError: No tensor can be computed on ``device`` here.
    """
    if device is None:
        return inputs_like(model).device
    try:
        torch.ones(1, device=device).item()
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        seen = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        raise ValueError(
            f"device must be one on which torch can compute here, such as {' or '.join(seen)}, but got {device!r}: "
            f"{str(error).partition(chr(10))[0]}"
        ) from error
    return torch.device(device)


def check_network(model: nn.Module) -> None:
    """Check that clients can train copies of a network.

    Raises:
        ValueError: The network has a lazy layer or a tensor on the meta device, or a parameter has a gradient hook.
    """
    check_complete(model)
    if empty := [name for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor) and tensor.is_meta]:
        raise ValueError(
            f"{empty[0]} is on the meta device, so it has a shape, but no values: give the network values first, by "
            "model.to_empty(device='cpu') and model.load_state_dict(...)"
        )
    if hooked := hooked_parameters(model):
        raise ValueError(
            f"parameter {hooked[0]} has a gradient hook, which the clients' copies of the network would not have: put what the "
            "hook does into the network (torch.autograd.Function), or write a loop of your own (docs/how-to/loop.md)"
        )


class Trials:
    """Make each client's optimiser and scheduler once, for a copy of the network, to check them and to read their learning rates.

    Args:
        model: The network; it stays unchanged.
        makers: Each client's function that makes its optimiser.
        objective: The local objective, which must fit the optimisers.

    Attributes:
        optimizers: The id of each function in ``makers`` -> an optimiser that it made.
        rate: The largest learning rate of all clients, which the federation's schedule scales. None: no optimiser has one.

    Raises:
        ValueError: An optimiser has other parameters than the network's, or does not fit the objective.
    """

    def __init__(self, model: nn.Module, makers: Sequence[MakeOptimizer], objective: Objective) -> None:
        self._makers = makers
        self._copy = copied(model)  # not ``model``, which a function that ignores its argument may know
        self.optimizers = {id(make): make(self._copy.parameters()) for make in makers}
        for optimizer in self.optimizers.values():
            check_parameters(optimizer, self._copy.parameters())
            rate_for(objective, optimizer)
        self._rates = {key: rate_of(optimizer) for key, optimizer in self.optimizers.items()}
        self.rate = max((rate for rate in self._rates.values() if rate), default=None)

    @property
    def shares(self) -> list[float]:
        """Return each client's learning rate as a share of ``rate``; 1 for a client without one."""
        rate = self.rate or 1.0
        return [(self._rates[id(make)] or rate) / rate for make in self._makers]

    @property
    def in_words(self) -> str:
        """Return the kinds and settings of all optimisers, each once."""
        return ", ".join(dict.fromkeys(of_optimizer(self.optimizers[id(make)]) for make in self._makers))


@dataclass(frozen=True)
class PerClient:
    """Hold one value per client for an argument of ``Federation``. The function ``per_client`` makes it.

    Attributes:
        values: A sequence with one value per client, or a function of a client's number.
    """

    values: Sequence[Any] | Callable[[int], Any]


def per_client(values: Sequence[Any] | Callable[[int], Any]) -> PerClient:
    """Mark an argument of ``Federation`` as one value per client.

    >>> from fl_bn import per_client
    >>> per_client(lambda client: 0.1 * client).values(2)
    0.2

    Args:
        values: One value per client, in order, or a function of the client's number, from 0.
    """
    return PerClient(values)


def each(what: str, value: Any, clients: int, expected: str, fits: Callable[[Any], bool], *, sequences: bool = True) -> tuple[Any, ...]:
    """Return the value of every client.

    Args:
        what: The name of the argument.
        value: One value for all clients, a ``PerClient``, or a list or tuple of one value per client.
        clients: The number of clients.
        expected: A description of allowed values, for the error message.
        fits: Tells whether a value is allowed.
        sequences: True: a list or tuple has one value per client. False: a list or tuple is one value for all clients.

    Raises:
        ValueError: There are more or fewer values than clients, or a value is not allowed.
    """
    if isinstance(value, PerClient):
        several = value.values
    elif sequences and isinstance(value, list | tuple):
        several = value
    else:
        if not fits(value):
            raise ValueError(f"{what} must be {expected}, a list with one for each client, or per_client(...), but got {_named(value)}")
        return (value,) * clients
    own = tuple(several(client) for client in range(clients)) if callable(several) else tuple(several)
    if len(own) != clients:
        raise ValueError(f"{what} has {len(own)} values for {clients} clients: give one for each client, or a single value for all")
    for client, one in enumerate(own):
        if not fits(one):
            raise ValueError(f"{what} of client {client} must be {expected}, but got {_named(one)}")
    return own


def _named(value: Any) -> str:
    """Return the type of a value in words, or the name of a class, for an error message."""
    return value.__name__ if isinstance(value, type) else f"a {type(value).__name__}"


def tasks_of(task: Any, loss: Any, metrics: Any, clients: int) -> tuple[Task, ...]:
    """Return the task of every client, with its loss and its further metrics.

    Clients with the same task, loss and metrics get the same object.

    Args:
        task: The task, or one for each client.
        loss: The loss, or one for each client; None: the task's loss.
        metrics: Further metrics, or those of each client; None: there are none.
        clients: The number of clients.

    Raises:
        ValueError: A value has a wrong type, there are more or fewer values than clients, or a metric's name is not valid.
    """
    tasks = each("task", task, clients, "a Task", lambda one: isinstance(one, Task))
    losses = each("loss", loss, clients, "a function of output and targets", lambda one: one is None or _function(one))
    further = each("metrics", metrics, clients, "a dict of objects by name", lambda one: one is None or isinstance(one, Mapping))
    made: dict[tuple[int, int, int], Task] = {}
    for own in zip(tasks, losses, further, strict=True):
        _check_loss(own[0] if own[1] is None else own[1])
        key = (id(own[0]), id(own[1]), id(own[2]))
        if key not in made:
            made[key] = own[0] if own[1] is None and not own[2] else extended(*own)
            made[key].state()  # if an object is no metric, this raises an error before the first round
    return tuple(made[id(one), id(of), id(more)] for one, of, more in zip(tasks, losses, further, strict=True))


def _check_loss(loss: Any) -> None:
    """Check that ``loss`` has no parameters to learn: neither itself, if it is a module, nor in a module among its attributes.

    Raises:
        ValueError: ``loss`` has a parameter to learn. Only the network's parameters are trained and averaged.
    """
    for part in (loss, *vars(loss).values()) if hasattr(loss, "__dict__") else ():
        if isinstance(part, nn.Module) and (learned := [name for name, p in part.named_parameters() if p.requires_grad]):
            raise ValueError(
                f"loss: {type(part).__name__} has a parameter to learn, {learned[0]!r}, but only the network's parameters are trained: "
                "make it a part of the network, whose forward then returns what the loss needs, or freeze it by requires_grad_(False)"
            )


def optimizers_of(optimizer: Any, clients: int) -> tuple[MakeOptimizer, ...]:
    """Return, for every client, the function that makes its optimiser, see ``each``."""
    return each("optimizer", optimizer, clients, "a function that makes an optimiser of parameters", _function)


def schedulers_of(scheduler: Any, clients: int) -> tuple[MakeScheduler | None, ...]:
    """Return, for every client, the function that makes its scheduler, or None, see ``each``."""
    made = "a function that makes a scheduler of an optimiser"
    return each("scheduler", scheduler, clients, made, lambda one: one is None or _function(one))


def own_tests(test: Any, clients: int, again: bool = True) -> tuple[Loader, ...] | None:
    """Return every client's test batches; None if ``test`` is None.

    Args:
        test: Batches for all clients, or a ``PerClient``.
        clients: The number of clients.
        again: Whether the batches are iterated over more than once.

    Raises:
        ValueError: A value cannot be iterated over as batches, or there are more or fewer values than clients.
    """
    if test is None:
        return None
    own = each("test", test, clients, "batches", lambda one: one is not None, sequences=False)
    for client, batches in enumerate(own if isinstance(test, PerClient) else own[:1]):
        check_loader(f"test of client {client}" if isinstance(test, PerClient) else "test", batches, again)
    return own


def _function(value: Any) -> bool:
    return callable(value) and not isinstance(value, Optimizer | LRScheduler)


def rate_of(optimizer: Optimizer) -> float | None:
    """Return the largest learning rate of an optimiser's parameters; None if none is a number above 0."""
    rates = [group["lr"] for group in optimizer.param_groups if isinstance(group.get("lr"), float | int | Tensor)]
    rate = max((float(one) for one in rates), default=0.0)
    return rate if rate > 0 else None


def same_rate(round: int, rounds: int) -> float:
    """Return 1, the factor of the learning rate in every round."""
    return 1.0


def factor_of(schedule: Callable[[int, int], float], round: int, rounds: int) -> float:
    """Return the factor of the learning rate that ``schedule`` gives for a round.

    Raises:
        ValueError: The factor is no finite number above 0.
    """
    factor = schedule(round, rounds)
    if isinstance(factor, bool) or not isinstance(factor, float | int) or not 0 < factor < math.inf:
        raise ValueError(
            f"schedule must return a finite number above 0 (the factor of the learning rate), but for round {round} returned {factor!r}"
        )
    return float(factor)
