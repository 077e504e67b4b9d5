"""A BatchNorm layer that a network uses several times per step: an honest client without variance is not refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fl_bn.methods import METHODS
from tests.federation import random_samples
from tests.hostile.liars import LIAR, LocalTraining, LyingGrid, Samples, Spoil, nothing
from tests.in_process import Run, client_app, run

STEPS = LocalTraining(batch_size=4, steps=5)


class Siamese(nn.Module):
    """An encoder that sees the image and its mirror image; a layer of the head that is used once."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.flat, self.head = nn.BatchNorm1d(8), nn.Linear(8, 4)

    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x))).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.flat(torch.cat([self.encode(x), self.encode(x.flip(-1))], 1)))


def siamese(spoil: Spoil, method: str = "fedavg", rounds: int = 2, scale: float = 1.0) -> Run:
    """Four clients with pictures, and client 1 with grey ones: its activations have no variance at all. ``scale``: of the others'."""
    clients = [random_samples(8, brightness=0.5, seed=i) for i in range(5)]
    clients[LIAR] = Samples(torch.full_like(clients[LIAR].x, 128), clients[LIAR].y)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Siamese()
        model.conv.weight.data.mul_(scale)
    grid = LyingGrid(client_app(METHODS[method](), clients, STEPS, model=model), 5, spoil)
    return run(METHODS[method](), clients, rounds, settings=STEPS, grid=grid, model=model)


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("method", ["fedavg", "fedtan"])
def test_an_honest_client_without_variance_is_not_refused(method: str, scale: float) -> None:
    """Where all variances are small, and where only the one client's is."""
    for record in siamese(nothing, method, scale=scale).records:
        assert [c.refused for c in record.clients] == [""] * 5
