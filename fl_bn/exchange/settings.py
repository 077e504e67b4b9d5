"""Describe how the layer-wise exchange is carried."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from fl_bn.exchange.session import POLICIES
from fl_bn.options import REQUIRED, Options, Used, option, used_with
from fl_bn.support.loopback import is_loopback

CARRIERS = ("auto", "grpc", "replay", "local")
IN_ROUNDS = Used(
    "in rounds with a layer-wise exchange (fedtan, fedtan2, fedavg-alg2)", lambda config: config.exchanges_in_rounds(), ("method",)
)
EXCHANGES = Used(
    "where clients exchange layer by layer: in rounds (fedtan, fedtan2, fedavg-alg2), or to make statistics exact (hbn, fbn, static-bn, "
    "freeze-after=0, calibrate=-1; in the clear, without attackers, and not by passes)",
    lambda config: config.exchanges_in_rounds() or config.exchanges_to_measure(),
    ("method", "calibrate", "recalibration"),
)
over_grpc = partial(option, used=EXCHANGES & used_with("exchange", "auto", "grpc"))


@dataclass(frozen=True)
class Certificates(Options):
    """Name the PEM files of the exchange's service. Clients get the authority's certificate with the token.

    Attributes:
        certificate: The service's certificate.
        key: Its private key.
        authority: The certificate of the authority.
    """

    name: ClassVar[str] = "the exchange"
    prefix: ClassVar[str] = "exchange"

    certificate: Path = over_grpc(
        REQUIRED, "grpc: the service's certificate, PEM, valid for exchange-host; empty: plaintext", "path", run="", read=Path
    )
    key: Path = over_grpc(REQUIRED, "grpc: its private key, PEM", "path", run="", read=Path)
    authority: Path = over_grpc(
        REQUIRED, "grpc: the certificate authority's certificate, PEM; clients get it with their train message", "path", run="", read=Path
    )

    def check(self) -> None:
        """Check that the files are there and belong together. Clients have none of them.

        Raises:
            FileNotFoundError: One is missing.
            ValueError: They do not belong together.
        """
        for name, path in vars(self).items():
            if not Path(path).is_file():
                raise FileNotFoundError(f"the exchange's {name} is not a file: {path}")
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except ssl.SSLError as error:
            files = f"{self.certificate}, {self.key} and {self.authority}"
            raise ValueError(
                f"the exchange's {files} are no certificate, its key and an authority's certificate in PEM: {error}"
            ) from error


@dataclass(frozen=True)
class ExchangeSettings(Options):
    """Describe how the layer-wise exchange is carried. Each field is an option, with its key in docs/config.md.

    Attributes:
        carrier: ``grpc`` (a stream per client to a service in the ServerApp's process), ``replay`` (Flower
            messages, any cohort size), ``local`` (in process), or ``auto``: local in process, else grpc if
            the whole cohort can run at once, else replay.
        policy: What happens if a client dies or is late: ``abort`` or ``shrink``.
        deadline: Seconds that one exchange waits for the others, once half of them wait.
        join_deadline: Seconds that the others wait for a client to join a round.
        host: The name by which clients reach the ServerApp's machine.
        bind: The address to listen on; empty: loopback if ``host`` is, else all.
        port: The port to listen on; 0: any free one.
        certificates: Needed beyond loopback, unless ``insecure`` is set.
        insecure: Whether plaintext beyond this machine is allowed, since the deployment itself is insecure.

    Raises:
        ValueError: A value is out of range, or the exchange would be in plaintext.
    """

    name: ClassVar[str] = "the exchange"
    prefix: ClassVar[str] = "exchange"

    carrier: str = option(
        "auto",
        "how the layer-wise exchange is carried: grpc, replay (Flower messages, any cohort size, slow), local (fl-bn run); auto: local, "
        "else grpc if the cohort can run at once, else replay",
        CARRIERS,
        key="exchange",
        used=EXCHANGES,
    )
    policy: str = option(
        "abort",
        "for a client that dies or is late: abort fails the round for all, shrink goes on with weights over the others",
        POLICIES,
        used=IN_ROUNDS,
    )
    deadline: float = option(
        30.0,
        "how long one exchange waits for the others once half of them wait",
        "> 0",
        unit="seconds",
        key="exchange-timeout",
        used=EXCHANGES,
    )
    join_deadline: float = option(
        30.0,
        "how long the others wait for another client to join a round",
        "> 0",
        unit="seconds",
        key="exchange-join-timeout",
        used=EXCHANGES,
    )
    host: str = over_grpc("127.0.0.1", "grpc: the name by which clients reach the ServerApp's machine", "host name or address")
    bind: str = over_grpc("", "grpc: address to listen on; empty: loopback if exchange-host is, else all", "address")
    port: int = over_grpc(0, "grpc: port to listen on; 0: any free one", "0..65535")
    certificates: Certificates | None = None
    insecure: bool = over_grpc(False, "grpc: plaintext beyond this machine (where Flower is insecure, too)")

    def __post_init__(self) -> None:
        super().__post_init__()
        exposed = [host for host in (self.host, self.bind) if host and not is_loopback(host)]
        if exposed and self.certificates is None and not self.insecure:
            raise ValueError(
                f"the exchange would be in plaintext at {exposed[0]}: give exchange-certificate, exchange-key and exchange-authority, "
                "or set exchange-insecure=true where Flower's own connections are insecure, too"
            )

    @property
    def listen_on(self) -> str:
        """Return the address to listen on."""
        return self.bind or ("127.0.0.1" if is_loopback(self.host) else "0.0.0.0")
