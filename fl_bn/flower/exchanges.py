"""The server's side of a layer-wise exchange: opens a session per round, and picks the carrier that the grid allows."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from flwr.app import Message
from flwr.serverapp import Grid
from torch import nn

from fl_bn.exchange.session import Session, exchanged_layers
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.flower.carriers import Carrier, GrpcCarrier, LocalCarrier, ReplayCarrier
from fl_bn.flower.in_process import InProcessGrid
from fl_bn.flower.log import log
from fl_bn.flower.population import Client, RunFailed
from fl_bn.moments import Average, weighted_mean


class Exchanges:
    """Carries FedTAN's exchanges for one run. ``average`` combines what the clients send; ``believing``: see ``Session``."""

    def __init__(self, settings: ExchangeSettings, model: nn.Module, average: Average = weighted_mean, believing: bool = True) -> None:
        self.settings, self.average, self.believing = settings, average, believing
        self.layers = exchanged_layers(model)
        self.session = Session([], {})
        self._carrier: Carrier | None = None

    @property
    def carrier(self) -> str:
        """The carrier's name, once it is chosen."""
        return "" if self._carrier is None else self._carrier.name

    @property
    def messages(self) -> int:
        """How many Flower messages one client got in the last round."""
        return 1 if self._carrier is None else self._carrier.messages

    def round(self, grid: Grid, cohort: Sequence[Client], messages: Iterable[Message], timeout: float) -> list[Message]:
        """Send a round's train messages and carry its exchange; the replies. ``session`` then says what happened.

        Raises:
            RunFailed: in the first round, where the carrier asked for cannot serve this grid and cohort.
        """
        if self._carrier is None:
            self._carrier = self._choose(grid, cohort, timeout)
        settings, by_node = self.settings, {client.node: client.index for client in cohort}
        self.session = Session(
            [client.index for client in cohort],
            self.layers,
            average=self.average,
            policy=settings.policy,
            deadline=settings.deadline,
            join_deadline=settings.join_deadline,
            samples={client.index: client.samples for client in cohort},
            believing=self.believing,
        )
        return self._carrier.carry(grid, {by_node[m.metadata.dst_node_id]: m for m in messages}, self.session, timeout)

    def owing(self, grid: Grid) -> set[int]:
        """Clients dropped in an earlier round that have still not answered its message: dead or hanging, so not to be waited for again."""
        return set() if self._carrier is None else self._carrier.owing(grid)

    def stop(self) -> None:
        """Close sockets and threads."""
        if self._carrier is not None:
            self._carrier.stop()
            self._carrier = None

    def _choose(self, grid: Grid, cohort: Sequence[Client], timeout: float) -> Carrier:
        wanted, here = self.settings.carrier, isinstance(grid, InProcessGrid)
        if wanted == "replay":
            return ReplayCarrier()
        if here and wanted in ("auto", "local"):
            return LocalCarrier()
        if here or wanted == "local":
            raise RunFailed(
                f"exchange={wanted!r} does not work {'in one process' if here else 'here'}: clients "
                f"{'run one after the other' if here else 'run in other processes'}: set exchange='auto'"
            )
        carrier = GrpcCarrier(self.settings, self.layers)
        try:
            problem = carrier.meet(grid, cohort, timeout)
        except BaseException:
            carrier.stop()
            raise
        if not problem:
            return carrier
        carrier.stop()
        if wanted == "grpc":
            raise RunFailed(problem)
        log(logging.WARNING, "%s. exchange='auto' goes on with replay", problem)
        return ReplayCarrier()
