"""Tasks: metrics against scikit-learn and torchmetrics, sums that add, labels, batches and networks of any form, and what is refused."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional import classification as functional

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
    confusion_counts,
    find_task,
    kind_of,
)
from fl_bn.task.classification import log_odds
from tests.listed import listed
from tests.networks import Wired
from tests.refusals import naming
from tests.training.core import Samples, evaluate, named_series, over_clients, series

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
        y[:, 0] = 255
    return output, y


# Metrics, and how they add up


def of_regression(out: Tensor, y: Tensor) -> tuple[Named, Named]:
    error = metrics.mean_squared_error(y, out)
    pooled = 1 - float((out - y).square().sum() / (y - y.mean()).square().sum())
    return {"r2": metrics.r2_score(y, out), "mse": error, "loss": error, "mae": metrics.mean_absolute_error(y, out)}, {"r2": pooled}


def of_labels(logits: Tensor, y: Tensor) -> tuple[Named, Named]:
    said, binned = (logits > 0).long(), ((logits.clamp(-16, 15.999) + 16) * 32).long()
    found = {f"f1-{average}": metrics.f1_score(y, said, average=average) for average in ("micro", "macro")}
    loss = float(F.binary_cross_entropy_with_logits(logits, y.double()))
    of_two_bins = metrics.average_precision_score(y, said)
    return found | {"loss": loss, "mean-average-precision": metrics.average_precision_score(y, binned)}, {
        "mean-average-precision": of_two_bins
    }


def of_classes(scores: Tensor, y: Tensor) -> tuple[Named, Named]:
    recalls = functional.multiclass_accuracy(scores, y, 4, average=None, ignore_index=255).tolist()
    known = y != 255
    found = {"accuracy": metrics.accuracy_score(y[known], scores.argmax(1)[known]), **named_series(CLASS, recalls)}
    return found | {"loss": float(F.cross_entropy(scores, y, ignore_index=255))}, {"accuracy": float(np.mean(recalls))}


def of_auc(scores: Tensor, y: Tensor) -> tuple[Named, Named]:
    order = np.mean([metrics.roc_auc_score(y == label, scores.argmax(1) == label) for label in range(4)])
    rounded = (log_odds(scores).asinh() * 51.2).floor()
    exact = float(np.mean([metrics.roc_auc_score(y == label, rounded[:, label]) for label in range(4)]))
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
    output, y = batch(TASKS[name](), rng, 300)
    found = state_of(TASKS[name](), (output[:90], y[:90]), (output[90:], y[90:])).result()
    right, wrong = REFERENCES[name](output, y)
    assert {metric: found[metric] for metric in right} == pytest.approx(right, rel=1e-6)
    assert found.keys() == right.keys() | {"loss"}
    (metric,) = wrong
    assert found[metric] != pytest.approx(wrong[metric], rel=1e-3)  # control: another way to average


def test_binned_scores_are_near_the_exact_ones(rng: np.random.Generator) -> None:
    scores, y = batch(AUC, rng, 400)
    exact = metrics.roc_auc_score(y, scores.softmax(1), multi_class="ovr")
    for strength in (0.1, 1.0, 30.0):  # 30: probabilities of which the floats are exactly 1
        odds = log_odds(scores * strength)
        right = np.mean([metrics.roc_auc_score(y == label, odds[:, label]) for label in range(4)])
        assert state_of(AUC, (scores * strength, y))["auc"] == pytest.approx(right, abs=3e-3)
        assert strength != 1 or right == pytest.approx(exact, abs=1e-12)
    logits, sets = batch(TAGS, rng, 400)
    assert state_of(TAGS, (logits, sets))["mean-average-precision"] == pytest.approx(
        metrics.average_precision_score(sets, logits), abs=0.01
    )


@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, 6), min_size=2, max_size=5), seed=st.integers(0, 99), order=st.randoms(use_true_random=False))
def test_states_of_parts_add_up_to_that_of_the_union(name: str, sizes: list[int], seed: int, order: Any) -> None:
    task, rng = TASKS[name](), np.random.default_rng(seed)
    batches = [batch(task, rng, size) for size in sizes]
    whole = state_of(task, (torch.cat([out for out, _ in batches]), torch.cat([y for _, y in batches]))).result()
    parts = [state_of(task, one) for one in batches]
    order.shuffle(parts)
    folded = parts[0]
    for part in parts[1:]:
        folded = folded + part
    for found in (state_of(task, *batches), MetricState.union(parts), folded):
        assert found.result() == pytest.approx(whole, rel=1e-9, abs=1e-12, nan_ok=True)


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
        (REGRESSION, ONE[:1], ONE[:1], {"r2": NAN}),
        (REGRESSION, ONE + 1e4 + 0.5, ONE + 1e4, {"r2": 1 - 0.75 / 2}),
        (TAGS, NOBODY - 1.0, NOBODY, {"f1-micro": NAN, "f1-macro": NAN, "mean-average-precision": NAN}),
        (TAGS, torch.full((3, 2), NAN), NOBODY + 1, {"f1-micro": 0, "loss": NAN}),
        (TAGS, torch.tensor([[2.0], [-1.0], [0.5]]), torch.tensor([1, 0, 0]), {"f1-micro": 2 / 3}),  # one label, without an axis
        (AUC, THREE, torch.tensor([0, 1, 0]), {"auc": 1}),  # a class without samples has no part in it
        (AUC, THREE, torch.tensor([1, 1, 1]), {"auc": NAN}),
        (AUC, torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]), {"auc": 0.5}),  # all are equal
        (CLASSIFICATION, scores_of(OF_300, 300), OF_300, {"accuracy": 1, f"{CLASS}255": 1}),  # 255 counts where it is a class
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


# Labels and losses


def test_values_are_not_rounded_to_the_precision_of_outputs() -> None:
    y = torch.tensor([1.001, 2.003])
    out = y.bfloat16()
    assert float(REGRESSION.loss(out, y)) == pytest.approx(float((out.float() - y).square().mean()))
    assert float(F.mse_loss(out, y.bfloat16())) == 0  # control: rounded, they are equal
    assert REGRESSION.loss(torch.zeros(2, dtype=torch.float64, requires_grad=True), y).dtype == torch.float64


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "an axis of channels": lambda y: y.unsqueeze(1),  # MONAI's masks are (B, 1, H, W), MedMNIST's labels (B, 1)
    "int16": lambda y: y.to(torch.int16),
    "int32": lambda y: y.to(torch.int32),
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


def test_labels_of_few_bits_and_pixels_in_classification(rng: np.random.Generator) -> None:
    scores, masks = batch(PER_PIXEL, rng, 9)
    for task in (PER_PIXEL, Dice(cross_entropy=1.0)):
        assert state_of(task, (scores, masks.to(torch.uint8))).result() == state_of(task, (scores, masks)).result()
    assert CLASSIFICATION.loss(scores[:4, :2, 0, 0], torch.tensor([True, False, True, False])) > 0
    assert PER_PIXEL.samples_behind(masks.masked_fill(masks == 1, -1))["accuracy-class-1"] == 0
    counted = CLASSIFICATION.sums(scores, masks)["confusion"]  # pixels without a label do not count
    assert torch.equal(torch.as_tensor(counted), confusion_counts(scores, masks))
    assert PER_PIXEL.count(masks) == int(confusion_counts(scores, masks).sum()) == 9 * 2 * 5


def test_the_loss_of_partly_labelled_samples_does_not_hang_on_the_batches(rng: np.random.Generator) -> None:
    scores, labels = batch(CLASSIFICATION, rng, 40)
    labels[:7] = -100
    for task in (CLASSIFICATION, AUC):
        whole = state_of(task, (scores, labels)).result()
        for sizes in ([8, 32], [7, 33], [1, 39]):
            parts = zip(scores.split(sizes), labels.split(sizes), strict=True)
            assert state_of(task, *parts).result() == pytest.approx(whole), sizes
        assert whole["loss"] == pytest.approx(float(task.loss(scores[7:], labels[7:])))


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
    """One image, one class, one pixel after the other."""
    losses = []
    for scores, mask in zip(output, targets, strict=True):
        probability = scores.softmax(0).flatten(1)
        of_classes = []
        for label in range(first, len(scores)):
            hit = size = 0.0
            for p, y in zip(probability[label].tolist(), mask.flatten().tolist(), strict=True):
                if y != 255:
                    hit, size = hit + p * (y == label), size + p + (y == label)
            of_classes.append(1 - (2 * hit + 1e-5) / (size + 1e-5))
        losses.append(sum(of_classes) / len(of_classes))
    return sum(losses) / len(losses)


@listed("ignored", [False, True])
@listed("volumes", [False, True])
def test_the_dice_loss_is_that_of_a_plain_implementation(volumes: bool, ignored: bool, rng: np.random.Generator) -> None:
    output, y = batch(Dice(), rng, 4)
    if volumes:  # two images are one volume
        output, y = output.unflatten(0, (2, 2)).movedim(1, 2), y.unflatten(0, (2, 2))
    y = y if ignored else y.masked_fill(y == 255, 0)
    assert float(Dice().loss(output, y)) == pytest.approx(plain_dice(output, y), rel=1e-9)
    assert float(Dice(background=True).loss(output, y)) == pytest.approx(plain_dice(output, y, first=0), rel=1e-9)
    assert float(Dice().loss(output, y)) != pytest.approx(plain_dice(output, y, first=0), rel=1e-3)  # control: with the background
    together = plain_dice(output.transpose(0, 1).flatten(1)[None].unsqueeze(-1), y.flatten()[None, :, None])
    assert float(Dice().loss(output, y)) != pytest.approx(together, rel=1e-6)  # control: over the batch, which does not add up
    both = Dice(cross_entropy=0.5).loss(output, y)
    pixels = torch.stack([F.cross_entropy(a[None], b[None], ignore_index=255) for a, b in zip(output, y, strict=True)])
    assert float(both) == pytest.approx(plain_dice(output, y) + 0.5 * float(pixels.mean()), rel=1e-9)


def test_what_is_nowhere_does_no_harm_and_perfect_is_perfect() -> None:
    y = torch.tensor([[[0, 1], [1, 255]]])  # class 2 is nowhere
    right = 40.0 * F.one_hot(torch.tensor([[[0, 1], [1, 0]]]), 3).permute(0, 3, 1, 2).float()
    assert float(Dice().loss(right, y)) == pytest.approx(0, abs=1e-4)
    assert state_of(Dice(), (right, y))["dice"] == 1


# Batches and networks


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


def test_a_network_may_take_several_inputs(rng: np.random.Generator) -> None:
    x, y, model = torch.from_numpy(rng.normal(size=(9, 3))).float(), torch.from_numpy(rng.integers(0, 4, 9)), network(4)
    several = Wired(lambda parts, image, shift: parts.net(image + shift), net=model)
    want, ones = evaluate(model, Samples(x + 1, y)).result(), torch.ones_like(x)
    for one in ({"image": x, "shift": ones, "label": y}, ((x, ones), y), ([x, ones], y)):
        assert evaluate(several, [one]).result() == pytest.approx(want, rel=1e-6)


OUT = torch.ones(2)


@listed(
    ("key", "raw"),
    [
        (None, OUT),
        (None, (OUT, 0)),
        (0, (OUT, 1)),
        (None, {"aux": 0, "logits": OUT}),
        (None, {"mine": OUT}),
        ("mine", {"aux": 0, "mine": OUT}),
        ("logits", SimpleNamespace(logits=OUT)),
        ("logits", namedtuple("Both", ("aux", "logits"))(0, OUT)),
        ("logits", OUT),  # a tensor is the prediction, as in torchvision's networks in evaluation mode
    ],
    ids=str,
)
def test_the_prediction_in_a_network_s_output(key: str | int | None, raw: Any) -> None:
    assert Classification(output_key=key).output(raw) is OUT


class Lists(Classification):
    def read(self, batch: Any) -> Any:
        return (batch[0],), batch[1]


LISTED = [torch.zeros(4) for _ in range(5)], torch.arange(5) % 3
MONAI = {"image": torch.ones(4, 3), "label": torch.arange(4) % 2, "image_meta_dict": {"filename_or_obj": ["a", "b", "c", "d"]}}
"""As MONAI's loaders give them: an image, its label, and what else is known of it."""


def test_a_network_that_takes_other_arguments_is_told_what_it_got_and_what_to_do() -> None:
    linear, with_keys = nn.Sequential(nn.Linear(3, 2)), Classification(input_keys=("image",))
    of_lists = Wired(lambda net, images: net.layer(torch.stack(images)), layer=nn.Linear(4, 3))
    for model, odd in ((of_lists, LISTED), (linear, MONAI)):
        with pytest.raises(TypeError) as caught:
            evaluate(model, [odd], task=CLASSIFICATION)
        assert "read(batch)" in caught.value.__notes__[0]
    assert evaluate(of_lists, [LISTED], task=Lists()).count == 5
    assert evaluate(linear, [MONAI], task=with_keys).result() == evaluate(linear, [(MONAI["image"], MONAI["label"])]).result()


ZEROS, MAPS, TWO = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, 4, 4), torch.zeros(4, 2)


def test_the_task_of_a_kind_of_targets() -> None:
    assert isinstance(find_task("auto", kind_of(ZEROS)), Classification)
    assert isinstance(find_task("auto", kind_of(ZEROS.view(2, 1, 1))), Segmentation)
    assert find_task("auto") == CLASSIFICATION
    assert find_task("regression", kind_of(torch.zeros(2))) == REGRESSION


def a_metric_called(name: str) -> Callable[[], Any]:
    return lambda: type("Wrong", (Regression,), {"metric": name})


@listed(
    ("call", "key"),
    [
        (lambda: REGRESSION.loss(torch.zeros(3, 2), torch.zeros(3)), "targets"),
        (lambda: CLASSIFICATION.read((1, 2, 3)), "read"),
        (lambda: CLASSIFICATION.read(torch.zeros(2)), "Tensor"),
        (lambda: CLASSIFICATION.read({"label": 1}), "label"),
        (lambda: CLASSIFICATION.read({"label": 1, "y": 2, "image": 3}), "target_key"),
        (lambda: CLASSIFICATION.read({"image": 1, "text": 2}), "image, text"),
        (lambda: Classification().count(None), "read"),
        (lambda: Dice().loss(MAPS[:, :1], torch.zeros(2, 4, 4, dtype=torch.int64)), "class"),
        (lambda: Dice(cross_entropy=-1), "cross_entropy"),
        (lambda: CLASSIFICATION.output({"aux": 1, "mine": 2}), "aux, mine"),
        (lambda: Classification(output_key="logits").output(SimpleNamespace(out=3)), "output_key"),
        (lambda: find_task("auto", kind_of(torch.zeros(2, 3))), "regression"),
        (lambda: find_task("auto", kind_of(ZEROS.view(2, 1))), "multi-label"),
        (lambda: find_task("regression", kind_of(ZEROS)), "regression"),
        (lambda: find_task("regresion"), "regression"),
        *[(a_metric_called(name), "metric") for name in ("loss", "Mean Error", "mae_1")],
        (lambda: MetricState.union([REGRESSION.state(), TAGS.state()]), "one task"),
        (lambda: PER_PIXEL.state().result(), "one batch"),
        (lambda: PER_PIXEL.loss(MAPS, torch.zeros(2, 4, 4)), "labels"),
        (lambda: PER_PIXEL.loss(MAPS, torch.zeros(2, dtype=torch.int64)), "labels"),
        (lambda: CLASSIFICATION.sums(torch.zeros(4), torch.zeros(4, dtype=torch.int64)), "scores"),
        (lambda: CLASSIFICATION.loss(TWO, torch.tensor([1, -1, -1, 1])), "-1"),  # the class -1 was left out once
        (lambda: CLASSIFICATION.sums(TWO, torch.tensor([1, -1, -1, 1])), "-1"),
        (lambda: CLASSIFICATION.sums(MAPS, torch.full((2, 4, 4), 7)), "7"),
        (lambda: AUC.sums(MAPS[:, :, 0, 0], torch.tensor([7, 0])), "7"),
        (lambda: TAGS.loss(torch.zeros(2, 3), torch.tensor([[1, 0, -1], [0, 1, 1]])), "-1"),  # CheXpert's uncertain label
        (lambda: state_of(TAGS, (torch.zeros(2, 3), torch.full((2, 3), 0.9))), "0.9"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(call: Callable[[], Any], key: str) -> None:
    with naming(key):
        call()
    assert TAGS.loss(torch.zeros(3, 1), torch.full((3, 1), 0.9)) > 0  # control: soft labels train
