"""For tests of secure aggregation: a grid that loses replies, and functions that search messages for one client's numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key

from fl_bn.flower import BatchNormStrategy, Rounds
from fl_bn.methods import INPUTS, Method
from tests.flower.inside import Samples, SecureAggregation, to_numpy, to_tensors
from tests.in_process import WatchedGrid, client_app
from tests.networks import seeded_network


class LosingGrid(WatchedGrid):
    """Reply with an error, as for a lost node, to certain messages. ``lost`` has pairs of a stage of the protocol and a client."""

    def __init__(self, app: ClientApp, clients: int, lost: Sequence[tuple[str, int]] = ()) -> None:
        super().__init__(app, clients)
        self.lost = set(lost)

    def _answer(self, message: Message) -> Message:
        client = int(self._contexts[message.metadata.dst_node_id].node_config["partition-id"])
        if (stage_of(message), client) in self.lost:
            return Message(Error(3, "the node is gone"), reply_to=message)
        return super()._answer(message)


def stage_of(message: Message) -> str:
    """Return the protocol's stage of a message; empty for a message without secure aggregation.

    Flower's mod removes the stage while the client works on the message. Read it before.
    """
    return str(message.content.config_records.get(RECORD_KEY_CONFIGS, {}).get(Key.STAGE, ""))


def strategy(method: Method, clients: Sequence[Samples], secure: SecureAggregation | None, **policy: object) -> BatchNormStrategy:
    rounds = Rounds(**{"clients": len(clients), "wait": 0.0, **policy})  # type: ignore[arg-type]
    return BatchNormStrategy(seeded_network("cnn"), method, rounds, secure=secure)


def measured(
    method: Method,
    clients: Sequence[Samples],
    secure: SecureAggregation | None,
    start: Mapping[str, np.ndarray] | None = None,
    grid: WatchedGrid | None = None,
    what: str = INPUTS,
) -> tuple[dict[str, np.ndarray], WatchedGrid]:
    """Make one statistics-only exchange; return the shared tensors after it, and the grid.

    Args:
        method: The method.
        clients: The samples of each client.
        secure: The settings of secure aggregation; None: without it.
        start: Tensors that replace the network's own before the exchange; None: no tensors.
        grid: The grid; None: a new one.
        what: The statistics that are measured.
    """
    grid = grid or WatchedGrid(client_app(method, clients), len(clients))
    transport = strategy(method, clients, secure).transport
    tensors = transport.shared.tensors() | to_tensors(start or {})
    transport.meet(grid)
    transport.timeout = 60.0
    (made,) = transport.statistics._passes(transport, 0, tensors, 1, measured=what)
    return to_numpy(made.tensors), grid


def masked_vectors(grid: WatchedGrid) -> list[np.ndarray]:
    """Return every masked vector that the server received, in order."""
    found = []
    for reply in grid.received:
        if reply.has_content() and (record := reply.content.config_records.get(RECORD_KEY_CONFIGS)) is not None:
            found += [bytes_to_ndarray(data) for data in record.get(Key.MASKED_PARAMETERS, [])][1:]  # type: ignore[union-attr, arg-type]
    return found


def numbers_in(message: Message) -> Iterator[np.ndarray]:
    """Yield, as flat arrays, all numbers in a message that can be read without a key.

    They are array records, serialised arrays in other records, and single numbers.
    """
    if not message.has_content():
        return
    for arrays in message.content.array_records.values():
        yield from (array.numpy().reshape(-1) for array in arrays.values())
    for record in [*message.content.config_records.values(), *message.content.metric_records.values()]:
        for value in record.values():
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, bytes):
                    try:
                        yield bytes_to_ndarray(item).reshape(-1)
                    except (ValueError, EOFError, OSError):
                        yield np.frombuffer(item, dtype=np.uint8)
                elif isinstance(item, int | float):
                    yield np.array([item])


def shows(message: Message, secret: np.ndarray, clipping_range: float = 8.0, bits: int = 22, tolerance: float = 1e-5) -> bool:
    """Return whether a message contains ``secret`` (d,), as floats or as a quantiser's integers.

    It does if more than half of the numbers are at their place in one array of the message.
    """
    integers = (secret + clipping_range) * (2**bits / (2 * clipping_range))
    for array in numbers_in(message):
        if array.size != secret.size:
            continue
        for wanted, off in ((secret, tolerance * (1 + np.abs(secret))), (integers, 1.0)):
            if np.mean(np.abs(array.astype("float64") - wanted) <= off) > 0.5:
                return True
    return False
