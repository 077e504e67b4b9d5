"""Metrics that are objects: torchmetrics', or of one's own; over all samples, in every door that evaluates by a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn import Classification, Federation, SeededBatches, methods
from fl_bn.task import MetricState, extended
from tests.listed import listed
from tests.training.core import evaluate

torchmetrics = pytest.importorskip("torchmetrics.classification")


def data(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(samples, 3))), torch.from_numpy(rng.integers(0, 3, samples))


def objects() -> dict[str, Any]:
    return {"auc": torchmetrics.MulticlassAUROC(3), "f1": torchmetrics.MulticlassF1Score(3)}


def batches(*parts: tuple[Tensor, Tensor], task: Classification) -> MetricState:
    state = task.state()
    for one in parts:
        state.update(*one)
    return state


def test_they_see_all_samples_and_are_no_mean_over_batches() -> None:
    output, targets = data(40, 0)
    task = extended(Classification(), metrics=objects())
    parts = [(output[:12], targets[:12]), (output[12:21], targets[12:21]), (output[21:], targets[21:])]
    found = batches(*parts, task=task).result()
    functional = pytest.importorskip("torchmetrics.functional.classification")
    assert found["auc"] == pytest.approx(float(functional.multiclass_auroc(output, targets, 3)), rel=1e-6)
    assert found["f1"] == pytest.approx(float(functional.multiclass_f1_score(output, targets, 3)), rel=1e-6)
    own = [batches(part, task=task).result() for part in parts]
    for name in ("auc", "f1"):  # controls: means over batches
        assert found[name] != pytest.approx(np.mean([one[name] for one in own]), rel=1e-3)
    assert found["accuracy"] == batches(*parts, task=Classification())["accuracy"]


def test_over_several_domains_they_are_the_mean_weighted_by_samples() -> None:
    output, targets = data(40, 1)
    task = extended(Classification(), metrics=objects())
    parts = [batches((output[a:b], targets[a:b]), task=task) for a, b in ((0, 10), (10, 40))]
    union = MetricState.union(parts)
    for name in ("auc", "f1"):
        weighted = (10 * parts[0][name] + 30 * parts[1][name]) / 40
        assert union[name] == pytest.approx(weighted)
        assert union[name] != pytest.approx((parts[0][name] + parts[1][name]) / 2, rel=1e-3)  # control
        assert (MetricState.union([parts[1]]) + parts[0])[name] == pytest.approx(weighted)
    with pytest.raises(ValueError, match="auc, f1"):
        union.tensors()


class Top(Classification):
    """As a run config names it: task='mytasks:Top'."""

    name = "top"

    def objects(self) -> Mapping[str, Any]:
        return {"auc": torchmetrics.MulticlassAUROC(3)}


def test_a_federation_takes_them_for_all_and_for_each_client() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    clients = [SeededBatches(x.float(), y, 8) for x, y in (data(24, seed) for seed in range(3))]
    test = [(x.float(), y) for x, y in (data(16, 7), data(9, 8))]
    given = objects()
    fed = Federation(net, methods.fbn(), clients, metrics=given, test=test)
    records = [*fed.run(2)]
    x, y = torch.cat([x for x, _ in test]), torch.cat([y for _, y in test])
    with torch.no_grad():
        scores = fed.model(x)
    assert records[-1].evaluation["auc"] == pytest.approx(float(torchmetrics.MulticlassAUROC(3)(scores, y)), rel=1e-6)
    assert records[0].evaluation.keys() == {"loss", "accuracy", "accuracy-class-0", "accuracy-class-1", "accuracy-class-2", "auc", "f1"}
    assert given["auc"].update_count == 0  # yours stay as they are
    own = Federation(net, methods.fedbn(), clients, metrics=[{"auc": given["auc"]}, None, None], test=test)
    (record,) = own.run(1)
    with torch.no_grad():
        expected = torchmetrics.MulticlassAUROC(3)(own.client_model(0)(x), y)
    assert record.evaluation["auc"] == record.client_evaluation[0]["auc"] == pytest.approx(float(expected), rel=1e-6)
    assert "auc" not in record.client_evaluation[1]
    assert evaluate(fed.model, test, task=Top())["auc"] == pytest.approx(records[-1].evaluation["auc"])


class Vector:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def update(self, preds: Any, target: Any) -> None:
        self.seen.append(target)

    def compute(self) -> Tensor:
        return torch.bincount(torch.cat(self.seen), minlength=3)

    def reset(self) -> None:
        self.seen = []


class Count(Vector):
    """Computes a number, or the value that it is told to."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.value = value

    def compute(self) -> Any:
        return super().compute().sum() if self.value is None else self.value[0]


def test_one_of_your_own_needs_no_torchmetrics() -> None:
    assert batches(data(5, 0), task=extended(Classification(), metrics={"n": Count()}))["n"] == 5


@listed("metric", [Vector(), *[Count([value]) for value in (None, {"a": 1.0}, "0.5", 1 + 2j)]], ids=str)
def test_what_computes_no_number_is_refused_by_name(metric: Vector) -> None:
    with pytest.raises(ValueError, match="metric 'n'"):
        batches(data(5, 0), task=extended(Classification(), metrics={"n": metric})).result()


def test_the_error_of_a_metric_names_it() -> None:
    with pytest.raises(RuntimeError) as caught:
        batches(data(5, 0), task=extended(Classification(), metrics={"auc": torchmetrics.MultilabelAUROC(3)}))
    assert "'auc'" in str(caught.value.__notes__)
