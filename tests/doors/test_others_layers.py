"""Layers that change while they run, in ``Federation``: grown parameters and buffers, and memory that entries share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fl_bn import SeededBatches, methods, set_buffer_roles
from tests.doors.test_others_networks import batch, federation


class Grows(nn.Module):
    """Makes its layer when it first sees the number of features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.layer is None:
            self.layer = nn.Linear(x.shape[1], 8)
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "hbn", "fbn", "fixbn", "fedtan"])
def test_a_layer_that_the_first_forward_pass_makes_is_refused(method: str) -> None:
    """Before, it was trained and thrown away in each round, or ended in a KeyError."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), Grows(), nn.Linear(8, 2))
    with pytest.raises(ValueError, match=r"layer '2.layer' of the network was added (during|before) round 1.* make all layers in __init__"):
        list(federation(model, methods.METHODS[method](), test=[batch(4)]).run(2))
    seeded = [SeededBatches(*batch(8), 4)] * 2
    with pytest.raises(ValueError, match=r"layer '2.layer' of the network was added (during|before) round 1"):
        list(federation(model, methods.METHODS[method](), clients=seeded).run(2))


class Masked(nn.Module):
    """Has buffers whose entries share memory, as masks and anchors often do."""

    def __init__(self, dtype: torch.dtype, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("rows", torch.arange(8).to(dtype).expand(2, 8), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.get_buffer("rows")[0]


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("method", ["fedavg", "fbn"])
def test_buffers_whose_entries_share_memory(method: str, dtype: torch.dtype, persistent: bool) -> None:
    """Before, they ended in torch's error about a single memory location."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), Masked(dtype, persistent), nn.Linear(8, 2))
    fed = federation(model, methods.METHODS[method](), test=[batch(4)])
    list(fed.run(2))
    assert torch.equal(fed.model[2].rows, model[2].get_buffer("rows"))
    assert model[2].get_buffer("rows").stride(0) == 0  # the user's own stays as it is


class Bank(nn.Module):
    """Remembers all features that it has seen."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, 8, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.bank = torch.cat([self.get_buffer("bank"), x.detach().to(self.get_buffer("bank").dtype)])
        return x


@pytest.mark.parametrize(
    ("method", "dtype", "role"),
    [
        ("fedavg", torch.float32, "shared"),
        ("fedbn", torch.float32, "kept"),
        ("fedbn", torch.int64, ""),
        ("fedtan", torch.float32, "kept"),
    ],
)
def test_buffers_that_grow_are_named_at_the_client(method: str, dtype: torch.dtype, role: str) -> None:
    """Before, they ended the run after three rounds, or in torch's error when a network was loaded."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), Bank(dtype), nn.Linear(8, 2))
    set_buffer_roles(model, {"2.bank": role} if role else {})
    with pytest.raises(ValueError, match=r"buffer 2\.bank changed its shape from \(0, 8\) to \(\d+, 8\) in round 1.* persistent=False"):
        list(federation(model, methods.METHODS[method]()).run(2))


class ActNorm(nn.Module):
    """Takes scale and shift from the first batch, as in Glow."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        flag = self.get_buffer("initialized")
        if self.training and not flag:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 1e-6))
                flag.fill_(1)
        return self.scale * (x + self.shift)


@pytest.mark.parametrize(("method", "role", "said"), [("fedavg", "", 1), ("fbn", "", 1), ("fedavg", "kept", 0), ("fedbn", "", 0)])
def test_a_flag_that_every_round_starts_anew_is_named_once(method: str, role: str, said: int, caplog: pytest.LogCaptureFixture) -> None:
    """Before, nothing said that the layer is initialised again in each round."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), ActNorm(), nn.Linear(8, 2))
    set_buffer_roles(model, {"2.initialized": role} if role else {})
    list(federation(model, methods.METHODS[method]()).run(2))
    assert caplog.text.count("buffer 2.initialized changed in training, but it is never sent, so every round starts it") == said
