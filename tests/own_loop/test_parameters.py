"""Networks whose parameters are no floats, or not float32: trained, or refused by name before round 1."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fl_bn import Federation, convert, methods, server_state, set_buffer_roles
from fl_bn.composed import Unconvertible
from fl_bn.federation.local import Samples, evaluate
from fl_bn.methods import METHODS
from fl_bn.roles import Role, inputs_like, roles
from tests.doors.doors import ALL, apart, through, wide
from tests.federation import random_samples
from tests.listed import listed

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


@pytest.mark.parametrize(
    ("method", "extra"), [("fedavg", torch.ones(2, dtype=torch.bool)), ("fbn", torch.arange(3))], ids=["truths", "integers"]
)
@pytest.mark.parametrize("door", ALL)
def test_an_integer_parameter_changes_nothing(door: str, method: str, extra: Tensor) -> None:
    """Inputs keep their type, and what is trained is what is trained without it."""
    ours = through(ALL[door], First(extra), METHODS[method](), CLIENTS, size=64)
    assert "extra" not in ours[-1]
    assert apart(ours, through(ALL[door], First(), METHODS[method](), CLIENTS, size=64)) == 0
    assert roles(First(extra))["extra"] is Role.COUNTER


def test_inputs_become_numbers_of_the_network_s_type() -> None:
    for x in (torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8), torch.randn(4, 3, 8, 8)):
        samples = Samples(x, torch.arange(4))
        inputs, _ = samples.batch(np.arange(4), inputs_like(First(torch.arange(3))))
        assert inputs.dtype == torch.float64
    inputs, _ = samples.batch(np.arange(4), next(First(torch.arange(3)).parameters()))
    assert inputs.dtype == torch.int64  # control: the first parameter, whatever it is


def test_the_tensor_that_inputs_are_like() -> None:
    assert inputs_like(nn.Sequential()).dtype == torch.float32
    assert inputs_like(First(torch.ones(2, dtype=torch.complex64))).dtype == torch.float64
    buffers = nn.Module()
    buffers.register_buffer("ids", torch.arange(3))
    buffers.register_buffer("scale", torch.ones(1, dtype=torch.float64))
    assert inputs_like(buffers).dtype == torch.float64
    assert evaluate(nn.Flatten(), Samples(torch.randn(4, 2), torch.zeros(4, dtype=torch.int64))).result()["loss"] > 0


@listed(
    ("extra", "reason"),
    [
        (torch.ones(2, dtype=torch.complex64), r"^extra is torch\.complex64, but only real .*: store torch\.view_as_real"),
        (torch.ones(2, dtype=torch.bfloat16), r"^extra is torch\.bfloat16, a dtype that NumPy lacks, .*: keep the network"),
    ],
)
@listed("method", ["fedavg", "fedbn", "hbn", "fbn", "fedtan", "gn"])
def test_what_cannot_travel_is_refused_by_name_before_round_1(method: str, extra: Tensor, reason: str) -> None:
    with pytest.raises(Unconvertible, match=reason):
        Federation(First(extra), METHODS[method](), [[(CLIENTS[0].x, CLIENTS[0].y)]], progress=False)
    with pytest.raises(Unconvertible, match=reason):
        server_state(First(extra), METHODS[method](), rounds=1)
    if extra.is_complex():
        convert(First(extra), METHODS["single"]())  # control: nothing travels


def test_buffers_that_cannot_travel_may_stay() -> None:
    model = First()
    model.register_buffer("table", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(Unconvertible, match="or state its role, constant or kept, by set_buffer_roles"):
        convert(model, FEDAVG)
    for role in ("constant", "kept"):
        through(ALL["own loop"], set_buffer_roles(model, {"table": role}), FEDAVG, CLIENTS, size=64)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = First().half()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.half()).float()  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "hbn", "fbn", "fedtan", "gn"])
def test_float16_trains(method: str) -> None:
    data = [[(client.x.float(), client.y)] for client in CLIENTS]
    fed = Federation(Half(), METHODS[method](), data, optimizer=lambda p: SGD(p, 0.01), progress=False)
    losses = [record.loss for record in fed.run(4)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("model", [nn.Sequential(nn.Flatten()), nn.BatchNorm2d(3, affine=False), First().requires_grad_(False)])
def test_a_network_with_nothing_to_train_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="has no parameter with requires_grad=True"):
        Federation(model, FEDAVG, [[(CLIENTS[0].x, CLIENTS[0].y)]], progress=False)
    state = server_state(model, FEDAVG, rounds=1)
    with pytest.raises(ValueError, match="has no parameter with requires_grad=True"):
        state.instruction()
