# ruff: noqa: F401  # inner names, which the tests of this folder import from here
"""Submit requests of clients to an exchange session, keep the outcomes in lists, and control the clock."""

from __future__ import annotations

import torch

from fl_bn.exchange.call import Answer, ExchangeFailed, Join, Key, Layer, Local, Quantity, Request
from fl_bn.exchange.grpc.client import GrpcExchange
from fl_bn.exchange.grpc.service import ExchangeService, encode_request
from fl_bn.exchange.local import LocalExchange, Turns, admit, dismiss, end_task
from fl_bn.exchange.session import POLICIES, Session
from fl_bn.exchange.settings import Certificates, ExchangeSettings
from fl_bn.federation.values import to_numpy

MEAN, VARIANCE, MOMENTS, GRADIENTS, STATISTICS = Quantity
WIDE, NARROW = "stem.bn", ""  # float64 and 2 channels; float32 and 3 channels: the model itself
LAYERS = {WIDE: Layer(2, torch.float64), NARROW: Layer(3, torch.float32)}
BATCHES = (3, 1, 4)
Outcome = list[Answer | ExchangeFailed]


class Clock:
    """Replace ``time``. The time ``now`` changes only when a test sets it, or somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Cohort:
    """Hold a session with ``clients`` clients. The outcome of a request is a list, which stays empty until the session answers."""

    def __init__(self, clients: int = 3, policy: str = "abort", **options: object) -> None:
        self.session = Session(range(clients), LAYERS, policy=policy, **options)  # type: ignore[arg-type]
        self.outcomes: list[Outcome] = []

    def submit(self, client: int, request: Request) -> Outcome:
        outcome: Outcome = []
        self.outcomes.append(outcome)
        self.session.submit(client, request, outcome.append)
        return outcome

    def join(self, *batches: int) -> list[Outcome]:
        return [self.submit(client, Join(batch)) for client, batch in enumerate(batches)]

    def send(self, client: int, *values: float, key: Key | None = None, count: int = 1) -> Outcome:
        """Submit ``values`` of a client. They are the mean of the layer ``WIDE``, unless ``key`` names another quantity."""
        key = key or Key(WIDE, MEAN)
        return self.submit(client, Local(key, torch.tensor(values or (1.0, 1.0), dtype=LAYERS[key.layer].dtype), count))


def joined(policy: str = "abort", batches: tuple[int, ...] = BATCHES, **options: object) -> Cohort:
    cohort = Cohort(len(batches), policy, **options)
    cohort.join(*batches)
    return cohort


def answer(outcome: Outcome) -> Answer:
    (came,) = outcome
    assert isinstance(came, Answer), came
    return came


def reason(outcome: Outcome) -> str:
    (came,) = outcome
    assert isinstance(came, ExchangeFailed), came
    return str(came)


def local(*values: float, quantity: Quantity = MEAN, layer: str = WIDE, count: int = 1, dtype: torch.dtype | None = None) -> Local:
    return Local(Key(layer, quantity), torch.tensor(values, dtype=dtype or torch.float64), count)


GOOD = local(1.0, 1.0)
