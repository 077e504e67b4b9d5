"""Accuracies per class, from the clients' own evaluations to the round's record and its line."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fl_bn.federation.local import Samples, evaluate
from fl_bn.federation.metrics import series
from fl_bn.methods import METHODS
from fl_bn.run.history import round_line
from fl_bn.task import CLASS
from tests.federation import random_samples
from tests.in_process import WatchedGrid, client_app, run


@pytest.fixture
def clients() -> list[Samples]:
    """Class 3 is nowhere, class 2 at the last client alone."""
    made = [random_samples(12, brightness=b, seed=i) for i, b in enumerate((0.0, 0.5, 1.0))]
    return [Samples(own.x, own.y % (3 if i == 2 else 2)) for i, own in enumerate(made)]


@pytest.mark.parametrize("name", ["fedbn", "silobn"])
def test_clients_send_them_and_the_record_has_the_mean_of_those_that_have_the_class(name: str, clients: list[Samples]) -> None:
    grid = WatchedGrid(client_app(METHODS[name](), clients), 3)
    ran = run(METHODS[name](), clients, 1, grid=grid)
    records = (reply.content.metric_records.get("fl-bn/metrics", {}) for reply in grid.received)
    sent = [metrics for metrics in records if "accuracy" in metrics]
    values = np.array([[float(metrics[f"accuracy-class-{c}"]) for c in range(4)] for metrics in sent])  # type: ignore[arg-type]
    assert np.isnan(values).sum(axis=0).tolist() == [0, 0, 2, 3]
    for row, metrics, own in zip(values, sent, clients, strict=True):  # by hand: the accuracies of classes make the accuracy
        counts = np.bincount(own.y.numpy(), minlength=4)
        assert np.nansum(row * counts) / counts.sum() == pytest.approx(metrics["accuracy"])
    found = series(ran.records[-1].evaluation, CLASS)
    assert found[:3] == pytest.approx([*values[:, :2].mean(axis=0), values[2, 2]])
    assert math.isnan(found[3])
    assert round_line(ran.records[-1])["per-class"] == [*found[:3], None]
    assert "mean-iou" not in ran.records[-1].evaluation


def test_the_servers_evaluation_has_them_too(clients: list[Samples]) -> None:
    test = clients[2]

    def measured(model: torch.nn.Module) -> dict[str, float]:
        return evaluate(model, test).result()

    ran = run(METHODS["fbn"](), clients, 1, evaluate=measured)
    found = evaluate(ran.strategy.shared.model, test)
    assert ran.records[-1].evaluation["accuracy"] == found["accuracy"]
    assert series(ran.records[-1].evaluation, CLASS)[:3] == [found[f"{CLASS}{index}"] for index in range(3)]
