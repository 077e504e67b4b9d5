"""Give every client of a federation a value of its own: a task, a loss, metrics, an optimiser, test batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_bn.federation.loaders import Loader, check_loader
from fl_bn.task import MetricObject, Task, extended

Loss = Callable[[Any, Any], Tensor]
Metrics = Mapping[str, MetricObject]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]


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
