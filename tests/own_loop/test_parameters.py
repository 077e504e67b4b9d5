"""Networks whose parameters are no floats, or not float32: trained, or refused by name before round 1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fl_bn import Federation, convert, methods, set_buffer_roles
from fl_bn.methods import METHODS
from tests.conformance.cases import every_method
from tests.doors.doors import DOORS, apart, through, wide
from tests.doors.inner import Unconvertible
from tests.federation import random_samples
from tests.listed import listed
from tests.refusals import naming

CLIENTS = wide([random_samples(n, brightness=i / 2, seed=i) for i, n in enumerate((8, 9, 7))])
FEDAVG = methods.fedavg()


class First(nn.Module):
    """A network with one more parameter, before all others."""

    def __init__(self, extra: Tensor | None = None) -> None:
        super().__init__()
        if extra is not None:
            self.extra = nn.Parameter(extra, requires_grad=False)
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(192, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4)
        self.layers = nn.Sequential(*layers).double()

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise TypeError(f"inputs of {x.dtype}")
        return self.layers(x)  # type: ignore[no-any-return]


@pytest.mark.sample(3)
@pytest.mark.parametrize("extra", [torch.ones(2, dtype=torch.bool), torch.arange(3)], ids=["truths", "integers"])
@pytest.mark.parametrize("door", DOORS)
def test_an_integer_parameter_changes_nothing(door: str, extra: Tensor) -> None:
    """Inputs keep their type, and what is trained is what is trained without it."""
    ours = through(door, First(extra), methods.fbn(), CLIENTS, size=64)
    assert "extra" not in ours[-1]
    assert apart(ours, through(door, First(), methods.fbn(), CLIENTS, size=64)) == 0


@listed("extra", [torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.bfloat16)])
@listed("method", ["fedbn", "hbn", "fedtan"])
def test_what_cannot_travel_is_refused_by_name_before_round_1(method: str, extra: Tensor) -> None:
    with naming(f"extra is {extra.dtype}", Unconvertible):
        Federation(First(extra), METHODS[method](), [[(CLIENTS[0].x, CLIENTS[0].y)]])
    convert(First(extra.real.double()), METHODS[method]())  # control


def test_buffers_that_cannot_travel_may_stay() -> None:
    model = First()
    model.register_buffer("table", torch.ones(2, dtype=torch.complex64))
    with naming("table", Unconvertible):
        convert(model, FEDAVG)
    for role in ("constant", "kept"):
        through("own loop", set_buffer_roles(model, {"table": role}), FEDAVG, CLIENTS, size=64)


class Half(First):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.half()).float()


@every_method
def test_float16_trains(method_name: str) -> None:
    if method_name in ("in", "fedwon"):  # which take no network of linear layers
        return
    data = [[(client.x.float(), client.y)] for client in CLIENTS]
    fed = Federation(Half().half(), METHODS[method_name](), data, optimizer=lambda p: SGD(p, 0.01))
    first, second = (record.loss for record in fed.run(2))
    assert second < first
