"""Connect a client to the layer-wise exchange, if its site allows the address that the server names.

The node config lists the allowed addresses. Else a server could make every site
connect to machines in its own network, and learn from the errors which ports are
open.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fl_bn.exchange.call import Answer, Exchange, ExchangeFailed, Key, Request
from fl_bn.exchange.grpc.client import GrpcExchange
from fl_bn.exchange.local import LocalExchange
from fl_bn.flower.compat import deployed, log
from fl_bn.flower.layerwise.transcript import ReplayExchange
from fl_bn.support.loopback import is_loopback
from fl_bn.support.wire import WireError

KEY = "exchange-addresses"  # of the node config: a list of HOST or HOST:PORT, separated by commas
NOT_ALLOWED = f"this client does not connect to the address of the exchange: its node config ({KEY}) does not allow it"
FAILED = "the exchange failed at this client, whose own log says why"
GRPC_FIELDS = ("exchange-token", "exchange-address", "exchange-authority", "exchange-timeout", "exchange-patience")


def check_address(address: str, node_config: Mapping[str, Any]) -> None:
    """Check that the client with this ``node_config`` may connect to ``address``, HOST:PORT.

    Without a list of addresses, a deployed client connects to no host, and a
    simulated one only to its own machine. ``ExchangeFailed`` does not repeat a
    forbidden address; the log does.
    """
    host = address.lower().rpartition(":")[0]
    if (listed := node_config.get(KEY)) is None:
        allowed = not deployed() and is_loopback(host.strip("[]"))
    else:
        allowed = not {part.strip().lower() for part in str(listed).split(",")}.isdisjoint({host, address.lower(), host.strip("[]")})
    if not allowed:
        log(logging.WARNING, "the server names the exchange %r, which is refused: %s in the node config is %r", address, KEY, listed)
        raise ExchangeFailed(NOT_ALLOWED)


class SiteExchange(GrpcExchange):
    """Take part in an exchange over gRPC, with errors that reveal nothing about this network."""

    def _ask(self, request: Request, dtype: torch.dtype) -> Answer:
        try:
            return super()._ask(request, dtype)
        except ExchangeFailed as error:
            log(logging.WARNING, "%s", error)
            raise ExchangeFailed(FAILED) from error


def connect(node_config: Mapping[str, Any], config: Mapping[str, Any], transcript: Sequence[tuple[Key, Answer]], batch: int) -> Exchange:
    """Join the layer-wise exchange that a message names.

    ``transcript`` has the answers so far in an exchange by replay, ``batch`` is the
    client's batch size. ``ExchangeFailed``: the client cannot join, or its site
    does not allow the address.
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
    check_address(address := str(config["exchange-address"]), node_config)
    return SiteExchange(address, token, batch, bytes(config["exchange-authority"]), timeout, patience)
