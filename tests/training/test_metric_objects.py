"""Metrics that are objects: torchmetrics', or of one's own; over all samples, in every door that evaluates by a task."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn import Classification, Federation, SeededBatches, methods
from fl_bn.task import MetricState, extended
from tests.listed import listed
from tests.refusals import naming

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


def test_they_see_all_samples_and_domains_are_weighted_by_theirs() -> None:
    output, targets = data(40, 1)
    task, functional = extended(Classification(), metrics=objects()), pytest.importorskip("torchmetrics.functional.classification")
    parts = [(output[:12], targets[:12]), (output[12:], targets[12:])]
    found, domains = batches(*parts, task=task).result(), [batches(part, task=task) for part in parts]
    union = MetricState.union(domains)
    for name, of_all in (("auc", functional.multiclass_auroc), ("f1", functional.multiclass_f1_score)):
        own = [one[name] for one in domains]
        assert found[name] == pytest.approx(float(of_all(output, targets, 3)), rel=1e-6)
        assert found[name] != pytest.approx(np.mean(own), rel=1e-3)  # control: the mean over batches
        assert union[name] == pytest.approx((12 * own[0] + 28 * own[1]) / 40) == (domains[0] + domains[1])[name]
        assert union[name] != pytest.approx(np.mean(own), rel=1e-3)  # control


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


class Own:
    """A metric without torchmetrics: computes the value that it is told to, or the number of samples of each class."""

    def __init__(self, value: Any = None) -> None:
        self.value, self.seen = value, list[Tensor]()

    def update(self, preds: Any, target: Any) -> None:
        self.seen.append(target)

    def compute(self) -> Any:
        counts = torch.bincount(torch.cat(self.seen), minlength=3)
        return self.value(counts) if self.value else counts

    def reset(self) -> None:
        self.seen = []


def test_one_of_your_own_needs_no_torchmetrics() -> None:
    assert batches(data(5, 0), task=extended(Classification(), metrics={"n": Own(torch.sum)}))["n"] == 5


@listed(
    "value",
    [None, lambda _: None, lambda _: {"a": 1.0}, lambda _: "0.5", lambda _: 1 + 2j],
    ids=["vector", "None", "dict", "text", "complex"],
)
def test_what_computes_no_number_is_refused_by_name(value: Any) -> None:
    with naming("metric 'n'"):
        batches(data(5, 0), task=extended(Classification(), metrics={"n": Own(value)})).result()


def test_the_error_of_a_metric_names_it() -> None:
    with pytest.raises(RuntimeError) as caught:
        batches(data(5, 0), task=extended(Classification(), metrics={"auc": torchmetrics.MultilabelAUROC(3)}))
    assert "'auc'" in str(caught.value.__notes__)
