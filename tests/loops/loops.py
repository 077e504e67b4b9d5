"""A small federation of float64 for a user's own training loop, which the tests of this folder write in many ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import convert, local_round, server_state
from fl_bn.methods import Method
from tests.doors.doors import RATE, Loop

Step = Callable[[Any, Any, Tensor], None]
"""``loop(round, x, y)`` trains ``round.model`` on one batch, inside the block of ``local_round`` or ``training``."""


def net(seed: int = 0) -> nn.Sequential:
    """Build a network of float64 with two BatchNorm layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()


def clients() -> list[tuple[Tensor, Tensor]]:
    """Return a batch of each of three clients, of 16, 8 and 12 samples."""
    rng = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 4, generator=rng, dtype=torch.float64) * 3 + 5, torch.randint(0, 2, (n,), generator=rng)) for n in (16, 8, 12)]


def opened(method: Method, model: nn.Module | None = None, network: Callable[[], nn.Module] = net, **options: Any) -> Any:
    """Open a client's round 1 of 2, of ``model`` or of a network that is converted for it."""
    asked = server_state(network(), method, rounds=2, **options).instruction()
    return local_round(convert(network(), method) if model is None else model, method, asked, **options)


def trained(method: Method, loop: Step, network: Callable[[], nn.Module] = net) -> Any:
    """Return the round after ``loop`` trained the first client's batch, and the statistics pass before it."""
    x, y = clients()[0]
    with opened(method, network=network) as round:
        if method.report.name == "PASS":
            round.measure([(x, y)])
        loop(round, x, y)
    return round


def step(model: Callable[..., Tensor], own: nn.Module, x: Any, y: Tensor) -> None:
    """Make one step of SGD on the parameters of ``own``, along the gradient of the cross-entropy of ``model(x)``."""
    optimizer = torch.optim.SGD(own.parameters(), RATE)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def plain(round: Any, x: Any, y: Tensor) -> None:
    step(round.model, round.model, x, y)


def each(loop: Step) -> Loop:
    """Let ``loop`` train each batch in turn, which is a step."""

    def over(round: Any, batches: Any) -> None:
        for done, (x, y) in enumerate(batches, 1):
            round.model.zero_grad()
            loop(round, x, y)
            assert round.steps == done

    return over
