"""Classification and segmentation: metrics from confusion counts, by hand, against torchmetrics, and what must not count."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn.task import CLASS, CLASSIFICATION, MetricState, Segmentation, Task, confusion_counts
from tests.training.core import Samples, evaluate, named_series, over_clients, series

PIXELS = Segmentation()
COUNTS = torch.tensor([[3, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])  # class 2 never hit, class 3 nowhere


def state(task: Task, counts: Tensor, total: float = 0.0) -> MetricState:
    return MetricState(task, total, int(counts.sum()), {"confusion": counts})


def scores(predicted: Tensor, classes: int) -> Tensor:
    """(B, C, *) whose largest is at ``predicted`` (B, *)."""
    return F.one_hot(predicted, classes).movedim(-1, 1).double()


def masks(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Scores (4, 6, 5, 7) and masks with unlabelled pixels; class 5 occurs in neither, class 4 in predictions alone."""
    predicted, y = torch.from_numpy(rng.integers(0, 5, (4, 5, 7))), torch.from_numpy(rng.integers(0, 4, (4, 5, 7)))
    y[:, 0], y[3] = 255, 255
    return scores(predicted, 6), y


def test_by_hand() -> None:
    found = state(PIXELS, COUNTS, total=3.5).result()
    assert (found["loss"], found["accuracy"]) == (0.5, 5 / 7)
    assert series(found, CLASS)[:3] == [3 / 4, 1, 0]
    assert math.isnan(series(found, CLASS)[3])
    assert len(series(found, CLASS)) == 4
    assert found["mean-iou"] == pytest.approx((3 / 5 + 2 / 3 + 0 / 1) / 3)  # of class 0: 3 hits, 1 missed, 1 too many
    assert "mean-iou" not in state(CLASSIFICATION, COUNTS).result()


def test_nothing_to_count_is_nan() -> None:
    empty = state(PIXELS, torch.zeros(3, 3, dtype=torch.int64))
    assert math.isnan(empty["accuracy"])
    assert math.isnan(empty["mean-iou"])
    assert empty.loss == 0
    with pytest.raises(ValueError, match="none was added"):
        PIXELS.state().result()


def test_counts_and_mean_iou_are_torchmetrics(rng: np.random.Generator) -> None:
    functional = pytest.importorskip("torchmetrics.functional.classification")
    out, y = masks(rng)
    counts = confusion_counts(out, y)
    assert counts.tolist() == functional.multiclass_confusion_matrix(out, y, 6, ignore_index=255).tolist()
    want = functional.multiclass_jaccard_index(out, y, 6, ignore_index=255)
    found = state(PIXELS, counts)
    assert found["mean-iou"] == pytest.approx(float(want), rel=1e-6)
    accuracies = functional.multiclass_accuracy(out, y, 6, average=None, ignore_index=255)
    assert series(found.result(), CLASS)[:4] == pytest.approx(accuracies[:4].tolist(), rel=1e-6)
    hits, union = counts.diagonal().double(), counts.sum(0) + counts.sum(1) - counts.diagonal()
    assert float((hits / union.clamp(min=1)).mean()) != pytest.approx(float(want), rel=1e-2)  # control: a class nowhere is not IoU 0
    assert PIXELS.count(y) == found.count == 3 * 4 * 7  # control: 255 is counted nowhere


def test_the_loss_leaves_unlabelled_pixels_out_and_only_those_of_masks(rng: np.random.Generator) -> None:
    out, y = masks(rng)
    labelled = out.movedim(1, -1)[y != 255]
    assert float(PIXELS.loss(out, y)) == pytest.approx(float(F.cross_entropy(labelled, y[y != 255])), rel=1e-12)
    nothing = PIXELS.loss(out.requires_grad_(), torch.full_like(y, 255))
    nothing.backward()
    assert float(nothing.detach()) == 0 == float(out.grad.abs().max())  # type: ignore[union-attr]
    classes = torch.randn(3, 300, dtype=torch.float64)
    label = torch.tensor([255, 1, 255])  # ImageNet has such a class
    assert torch.equal(CLASSIFICATION.loss(classes, label), F.cross_entropy(classes, label))
    assert not torch.equal(CLASSIFICATION.loss(classes, label), F.cross_entropy(classes, label, ignore_index=255))  # control
    assert int(confusion_counts(classes, label).sum()) == 3


class PerPixel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def segmentation(rng: np.random.Generator) -> Samples:
    y = torch.from_numpy(rng.integers(0, 5, (11, 6, 8)))
    for image in range(11):
        y[image, : image % 6] = 255  # so that images have different numbers of labelled pixels
    return Samples(torch.from_numpy(rng.integers(0, 256, (11, 3, 6, 8), dtype=np.uint8)), y)


def test_segmentation_is_evaluated_per_labelled_pixel_whatever_the_batches(rng: np.random.Generator) -> None:
    samples, model = segmentation(rng), PerPixel().double()
    whole, pieces = evaluate(model, samples, 11, PIXELS), evaluate(model, samples, 2, PIXELS)
    assert torch.equal(whole.sums["confusion"], pieces.sums["confusion"])
    assert whole.loss == pytest.approx(pieces.loss, rel=1e-12)
    x, y = samples.batch(np.arange(11), torch.zeros((), dtype=torch.float64))
    with torch.no_grad():
        out = model.eval()(x)
    assert whole.loss == pytest.approx(float(F.cross_entropy(out, y, ignore_index=255)), rel=1e-12)
    assert whole["accuracy"] == float((out.argmax(1) == y)[y != 255].double().mean())
    per_image = [float(F.cross_entropy(out[i : i + 1], y[i : i + 1], ignore_index=255)) for i in range(11)]
    assert whole.loss != pytest.approx(np.mean(per_image), rel=1e-4)  # control: images do not weigh alike


def test_the_union_of_parts_is_the_evaluation_of_the_whole(rng: np.random.Generator) -> None:
    samples, model = segmentation(rng), PerPixel().double()
    parts = [evaluate(model, Samples(samples.x[a:b], samples.y[a:b]), task=PIXELS) for a, b in ((0, 3), (3, 4), (4, 11))]
    whole, union = evaluate(model, samples, task=PIXELS), MetricState.union(parts)
    assert torch.equal(union.sums["confusion"], whole.sums["confusion"])
    assert union.loss == pytest.approx(whole.loss, rel=1e-12)
    assert float(np.mean([part.loss for part in parts])) != pytest.approx(whole.loss, rel=1e-4)  # control
    with pytest.raises(ValueError, match="no parts"):
        MetricState.union([])


def test_means_over_clients_are_of_those_that_have_the_class() -> None:
    clients = [
        {"accuracy": 1.0, "loss": 1.0, "mean-iou": 0.5, **named_series(CLASS, [1.0, math.nan, math.nan])},
        {"accuracy": 0.5, "loss": 2.0, **named_series(CLASS, [0.5, 0.25])},
        {"accuracy": 0.0, "loss": 6.0, "mean-iou": 7.0, **named_series(CLASS, [-1.0, 0.75])},  # what is no share does not count
    ]
    found = over_clients(PIXELS, clients)
    assert (found["accuracy"], found["accuracy-min"], found["loss"]) == (0.5, 0.0, 3.0)
    assert found["accuracy-std"] == pytest.approx((1 / 6) ** 0.5)
    assert found["mean-iou"] == 0.5
    assert series(found, CLASS)[:2] == [0.75, 0.5]
    assert math.isnan(series(found, CLASS)[2])
    assert len(series(found, CLASS)) == 3
    made_up = over_clients(PIXELS, [{"accuracy": 1.0, "loss": 1.0, f"{CLASS}99999999": 1.0}])
    assert set(made_up) == {"accuracy", "accuracy-std", "accuracy-min", "loss"}  # one that is made up costs nothing
