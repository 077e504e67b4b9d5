"""Define the settings of the layer-wise exchange: carrier, deadlines, certificates."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fl_bn.exchange.session import POLICIES
from fl_bn.options import Options, Used, option
from fl_bn.support.loopback import is_loopback

CARRIERS = ("auto", "grpc", "replay", "local")
EXCHANGES = Used(
    "clients that exchange layer by layer: in rounds (fedtan, fedtan2, fedavg-alg2), or to make statistics exact (hbn, fbn, static-bn, "
    "freeze-after=0, calibrate=-1; not with secure-aggregation=true or an attack)",
    lambda config: config.exchanges(),
)


@dataclass(frozen=True)
class Certificates:
    """Name the server's PEM files for TLS of the exchange's gRPC service.

    Attributes:
        certificate: It must be valid for the host name that clients use.
        authority: The signing authority's certificate, which clients get in their
            train message.
    """

    certificate: Path
    key: Path
    authority: Path

    def check(self) -> None:
        """Check that the files exist, are in PEM and belong together, or raise ``ValueError``."""
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except OSError as error:  # which an SSLError is, too
            files = ", ".join(f"{n} {path}{'' if path.is_file() else ' (no such file)'}" for n, path in vars(self).items())
            raise ValueError(f"expected a certificate, its key and its authority's certificate, in PEM, but of {files}: {error}") from error


@dataclass(frozen=True)
class ExchangeSettings(Options):
    """Describe how the layer-wise exchange reaches the clients.

    In a deployment, the server's file gives address and certificates
    (``flower.deployment``).

    Attributes:
        carrier: ``grpc`` is a gRPC service in the ServerApp's process. ``replay``
            uses Flower messages. ``local`` needs all clients in one process.
            ``auto`` chooses ``local`` if it can, else ``grpc`` if the whole cohort
            can run at once, else ``replay``.
        policy: After a client is dropped, ``abort`` fails the round, ``shrink``
            goes on.
        deadline: Seconds that an exchange waits for late clients, once half of them
            wait.
        bind: Empty: loopback if ``host`` is a loopback address, else all addresses.
        certificates: Needed for connections from other machines, if not
            ``insecure``.
        insecure: Set it only if Flower's own connections are unencrypted, too.

    Raises:
        ValueError: A value is out of range, or connections would be unencrypted.
    """

    name: ClassVar[str] = "the exchange"
    prefix: ClassVar[str] = "exchange"

    carrier: str = option(
        "auto",
        "how the layer-wise exchange is carried: grpc, replay (Flower messages, any number of clients, slow), local (fl-bn run); auto: "
        "local with fl-bn run, otherwise grpc if all clients of a round can run at once, otherwise replay",
        CARRIERS,
        key="exchange",
        used=EXCHANGES,
    )
    policy: str = option("abort", "what happens if a client dies or is late", POLICIES, hidden=True)
    deadline: float = option(30.0, "how long an exchange waits for late clients, seconds", "> 0", hidden=True)
    join_deadline: float = option(30.0, "how long clients wait for another client to join a round, seconds", "> 0", hidden=True)
    host: str = option("127.0.0.1", "the name by which clients reach the ServerApp's machine", "host name or address", hidden=True)
    bind: str = option("", "address to listen on; empty: as host says", "address", hidden=True)
    port: int = option(0, "the first port to try; 0: any free port", "0..65535", hidden=True)
    ports: int = option(1, "how many ports are tried, from port on", ">= 1", hidden=True)
    certificates: Certificates | None = None
    insecure: bool = option(False, "allow unencrypted connections from other machines", hidden=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        exposed = [host for host in (self.host, self.bind) if host and not is_loopback(host)]
        if exposed and self.certificates is None and not self.insecure:
            raise ValueError(f"the exchange would listen at {exposed[0]} without encryption: give certificates=..., or set insecure=True")

    @property
    def listen_on(self) -> str:
        """Return the address to listen on."""
        return self.bind or ("127.0.0.1" if is_loopback(self.host) else "0.0.0.0")
