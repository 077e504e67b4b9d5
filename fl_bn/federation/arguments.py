"""Check a ``Federation``'s options, and arguments with one value for all or for each client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_bn.bn.modules import copied
from fl_bn.federation.composition import OBJECTS, check_rates
from fl_bn.federation.engines.clients import check_parameters
from fl_bn.federation.engines.vectorised import ENGINES, VECTORISED
from fl_bn.federation.engines.workers import MOST_WORKERS
from fl_bn.federation.loaders import Loader, check_loader, in_dtype
from fl_bn.federation.policy import RunSpec
from fl_bn.federation.settings import LocalTraining
from fl_bn.objectives import Objective
from fl_bn.options import Fits, check_fits, declared, is_a, option, refuse
from fl_bn.task import MetricObject, Task, extended

Loss = Callable[[Any, Any], Tensor]
Metrics = Mapping[str, MetricObject]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]


@dataclass(frozen=True, kw_only=True)
class FederationSpec(RunSpec):
    """Hold the options of a ``Federation``: every run's, and those of a run in this process.

    Args:
        clip: ``auto``: gradients are clipped if the method needs it, all clients
            use SGD, and the objective has no control variates. ``none``: gradients
            are not clipped.
        engine: ``sequential``: one client after the other. ``vectorised``: a
            cohort's clients together, in one vectorised program, which needs
            ``SeededBatches``.
        workers: The number of processes that compute clients, which changes no bit.
            0: this process, and worker processes once these save time, if clients
            train on a CPU.
    """

    clip: str = declared(LocalTraining, "clip", "auto")
    engine: str = option(
        "sequential",
        "fl-bn run and sweeps: sequential, or vectorised: the clients of a round as one batched program (for a GPU; equal up to "
        "the order of sums)",
        ENGINES,
    )
    workers: int = option(
        1,
        "fl-bn run and sweeps: number of processes that compute clients at the same time, with the same results bit for bit; 0: one per "
        "core, once the remaining rounds save more time than the processes take to start",
        f"0..{MOST_WORKERS}",
        run=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine == VECTORISED and self.workers > 1:
            why = "with engine='vectorised', workers must be 0 or 1, since one process computes the cohort"
            raise ValueError(f"{why}, but got {self.workers}")


def _function(value: Any) -> bool:
    return callable(value) and not isinstance(value, Optimizer | LRScheduler)


ARGUMENTS: Fits = {
    **OBJECTS,
    "clients": (len, "a list of loaders, one for each client, with at least 1 client"),
    "schedule": (callable, "a function of (round, rounds) that returns a factor"),
    "local_epochs": (lambda value: type(value) is int and value >= 1, "a whole number >= 1"),
    "task": is_a(Task, "Classification()"),
    "loss": (lambda value: value is None or _function(value), "a function of output and targets"),
    "metrics": (lambda value: value is None or isinstance(value, Mapping), "a dict of objects by name"),
    "optimizer": (_function, "a function that makes an optimiser of parameters"),
    "scheduler": (lambda value: value is None or _function(value), "a function that makes a scheduler of an optimiser"),
    "test": (lambda value: value is not None, "batches"),
}
"""The arguments of ``Federation``. Those that may differ per client must fit for each."""


class Trials:
    """Make each client's optimiser once, on a copy of the network, to check it.

    Attributes:
        optimizers: The id of each function in ``makers`` -> an optimiser that it
            made.
        rate: The largest learning rate of all clients, which the schedule scales,
            if any.
        shares: Each client's rate as a share of ``rate``, by default 1.

    Raises:
        ValueError: An optimiser does not fit the network or the objective.
    """

    def __init__(self, model: nn.Module, makers: Sequence[MakeOptimizer], objective: Objective) -> None:
        copy = copied(model)  # not ``model``, which a function that ignores its argument may know
        self.optimizers = {id(make): make(copy.parameters()) for make in makers}
        for optimizer in self.optimizers.values():
            check_parameters(optimizer, copy.parameters())
            if objective.travels:
                check_rates(objective, optimizer)
        rates = {key: rate_of(optimizer) for key, optimizer in self.optimizers.items()}
        self.rate = max((rate for rate in rates.values() if rate), default=None)
        self.shares = [(rates[id(make)] or self.rate or 1.0) / (self.rate or 1.0) for make in makers]


@dataclass(frozen=True)
class PerClient:
    """Hold one value per client: a sequence, or a function of a client's number."""

    values: Sequence[Any] | Callable[[int], Any]


def per_client(values: Sequence[Any] | Callable[[int], Any]) -> PerClient:
    """Mark an argument of ``Federation`` as one value per client.

    >>> from fl_bn import per_client
    >>> per_client(lambda client: 0.1 * client).values(2)
    0.2

    Args:
        values: A sequence, or a function of the client's number, from 0.
    """
    return PerClient(values)


def each(name: str, value: Any, clients: int, *, sequences: bool = True) -> tuple[Any, ...]:
    """Return the value of every client for the argument ``name``.

    ``value`` is one for all, a ``PerClient``, or, if ``sequences``, a list or tuple
    with one per client.

    Raises:
        ValueError: A value does not fit, or there are not as many as clients.
    """
    several = value.values if isinstance(value, PerClient) else value
    if several is value and not (sequences and isinstance(value, list | tuple)):
        check_fits(ARGUMENTS, {name: value}, others=", a list with one for each client, or per_client(...)")
        return (value,) * clients
    own = tuple(several(client) for client in range(clients)) if callable(several) else tuple(several)
    refuse((len(own) != clients, f"{name} has {len(own)} values for {clients} clients: give one for each client, or a single one for all"))
    for client, one in enumerate(own):
        check_fits(ARGUMENTS, {name: one}, f" of client {client}")
    return own


def tasks_of(task: Any, loss: Any, metrics: Any, clients: int) -> tuple[Task, ...]:
    """Return every client's task with its loss and metrics, each for all clients or per client.

    Clients with equal values get the same object.

    Raises:
        ValueError: A value or a metric's name does not fit, or there are not as
            many as clients.
    """
    tasks, losses, further = each("task", task, clients), each("loss", loss, clients), each("metrics", metrics, clients)
    made: dict[tuple[int, int, int], Task] = {}
    for own in zip(tasks, losses, further, strict=True):
        key = (id(own[0]), id(own[1]), id(own[2]))
        if key not in made:
            made[key] = own[0] if own[1] is None and not own[2] else extended(*own)
            made[key].state()  # if an object is no metric, this raises an error before the first round
    return tuple(made[id(one), id(of), id(more)] for one, of, more in zip(tasks, losses, further, strict=True))


def own_tests(test: Any, clients: int, dtype: torch.dtype, again: bool = True) -> tuple[Loader, ...] | None:
    """Return clients' test batches, if any, iterated over repeatedly if ``again``.

    Raises:
        ValueError: A value is no iterable of batches, or there are not as many as
            clients.
    """
    if test is None:
        return None
    own = each("test", test, clients, sequences=False)
    for client, batches in enumerate(own if isinstance(test, PerClient) else own[:1]):
        check_loader(f"test of client {client}" if isinstance(test, PerClient) else "test", batches, again)
    return in_dtype(own, dtype)


def rate_of(optimizer: Optimizer) -> float | None:
    """Return the largest learning rate of an optimiser's parameters, if above 0."""
    rates = [group["lr"] for group in optimizer.param_groups if isinstance(group.get("lr"), float | int | Tensor)]
    rate = max((float(one) for one in rates), default=0.0)
    return rate if rate > 0 else None


def same_rate(round: int, rounds: int) -> float:
    """Return 1, the learning rate's factor in every round."""
    return 1.0
