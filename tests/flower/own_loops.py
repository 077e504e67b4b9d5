"""A user's own loop that calls a strategy's hooks, and a grid of another class than fl-bn's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from torch import Tensor

from fl_bn.flower import FBN, HBN, FedAvgBN, FedBN, FixBN, InProcessGrid, OwnAppStrategy, SiloBN
from tests.flower.own_apps import CLIENTS, own_app, pretrained

OWN: dict[str, tuple[Callable[..., OwnAppStrategy], dict[str, Any]]] = {
    "fedavg": (FedAvgBN, {}),
    "fixbn": (FixBN, {"freeze_after": 2}),
    "fedbn": (FedBN, {}),
    "silobn": (SiloBN, {}),
    "hbn": (HBN, {}),
    "fbn": (FBN, {}),
}


class OtherGrid(Grid):
    """Pass all calls on to an ``InProcessGrid``, but do not inherit from it, as a grid that is not fl-bn's."""

    def __init__(self, inner: InProcessGrid) -> None:
        self.inner = inner

    def set_run(self, run_id: Any) -> None:
        self.inner.set_run(run_id)

    @property
    def run(self) -> Any:
        return self.inner.run

    def create_message(self, *args: Any, **options: Any) -> Message:
        return self.inner.create_message(*args, **options)

    def get_node_ids(self) -> Iterable[int]:
        return self.inner.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.inner.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.inner.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return list(self.inner.send_and_receive(messages, timeout=timeout))


def tensors(arrays: ArrayRecord) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()}


def equal(a: ArrayRecord, b: ArrayRecord) -> bool:
    one, other = tensors(a), tensors(b)
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def grid(name: str, **options: Any) -> InProcessGrid:
    return InProcessGrid(own_app(name, **options), CLIENTS, {})


def begin() -> ArrayRecord:
    return ArrayRecord(pretrained().state_dict())


def rounds(strategy: OwnAppStrategy, over: Grid, number: int, arrays: ArrayRecord | None = None, first: int = 1) -> Iterator[ArrayRecord]:
    """Train ``number`` rounds with the fewest calls that a loop needs; yield the shared arrays after each.

    Args:
        strategy: The strategy.
        over: The grid.
        number: The number of rounds.
        arrays: The arrays to start from; None: those of ``begin``.
        first: The number of the first round.
    """
    arrays = begin() if arrays is None else arrays
    for round in range(first, first + number):
        replies = over.send_and_receive(strategy.configure_train(round, arrays, ConfigRecord(), over))
        arrays = strategy.aggregate_train(round, replies)[0] or arrays
        yield arrays
