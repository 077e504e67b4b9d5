"""Run the layer-wise exchanges of a run at the server.

Each exchange has a ``Session``, which averages the clients' vectors, and a ``Carrier``, which takes the vectors
from the clients to the server and back: over gRPC, in one process, or by replay in Flower's messages.

A round of FedTAN needs such an exchange. A statistics-only exchange goes layer by layer if all its clients
can take part at the same time. Otherwise it takes one pass over the data per layer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from flwr.app import Message
from flwr.serverapp import Grid
from torch import nn

from fl_bn.bn.moments import Average, weighted_mean
from fl_bn.exchange.call import ExchangeFailed, Layer
from fl_bn.exchange.local import too_many
from fl_bn.exchange.session import NOT_JOINED, Session
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.flower.compat import log, simulates
from fl_bn.flower.deployment import exchange_in
from fl_bn.flower.in_process import InProcessGrid
from fl_bn.flower.layerwise.carriers import Carrier, GrpcCarrier, LocalCarrier, ReplayCarrier, configure
from fl_bn.flower.population import Client, RunFailed
from fl_bn.support.client_names import UNNAMED, ClientNames

BY_PASSES = "Statistics are measured by one pass per layer instead"


class Exchanges:
    """Run the layer-wise exchanges of one run.

    Args:
        settings: the carrier, the deadlines and the policy for missing clients.
        model: the converted network.
        layers: its layers with shared statistics, by name.
        average: the rule that combines the clients' moments.
        believing: whether the session uses the counts and batch sizes that clients report, see ``Session``.
        called: the clients' names in the log.
    """

    def __init__(
        self,
        settings: ExchangeSettings,
        model: nn.Module,
        layers: Mapping[str, Layer],
        average: Average = weighted_mean,
        believing: bool = True,
        called: ClientNames = UNNAMED,
    ) -> None:
        self.settings, self.average, self.believing, self.called = settings, average, believing, called
        self.layers = layers
        self.session = Session([], {})
        self._model = model
        self._carrier: Carrier | None = None
        self._grpc: GrpcCarrier | None = None
        self._cannot_meet = ""  # why statistics are measured by passes for the rest of the run; empty if they are not

    @property
    def carrier(self) -> str:
        """Return ``grpc``, ``local`` or ``replay``, the name of the carrier; empty until the first round chooses it."""
        return "" if self._carrier is None else self._carrier.name

    @property
    def messages(self) -> int:
        """Return the number of Flower messages that one client got in the last round."""
        return 1 if self._carrier is None else self._carrier.messages

    def check(self, grid: Grid) -> None:
        """Check that the carrier of the settings can serve the rounds of this grid.

        Args:
            grid: Flower's grid.

        Raises:
            RunFailed: the clients run in this process and the carrier is ``grpc``, or they do not and it is ``local``.
        """
        wanted, here = self.settings.carrier, isinstance(grid, InProcessGrid)
        if wanted == ("grpc" if here else "local"):
            raise RunFailed(
                f"exchange={wanted!r} does not work {'in one process' if here else 'here'}: clients "
                f"{'run one after the other' if here else 'run in other processes'}. Set exchange='auto'"
            )

    def round(self, grid: Grid, cohort: Sequence[Client], messages: Iterable[Message], timeout: float) -> list[Message]:
        """Send a round's train messages, run the layer-wise exchange of its clients, and return the replies.

        Afterwards ``session`` holds the details of the exchange.

        Args:
            grid: Flower's grid.
            cohort: the clients.
            messages: one train message per client.
            timeout: seconds for the round.

        Raises:
            RunFailed: in the first round, the chosen carrier cannot serve this grid and cohort.
        """
        if self._carrier is None:
            self._carrier = self._choose(grid, cohort, timeout)
        self.session = self._session(cohort, self.settings.policy, self.settings.deadline)
        return self._carrier.carry(grid, _by_client(cohort, messages), self.session, timeout)

    def measure(
        self, grid: Grid, clients: Sequence[Client], messages: Iterable[Message], timeout: float, memory: int, simulated: bool
    ) -> tuple[list[Message], str]:
        """Send the messages of a statistics-only exchange, run it layer by layer, and return the replies.

        Afterwards ``session`` holds the details. If the clients cannot all take part at the same time, the
        log gives the reason, and no later call tries again.

        Args:
            grid: Flower's grid.
            clients: the clients.
            messages: one message per client.
            timeout: seconds from one exchange to the next.
            memory: bytes of activations that all clients in this process may keep together.
            simulated: whether to try it in Flower's simulation, too, which may be unable to run all clients at once.

        Returns:
            The replies and the carrier's name. Both are empty if the clients cannot take part at the same
                time.
        """
        if self._cannot_meet:
            return [], ""
        carrier, self._cannot_meet = self._meeting(grid, clients, simulated)
        if carrier is None:
            log(logging.INFO, "%s. %s", self._cannot_meet, BY_PASSES)
            return [], ""
        share = memory // len(clients) if carrier.name == "local" else memory
        sent = _by_client(clients, messages)
        for message in sent.values():
            configure(message, {"exchange-memory": share})
        self.session = self._session(clients, "abort", max(timeout, self.settings.deadline), given_up="The exchange is given up")
        replies = carrier.carry(grid, sent, self.session, timeout, longest=timeout * (1 + len(self.layers)))
        self._cannot_meet = self._lasting()
        return replies, carrier.name

    def _lasting(self) -> str:
        """Return why the last session failed, if later sessions would fail, too; else empty.

        Later sessions would fail if no client took part, or if a client could not join.
        """
        session = self.session
        if session.batches:
            return ""
        kept_away = any(NOT_JOINED in why or ExchangeFailed.__name__ in why for why in session.dropped.values())
        return session.failure if kept_away else "" if session.failure else "no client took part"

    def late_clients(self, grid: Grid) -> set[int]:
        """Return clients that an earlier round dropped and that have not answered that round's message yet.

        They have died or hang, so no round waits for them again.
        """
        return set().union(*(carrier.late_clients(grid) for carrier in {self._carrier, self._grpc} if carrier is not None))

    def stop(self) -> None:
        """Close sockets and threads."""
        for carrier in {self._carrier, self._grpc} - {None}:
            assert carrier is not None
            carrier.stop()
        self._carrier = self._grpc = None

    def _session(self, cohort: Sequence[Client], policy: str, deadline: float, **options: str) -> Session:
        return Session(
            [client.index for client in cohort],
            self.layers,
            average=self.average,
            policy=policy,
            deadline=deadline,
            join_deadline=self.settings.join_deadline,
            samples={client.index: client.samples for client in cohort},
            believing=self.believing,
            called=self.called,
            **options,
        )

    def _service(self, grid: Grid) -> GrpcCarrier:
        """Return the run's gRPC carrier. In a deployment it has the address and the TLS certificates of ``fl-bn kit``.

        Raises:
            OSError: the carrier cannot listen on its address.
            ValueError: its certificates are wrong, or it would be unencrypted in an encrypted deployment.
        """
        if self._grpc is None:
            self._grpc = GrpcCarrier(exchange_in(self.settings, grid), self.layers, self.called)
        return self._grpc

    def _encrypted(self, grid: Grid) -> GrpcCarrier:
        """Return the run's gRPC carrier.

        Raises:
            RunFailed: its certificates are wrong, or the carrier would be unencrypted in an encrypted deployment.
        """
        try:
            return self._service(grid)
        except ValueError as error:
            raise RunFailed(str(error)) from error

    def _meeting(self, grid: Grid, clients: Sequence[Client], simulated: bool) -> tuple[Carrier | None, str]:
        """Return the carrier for a statistics-only exchange of ``clients``, and an empty text. If there is none: None and the reason.

        Args:
            grid: Flower's grid.
            clients: the clients.
            simulated: whether to try it in Flower's simulation, too, which may be unable to run all clients at once.
        """
        wanted, here = self.settings.carrier, isinstance(grid, InProcessGrid)
        if isinstance(grid, InProcessGrid) and grid.one_program:
            return None, "engine='vectorised' measures all clients at once, a pass at a time"
        if wanted == "replay" or isinstance(self._carrier, ReplayCarrier):
            return None, "exchange='replay' takes a message per layer, as passes do"
        if here:
            if wanted == "grpc":
                return None, "exchange='grpc' does not work in one process"
            problem = too_many(len(clients), self._model)
            return (None, problem) if problem else (LocalCarrier(), "")
        if wanted == "local":
            return None, "exchange='local' does not work where clients run in other processes"
        if simulates(grid) and not simulated and self._carrier is None:
            return None, "a simulation may be unable to run all clients at once (recalibration='exchange' tries it)"
        try:
            return self._service(grid), ""
        except (OSError, ValueError) as error:
            return None, str(error)

    def _choose(self, grid: Grid, cohort: Sequence[Client], timeout: float) -> Carrier:
        wanted, here = self.settings.carrier, isinstance(grid, InProcessGrid)
        if wanted == "replay":
            return ReplayCarrier()
        if here and wanted in ("auto", "local"):
            return LocalCarrier()
        self.check(grid)
        carrier = self._encrypted(grid)
        try:
            problem = carrier.meet(grid, cohort, timeout)
        except BaseException:
            self.stop()
            raise
        if not problem:
            return carrier
        self.stop()
        if wanted == "grpc":
            raise RunFailed(problem)
        log(logging.WARNING, "%s. exchange='auto' goes on with replay", problem)
        return ReplayCarrier()


def _by_client(clients: Sequence[Client], messages: Iterable[Message]) -> dict[int, Message]:
    by_node = {client.node: client.index for client in clients}
    return {by_node[message.metadata.dst_node_id]: message for message in messages}
