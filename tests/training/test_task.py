"""Tasks: metrics against scikit-learn and torchmetrics, sums that add, labels and batches of any form, and metrics that are objects."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional import classification as functional

from fl_bn import Federation, SeededBatches, methods
from fl_bn.federation.local import Samples, evaluate
from fl_bn.federation.record import named_series, over_clients, series
from fl_bn.task import (
    CLASS,
    CLASSIFICATION,
    LABEL_SETS,
    MASKS,
    TASKS,
    VALUES,
    Classification,
    ClassificationAUC,
    Dice,
    MetricState,
    MultiLabel,
    Regression,
    Segmentation,
    Task,
    extended,
    find_task,
    kind_of,
)
from tests.listed import listed
from tests.networks import Wired
from tests.refusals import naming

REGRESSION, TAGS, PER_PIXEL, AUC = Regression(), MultiLabel(), Segmentation(), ClassificationAUC()
Batch = tuple[Tensor, Tensor]
Named = dict[str, float]


def state_of(task: Task, *batches: Batch) -> MetricState:
    state = task.state()
    for output, targets in batches:
        state.update(output, targets)
    return state


def batch(task: Task, rng: np.random.Generator, samples: int) -> Batch:
    """Make outputs in float64, and targets that they half know: of four classes, values or labels, some pixels without a label."""
    kind, shape = (task.takes or (VALUES,))[0], (samples, 4, 3, 5) if task.takes == (MASKS,) else (samples, 4)
    noise = torch.from_numpy(rng.normal(size=shape))
    if kind == VALUES:
        return noise, torch.from_numpy(rng.normal(size=shape)) + 3
    if kind == LABEL_SETS:
        y = torch.from_numpy((rng.random(shape) < [0.5, 0.3, 0.1, 0.05]).astype(int))
        return 3 * noise - 1 + 2 * y, y
    y = torch.from_numpy(rng.choice(4, (samples, *shape[2:]), p=[0.4, 0.3, 0.2, 0.1]))
    output = noise + F.one_hot(y, 4).movedim(-1, 1)
    if kind == MASKS:
        y[:, 0], y[: samples // 3, 1] = 255, 255
    return output, y


def of_regression(out: Tensor, y: Tensor) -> tuple[Named, Named]:
    error = metrics.mean_squared_error(y, out)
    pooled = 1 - float((out - y).square().sum() / (y - y.mean()).square().sum())
    return {"r2": metrics.r2_score(y, out), "mse": error, "loss": error, "mae": metrics.mean_absolute_error(y, out)}, {"r2": pooled}


def of_labels(logits: Tensor, y: Tensor) -> tuple[Named, Named]:
    said, precision = (logits > 0).long(), metrics.average_precision_score
    found = {f"f1-{average}": metrics.f1_score(y, said, average=average) for average in ("micro", "macro")}
    loss = float(F.binary_cross_entropy_with_logits(logits, y.double()))
    return found | {"loss": loss, "mean-average-precision": precision(y, logits)}, {"mean-average-precision": precision(y, said)}


def of_classes(scores: Tensor, y: Tensor) -> tuple[Named, Named]:
    recalls = functional.multiclass_accuracy(scores, y, 4, average=None, ignore_index=255).tolist()
    known = y != 255
    found = {"accuracy": metrics.accuracy_score(y[known], scores.argmax(1)[known]), **named_series(CLASS, recalls)}
    return found | {"loss": float(F.cross_entropy(scores, y, ignore_index=255))}, {"accuracy": float(np.mean(recalls))}


def of_auc(scores: Tensor, y: Tensor) -> tuple[Named, Named]:
    order = np.mean([metrics.roc_auc_score(y == label, scores.argmax(1) == label) for label in range(4)])
    odds = [scores[:, label] - scores[:, [other for other in range(4) if other != label]].logsumexp(1) for label in range(4)]
    exact = float(np.mean([metrics.roc_auc_score(y == label, odds[label]) for label in range(4)]))
    return of_classes(scores, y)[0] | {"auc": exact}, {"auc": float(order)}


def of_masks(scores: Tensor, y: Tensor) -> tuple[Named, Named]:
    found, wrong = of_classes(scores, y)
    return found | {"mean-iou": float(functional.multiclass_jaccard_index(scores, y, 4, ignore_index=255))}, wrong


def of_dice(scores: Tensor, y: Tensor) -> tuple[Named, Named]:
    known, said = y != 255, scores.argmax(1)
    dice = [metrics.f1_score(y[known], said[known], labels=classes, average="macro") for classes in ([1, 2, 3], [0, 1, 2, 3])]
    without_loss = {name: value for name, value in of_masks(scores, y)[0].items() if name != "loss"}
    return without_loss | {"dice": dice[0]}, {"dice": dice[1]}  # with the background


REFERENCES = {
    "classification": of_classes,
    "classification-auc": of_auc,
    "segmentation": of_masks,
    "dice": of_dice,
    "regression": of_regression,
    "multi-label": of_labels,
}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.filterwarnings("ignore:An input array is constant")
def test_metrics_are_those_of_scikit_learn_and_torchmetrics(name: str, rng: np.random.Generator) -> None:
    for strength in (1.0, 30.0) if name == AUC.name else (1.0,):  # 30: probabilities of which the floats are exactly 1
        output, y = batch(TASKS[name](), rng, 400)
        output *= strength
        parts = [state_of(TASKS[name](), (output[part], y[part])) for part in (slice(90), slice(90, 100), slice(100, None))]
        found = MetricState.union([parts[0] + parts[2], parts[1]]).result()
        assert found == pytest.approx(state_of(TASKS[name](), (output, y)).result(), rel=1e-9)
        right, wrong = REFERENCES[name](output, y)
        for metric, value in right.items():
            assert found[metric] == pytest.approx(value, rel=1e-6), metric
        assert found.keys() == right.keys() | {"loss"}
        (metric,) = wrong
        assert found[metric] != pytest.approx(wrong[metric], abs=1e-3)  # control: another way to average


def scores_of(predicted: Tensor, classes: int) -> Tensor:
    """Return scores (B, C, *) of which the largest is at ``predicted`` (B, *)."""
    return F.one_hot(predicted, classes).movedim(-1, 1).double()


NAN, ONE, NOBODY = math.nan, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), torch.zeros(3, 2, dtype=torch.int64)
THREE = torch.tensor([[2.0, 1.0, 9.0], [1.0, 2.0, 9.0], [3.0, 0.0, 9.0]])
OF_300 = torch.tensor([[255, 255, 255, 3]])
PIXELS, SAID = torch.tensor([[0, 0, 0, 0, 1, 1, 2]]), torch.tensor([[0, 0, 0, 1, 1, 1, 0]])  # class 2 is never hit, class 3 nowhere


@listed(
    ("task", "output", "targets", "expected"),
    [
        (REGRESSION, torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([1.0, 2.0, 3.0]), {"loss": 4 / 3, "r2": 1 - 4 / 2}),
        (REGRESSION, ONE, torch.full((3,), 0.1, dtype=torch.float64), {"r2": NAN}),  # targets that do not vary
        (REGRESSION, ONE + 1e4 + 0.5, ONE + 1e4, {"r2": 1 - 0.75 / 2}),
        (TAGS, NOBODY - 1.0, NOBODY, {"f1-micro": NAN, "f1-macro": NAN, "mean-average-precision": NAN}),
        (AUC, THREE, torch.tensor([0, 1, 0]), {"auc": 1}),  # a class without samples has no part in it
        (AUC, THREE, torch.tensor([1, 1, 1]), {"auc": NAN}),
        (PER_PIXEL, scores_of(OF_300, 300), OF_300, {f"{CLASS}3": 1, f"{CLASS}255": NAN}),
        (PER_PIXEL, scores_of(SAID, 4), PIXELS, {"accuracy": 5 / 7, f"{CLASS}0": 3 / 4, f"{CLASS}2": 0, f"{CLASS}3": NAN}),
        (PER_PIXEL, scores_of(SAID, 4), PIXELS, {"mean-iou": (3 / 5 + 2 / 3 + 0 / 1) / 3}),  # of class 0: 3 hits, 1 missed, 1 too many
        (PER_PIXEL, scores_of(SAID, 4), PIXELS * 0 + 255, {"accuracy": NAN, "mean-iou": NAN, "loss": 0}),
    ],
    ids=lambda value: "",
)
def test_values_by_hand(task: Task, output: Tensor, targets: Tensor, expected: Named) -> None:
    found = state_of(task, (output, targets)).result()
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_means_over_clients_are_of_those_that_have_the_class() -> None:
    clients = [
        {"accuracy": 1.0, "loss": 1.0, "mean-iou": 0.5, **named_series(CLASS, [1.0, math.nan, math.nan])},
        {"accuracy": 0.5, "loss": 2.0, **named_series(CLASS, [0.5, 0.25])},
        {"accuracy": 0.0, "loss": 6.0, "mean-iou": 7.0, **named_series(CLASS, [-1.0, 0.75])},  # what is no share does not count
    ]
    found = over_clients(PER_PIXEL, clients)
    assert (found["accuracy"], found["accuracy-min"], found["loss"], found["mean-iou"]) == (0.5, 0.0, 3.0, 0.5)
    assert found["accuracy-std"] == pytest.approx((1 / 6) ** 0.5)
    assert series(found, CLASS) == pytest.approx([0.75, 0.5, math.nan], nan_ok=True)
    made_up = over_clients(PER_PIXEL, [{"accuracy": 1.0, "loss": 1.0, f"{CLASS}99999999": 1.0}])
    assert set(made_up) == {"accuracy", "accuracy-std", "accuracy-min", "loss"}  # one that is made up costs nothing


def test_values_are_not_rounded_to_the_precision_of_outputs() -> None:
    y = torch.tensor([1.001, 2.003])
    out = y.bfloat16()
    assert float(REGRESSION.loss(out, y)) == pytest.approx(float((out.float() - y).square().mean()))
    assert float(F.mse_loss(out, y.bfloat16())) == 0  # control: rounded, they are equal
    assert REGRESSION.loss(torch.zeros(2, dtype=torch.float64, requires_grad=True), y).dtype == torch.float64


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "an axis of channels": lambda y: y.unsqueeze(1),  # MONAI's masks are (B, 1, H, W), MedMNIST's labels (B, 1)
    "int16": lambda y: y.to(torch.int16),
    "none is -1": lambda y: torch.where((y == 255) | (y < 0), -1, y),
    "none is -100": lambda y: torch.where((y == 255) | (y < 0), -100, y),  # as in torch's losses
}


@listed("task", [PER_PIXEL, Dice(), Dice(cross_entropy=1.0), CLASSIFICATION, AUC], ids=lambda task: task.name)
@listed("form", FORMS)
def test_labels_may_be_written_in_other_forms(task: Task, form: str, rng: np.random.Generator) -> None:
    output, y = batch(task, rng, 30)
    if task.takes != (MASKS,):
        y[:3] = -100
    other = FORMS[form](y)
    assert torch.equal(task.loss(output, other), task.loss(output, y))
    assert task.count(other) == task.count(y)
    assert state_of(task, (output, other)).result() == state_of(task, (output, y)).result()
    if task.takes == (MASKS,):
        assert state_of(task, (output, y.to(torch.uint8))).result() == state_of(task, (output, y)).result()
        behind, images = task.samples_behind(other), [int((y == label).flatten(1).any(1).sum()) for label in range(4)]
        assert [behind[f"{CLASS}{label}"] for label in range(4)] == images


@listed(
    ("task", "none"),
    [(CLASSIFICATION, -100), (CLASSIFICATION, -1), (PER_PIXEL, 255), (PER_PIXEL, -1), (Dice(cross_entropy=1.0), 255)],
    ids=str,
)
def test_a_batch_without_any_label_changes_nothing(task: Task, none: int, rng: np.random.Generator) -> None:
    """Before, its loss was NaN, and so was the mean of the round."""
    output, y = batch(task, rng, 4)
    loss = task.loss(output.requires_grad_(), torch.full_like(y, none))
    (gradient,) = torch.autograd.grad(loss, output)
    assert (loss.item(), gradient.abs().max().item()) == (pytest.approx(0, abs=1e-6), 0)


@listed("labels", [[0, 1, 2, 0, 0, 2, 1], [0, 1, 2, -100, -100, 2, 1], [255, 1, 255, 3, 0, 0, 0]], ids=str)
def test_the_loss_is_bit_for_bit_that_of_torch(labels: list[int]) -> None:
    scores, y = torch.randn(7, 300, requires_grad=True), torch.tensor(labels)  # ImageNet has a class 255
    ours, theirs = CLASSIFICATION.loss(scores, y), F.cross_entropy(scores, y)
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad(loss, scores)[0] for loss in (ours, theirs)))


def plain_dice(output: Tensor, targets: Tensor, first: int = 1) -> float:
    """One image and one class after the other."""
    losses = []
    for scores, mask in zip(output, targets, strict=True):
        known = mask != 255
        for label in range(first, len(scores)):
            p, y = scores.softmax(0)[label][known], (mask[known] == label).double()
            losses.append(1 - (2 * float((p * y).sum()) + 1e-5) / (float((p + y).sum()) + 1e-5))
    return float(np.mean(losses))


@listed("volumes", [False, True])
def test_the_dice_loss_is_that_of_a_plain_implementation(volumes: bool, rng: np.random.Generator) -> None:
    output, y = batch(Dice(), rng, 4)
    if volumes:  # two images are one volume
        output, y = output.unflatten(0, (2, 2)).movedim(1, 2), y.unflatten(0, (2, 2))
    assert float(Dice().loss(output, y)) == pytest.approx(plain_dice(output, y), rel=1e-9)
    assert float(Dice(background=True).loss(output, y)) == pytest.approx(plain_dice(output, y, first=0), rel=1e-9)
    assert float(Dice().loss(output, y)) != pytest.approx(plain_dice(output, y, first=0), rel=1e-3)  # control: with the background
    together = plain_dice(output.transpose(0, 1).flatten(1)[None].unsqueeze(-1), y.flatten()[None, :, None])
    assert float(Dice().loss(output, y)) != pytest.approx(together, rel=1e-6)  # control: over the batch, which does not add up
    both = Dice(cross_entropy=0.5).loss(output, y)
    pixels = torch.stack([F.cross_entropy(a[None], b[None], ignore_index=255) for a, b in zip(output, y, strict=True)])
    assert float(both) == pytest.approx(plain_dice(output, y) + 0.5 * float(pixels.mean()), rel=1e-9)


def network(outputs: int = 1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs))


def test_batches_of_any_loader_are_read(rng: np.random.Generator) -> None:
    x, y = torch.from_numpy(rng.normal(size=(20, 3))).float(), torch.from_numpy(rng.integers(0, 4, 20))
    model, fine = network(4), Classification(target_key="fine", input_keys=("image",))
    want = evaluate(model, Samples(x, y), 7).result()
    both = [{"label": y[i : i + 7].flip(0), "fine": y[i : i + 7], "image": x[i : i + 7], "id": i} for i in range(0, 20, 7)]
    loaders: list[tuple[Any, Task]] = [
        (DataLoader(TensorDataset(x, y), batch_size=7), CLASSIFICATION),
        (DataLoader([{"image": a, "label": b} for a, b in zip(x, y, strict=True)], batch_size=7), CLASSIFICATION),
        (((x[i : i + 7], y[i : i + 7]) for i in range(0, 20, 7)), CLASSIFICATION),
        (both, fine),
    ]
    for batches, task in loaders:
        assert evaluate(model, batches, task=task).result() == pytest.approx(want, rel=1e-6)
    wrong = Classification(target_key="label", input_keys=("image",))
    assert evaluate(model, both, task=wrong)["loss"] != pytest.approx(want["loss"], rel=1e-3)  # control: other labels
    several, half = Wired(lambda parts, image, other: parts.net(image + other), net=model), x / 2
    for one in ({"image": half, "other": half, "label": y}, ((half, half), y)):
        assert evaluate(several, [one]).result() == pytest.approx(want, rel=1e-6)
    with pytest.raises(TypeError) as caught:
        evaluate(several, [{"image": half, "other": half, "label": y, "id": y}])
    assert "read(batch)" in caught.value.__notes__[0]


OUT = torch.ones(2)


def test_the_prediction_in_a_network_s_output() -> None:
    named = namedtuple("Both", ("aux", "logits"))(0, OUT)
    found = [(None, OUT), (0, (OUT, 1)), (None, {"aux": 0, "logits": OUT}), ("mine", {"aux": 0, "mine": OUT}), ("logits", named)]
    assert all(Classification(output_key=key).output(raw) is OUT for key, raw in found)


ZEROS, MAPS, TWO = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, 4, 4), torch.zeros(4, 2)


@listed(
    ("call", "key"),
    [
        (lambda: REGRESSION.loss(torch.zeros(3, 2), torch.zeros(3)), "targets"),
        (lambda: CLASSIFICATION.read((1, 2, 3)), "read"),
        (lambda: CLASSIFICATION.read({"label": 1, "y": 2, "image": 3}), "target_key"),
        (lambda: find_task("auto", kind_of(torch.zeros(2, 3))), "regression"),
        (lambda: CLASSIFICATION.loss(TWO, torch.tensor([1, -1, -1, 1])), "-1"),  # the class -1 was left out once
        (lambda: CLASSIFICATION.sums(MAPS, torch.full((2, 4, 4), 7)), "7"),
        (lambda: TAGS.loss(torch.zeros(2, 3), torch.tensor([[1, 0, -1], [0, 1, 1]])), "-1"),  # CheXpert's uncertain label
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(call: Callable[[], Any], key: str) -> None:
    with naming(key):
        call()
    assert TAGS.loss(torch.zeros(3, 1), torch.full((3, 1), 0.9)) > 0  # control: soft labels train


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
    assert given["auc"].update_count == 0  # yours stay as they are
    own = Federation(net, methods.fedbn(), clients, metrics=[{"auc": given["auc"]}, None, None], test=test)
    (record,) = own.run(1)
    with torch.no_grad():
        expected = torchmetrics.MulticlassAUROC(3)(own.client_model(0)(x), y)
    assert record.evaluation["auc"] == record.client_evaluation[0]["auc"] == pytest.approx(float(expected), rel=1e-6)
    assert "auc" not in record.client_evaluation[1]


def own(value: Any) -> Any:
    """A metric without torchmetrics."""
    return SimpleNamespace(update=lambda preds, target: None, compute=lambda: value, reset=lambda: None)


def test_one_of_your_own_needs_no_torchmetrics_and_must_compute_a_number() -> None:
    assert batches(data(5, 0), task=extended(Classification(), metrics={"n": own(5)}))["n"] == 5
    for value in (torch.ones(3), None):
        with naming("metric 'n'"):
            batches(data(5, 0), task=extended(Classification(), metrics={"n": own(value)})).result()
