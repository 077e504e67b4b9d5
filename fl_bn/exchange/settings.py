"""How the layer-wise exchange is carried, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from fl_bn.exchange.grpc.service import Certificates
from fl_bn.exchange.session import POLICIES
from fl_bn.support.loopback import is_loopback
from fl_bn.support.names import check_name

CARRIERS = ("auto", "grpc", "replay", "local")


@dataclass(frozen=True)
class ExchangeSettings:
    """``carrier``: ``grpc`` (a stream per client to a service in the ServerApp's process), ``replay`` (Flower messages, any cohort size),
    ``local`` (in process), or ``auto``: local in process, else grpc where the whole cohort can run at once, else replay.

    ``policy``, ``deadline`` and ``join_deadline`` (s): see ``Session``. ``host``: the name by which clients reach the ServerApp's machine;
    ``bind``: the address to listen on, empty for loopback where ``host`` is, else all; ``port`` 0 is any free one. Beyond loopback
    ``certificates`` are needed, unless ``insecure`` says that the deployment itself is.
    """

    carrier: str = "auto"
    policy: str = "abort"
    deadline: float = 30.0
    join_deadline: float = 30.0
    host: str = "127.0.0.1"
    bind: str = ""
    port: int = 0
    certificates: Certificates | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        check_name("the exchange's carrier", self.carrier, CARRIERS)
        check_name("the exchange's policy", self.policy, POLICIES)
        if not self.deadline > 0 or not self.join_deadline > 0 or not 0 <= self.port < 65536:
            raise ValueError(
                f"the exchange's deadlines must be > 0 s and its port 0..65535, but got {self.deadline}, {self.join_deadline}, {self.port}"
            )
        exposed = [host for host in (self.host, self.bind) if host and not is_loopback(host)]
        if exposed and self.certificates is None and not self.insecure:
            raise ValueError(
                f"the exchange would be in plaintext at {exposed[0]}: give exchange-certificate, exchange-key and exchange-authority, "
                "or set exchange-insecure=true where Flower's own connections are insecure, too"
            )

    @property
    def listen_on(self) -> str:
        return self.bind or ("127.0.0.1" if is_loopback(self.host) else "0.0.0.0")
