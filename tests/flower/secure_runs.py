"""For tests of secure aggregation: a grid that loses replies, and functions that search messages for one client's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key

from fl_bn.flower import BatchNormStrategy, Rounds
from fl_bn.methods import INPUTS, Method
from tests.flower.inside import Samples, SecureAggregation, to_numpy, to_tensors
from tests.hostile.liars import what
from tests.in_process import WatchedGrid, client_app
from tests.networks import seeded_network


class LosingGrid(WatchedGrid):
    """Reply with an error, as for a lost node, to certain messages. ``lost`` has pairs of a stage of the protocol and a client."""

    def __init__(self, app: ClientApp, clients: int, lost: Sequence[tuple[str, int]] = ()) -> None:
        super().__init__(app, clients)
        self.lost = set(lost)

    def _answer(self, message: Message) -> Message:
        client = int(self._contexts[message.metadata.dst_node_id].node_config["partition-id"])
        if (what(message).partition(" ")[2], client) in self.lost:  # read before Flower's mod takes the stage away
            return Message(Error(3, "the node is gone"), reply_to=message)
        return super()._answer(message)


def measured(
    method: Method,
    clients: Sequence[Samples],
    secure: SecureAggregation | None,
    start: Mapping[str, np.ndarray] | None = None,
    grid: WatchedGrid | None = None,
) -> tuple[dict[str, np.ndarray], WatchedGrid]:
    """Make one statistics-only exchange, with ``start`` in place of the network's tensors; return the shared tensors, and the grid."""
    grid = grid or WatchedGrid(client_app(method, clients), len(clients))
    rounds = Rounds(clients=len(clients), wait=0.0)
    transport = BatchNormStrategy(seeded_network("cnn"), method, rounds, secure=secure).transport
    tensors = transport.shared.tensors() | to_tensors(start or {})
    transport.meet(grid)
    transport.timeout = 60.0
    (made,) = transport.statistics._passes(transport, 0, tensors, 1, measured=INPUTS)
    return to_numpy(made.tensors), grid


def masked_vectors(grid: WatchedGrid) -> list[np.ndarray]:
    """Return every masked vector that the server received, in order."""
    found = []
    for reply in grid.received:
        if reply.has_content() and (record := reply.content.config_records.get(RECORD_KEY_CONFIGS)) is not None:
            found += [bytes_to_ndarray(data) for data in record.get(Key.MASKED_PARAMETERS, [])][1:]  # type: ignore[union-attr, arg-type]
    return found
