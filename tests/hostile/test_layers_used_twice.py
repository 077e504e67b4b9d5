"""A BatchNorm layer that a network uses several times per step: honest variances are not refused, and no lie about it is believed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from fl_bn.federation.defence import undercut
from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.unrecorded import unrecorded
from fl_bn.layers import updates
from fl_bn.methods import METHODS
from fl_bn.moments import Running
from tests.federation import random_samples
from tests.hostile.liars import LIAR, LyingGrid, Spoil
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


def nothing(message: Message, asked: str, content: RecordDict) -> None:
    """Nobody lies."""


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("method", ["fedavg", "fedtan"])
def test_an_honest_client_without_variance_is_not_refused(method: str, scale: float) -> None:
    """Where all variances are small, and where only the one client's is."""
    for record in siamese(nothing, method, scale=scale).records:
        assert [c.refused for c in record.clients] == [""] * 5


def test_the_client_tells_how_often_each_layer_moved_where_that_is_not_once_per_step() -> None:
    grid = siamese(nothing, rounds=1).grid
    told = [m.content.metric_records["metrics"]["updates"] for m in grid.received if "weights" in m.content.array_records]
    assert told == [[10, 5]] * 5
    plain = run(METHODS["fedavg"](), [random_samples(6, seed=i) for i in range(3)], 1).grid
    assert not any("updates" in m.content.metric_records.get("metrics", {}) for m in plain.received)


def test_passes_that_leave_no_trace_are_not_counted() -> None:
    layer = nn.BatchNorm1d(2)
    layer(torch.rand(4, 2))
    with unrecorded(layer):
        layer(torch.rand(4, 2))
    layer.eval()
    layer(torch.rand(4, 2))
    assert updates(layer) == {"": 1}


@pytest.mark.parametrize("claim", [10**6, 10, 0])
def test_whoever_claims_more_updates_than_the_others_is_not_believed(claim: int) -> None:
    def spoil(message: Message, asked: str, content: RecordDict) -> None:
        if asked == "train":
            statistics = content.array_records["statistics"]
            low = {k: np.full_like(a.numpy(), 1e-6) if k == "norm.running_var" else a.numpy() for k, a in statistics.items()}
            content["statistics"] = ArrayRecord({k: Array(a) for k, a in low.items()})
            content["metrics"] = MetricRecord({**content.metric_records["metrics"], "updates": [claim, claim]})

    for record in siamese(spoil).records:
        assert "statistics/norm.running_var: channel" in record.clients[LIAR].refused
        assert "after 10 updates" in record.clients[LIAR].refused
        assert len(record.accepted) == 4


def test_a_list_of_another_length_is_refused() -> None:
    def spoil(message: Message, asked: str, content: RecordDict) -> None:
        if asked == "train":
            content["metrics"] = MetricRecord({**content.metric_records["metrics"], "updates": [5]})

    for record in siamese(spoil).records:
        assert record.clients[LIAR].refused == "metrics/updates: expected one number for each of 2 layers, but got 1"


def test_the_floor_is_that_of_all_updates() -> None:
    """0.9^10 of 1 is left where a layer of momentum 0.1 is used twice in each of five steps; 0.9^5 where once."""
    layers = {"norm": nn.BatchNorm1d(1)}
    shared = {"norm": Running(torch.zeros(1), torch.ones(1))}
    reports = [{"norm": Running(torch.zeros(1), torch.tensor([v]))} for v in (1.0, 0.35, 1.0, 0.34, 1.0)]
    assert set(undercut(shared, reports, [5] * 5, layers, [{"norm": 10}] * 5)) == {3}
    assert set(undercut(shared, reports, [5] * 5, layers)) == {1, 3}
    assert set(undercut(shared, reports, [5] * 5, layers, [{"norm": 10}, *[{}] * 4])) == {1, 3}  # one client's word is not enough
