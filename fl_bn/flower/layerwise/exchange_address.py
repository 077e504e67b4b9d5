"""Connect a client to the layer-wise exchange, if its site allows the address that the server names.

The node config lists the allowed addresses. Without this check, a server could make every site
connect to machines in its own network, and learn from the errors which ports are open.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fl_bn.exchange.call import Answer, Exchange, ExchangeFailed, Key, Request
from fl_bn.exchange.grpc.client import GrpcExchange
from fl_bn.exchange.local import LocalExchange
from fl_bn.flower.compat import deployed, log
from fl_bn.flower.layerwise.transcript import ReplayExchange
from fl_bn.flower.wire.messages import ADDRESS, HOST
from fl_bn.support.loopback import is_loopback
from fl_bn.support.wire import WireError

KEY = "exchange-addresses"  # of the node config
NOT_ALLOWED = f"this client does not connect to the address of the exchange: its node config ({KEY}) does not allow it"
FAILED = "the exchange failed at this client, whose own log says why"
GRPC_FIELDS = ("exchange-token", "exchange-address", "exchange-authority", "exchange-timeout", "exchange-patience")


@dataclass(frozen=True)
class ExchangeAddresses:
    """Hold the addresses to which a client may connect for a layer-wise exchange, each as HOST or HOST:PORT.

    Attributes:
        named: the entries of the node config. None: the node config has no such list. Then a
            deployed client connects to no host, and a client in a simulation connects only to
            its own machine.
    """

    named: tuple[str, ...] | None = None

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> ExchangeAddresses:
        """Read the allowed addresses from a node config.

        Raises:
            ValueError: the value is not a list of HOST or HOST:PORT, separated by commas.
        """
        if KEY not in node_config:
            return cls()
        named = tuple(part.strip().lower() for part in str(node_config[KEY]).split(",") if part.strip())
        if wrong := [name for name in named if not re.fullmatch(f"{HOST}|{ADDRESS}", name)]:
            problem = f"{KEY} in this client's node config must be a list of HOST or HOST:PORT, separated by commas"
            log(logging.ERROR, "%s, but got %r", problem, wrong[0])
            # the server sees this error, so the entry is only in the client's log
            raise ValueError(f"{problem}. The client's log shows the entry that is wrong")
        return cls(named)

    def check(self, address: str) -> None:
        """Check that this client may connect to ``address``.

        Raises:
            ExchangeFailed: the address is not allowed. The error, which the server sees, does
                not repeat the address. This client's log does.
        """
        host = address.rpartition(":")[0]
        if re.fullmatch(ADDRESS, address) and self._allows(host.lower(), address.lower()):
            return
        allowed = ", ".join(self.named) if self.named else "nothing"
        known = f"{KEY} in this client's node config allows {allowed}" if self.named is not None else f"its node config has no {KEY}"
        log(logging.WARNING, "the server asks this client to connect to the exchange at %r, which is refused: %s", address[:300], known)
        raise ExchangeFailed(NOT_ALLOWED)

    def _allows(self, host: str, address: str) -> bool:
        if self.named is None:
            return not deployed() and is_loopback(host.strip("[]"))
        return any(name in (host, address, host.strip("[]")) for name in self.named)


class SiteExchange(GrpcExchange):
    """Take part in an exchange over gRPC, with errors that tell the server nothing about this client's network.

    The client's own log has the details.
    """

    def _ask(self, request: Request, dtype: torch.dtype) -> Answer:
        try:
            return super()._ask(request, dtype)
        except ExchangeFailed as error:
            log(logging.WARNING, "%s", error)
            raise ExchangeFailed(FAILED) from error


def connect(addresses: ExchangeAddresses, config: Mapping[str, Any], transcript: Sequence[tuple[Key, Answer]], batch: int) -> Exchange:
    """Join the layer-wise exchange that a message names.

    Args:
        addresses: the addresses to which this client may connect.
        config: the message's checked config.
        transcript: the answers so far in an exchange by replay.
        batch: the number of samples in this client's batch.

    Raises:
        ExchangeFailed: ``addresses`` does not allow the address, or the client cannot join the
            exchange. The error reveals nothing about this client's network.
        WireError: the message lacks a field that the exchange's carrier (transport) needs.
    """
    carrier = config.get("exchange")
    if carrier == "replay":
        return ReplayExchange(transcript, batch)
    for field in ("exchange-token",) if carrier == "local" else GRPC_FIELDS:
        if field not in config:
            raise WireError("config", field, f"missing, but exchange={carrier!r} needs it")
    token = str(config["exchange-token"])
    if carrier == "local":
        return LocalExchange(token, batch)
    timeout, patience = float(config["exchange-timeout"]), float(config["exchange-patience"])
    addresses.check(address := str(config["exchange-address"]))
    return SiteExchange(address, token, batch, bytes(config["exchange-authority"]), timeout, patience)
