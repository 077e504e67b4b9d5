"""Tasks: metrics by hand, against scikit-learn and torchmetrics, sums that add, batches and networks of any form, and what is refused."""

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
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

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
from tests.training.core import Samples, evaluate, named_series, over_clients, series

REGRESSION, TAGS = Regression(), MultiLabel()


def state_of(task: Task, *batches: tuple[Tensor, Tensor]) -> MetricState:
    state = task.state()
    for output, targets in batches:
        state.update(output, targets)
    return state


def batch(task: Task, rng: np.random.Generator, samples: int) -> tuple[Tensor, Tensor]:
    """Outputs float64 and targets of four classes, values or labels, some pixels without a label."""
    kind, noise = (task.takes or (VALUES,))[0], lambda *shape: torch.from_numpy(rng.normal(size=shape))
    if kind == VALUES:
        return noise(samples, 4), noise(samples, 4) + 3
    if kind == LABEL_SETS:
        return 2 * noise(samples, 4), torch.from_numpy(rng.integers(0, 2, (samples, 4)))
    if kind == MASKS:
        y = torch.from_numpy(rng.integers(0, 4, (samples, 3, 5)))
        y[:, 0] = 255
        return noise(samples, 4, 3, 5), y
    return noise(samples, 4), torch.from_numpy(rng.integers(0, 4, samples))


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
    travelled = MetricState.union([MetricState.from_tensors(task, part.tensors()) for part in parts])
    for found in (state_of(task, *batches), MetricState.union(parts), folded, travelled):
        assert found.result() == pytest.approx(whole, rel=1e-9, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("name", TASKS)
def test_control_means_of_parts_are_not_the_metrics_of_the_union(name: str, rng: np.random.Generator) -> None:
    task = TASKS[name]()
    parts = [state_of(task, batch(task, rng, size)) for size in (2, 9)]
    mean = np.mean([part[task.metric] for part in parts])
    assert MetricState.union(parts)[task.metric] != pytest.approx(mean, rel=1e-3)
    other = CLASSIFICATION if task != CLASSIFICATION else TAGS
    with pytest.raises(ValueError):  # noqa: PT011
        MetricState.union([parts[0], state_of(other, batch(other, rng, 2))])


def test_regression_is_that_of_scikit_learn_and_torchmetrics(rng: np.random.Generator) -> None:
    metrics, functional = pytest.importorskip("sklearn.metrics"), pytest.importorskip("torchmetrics.functional")
    out, y = batch(REGRESSION, rng, 50)
    found = state_of(REGRESSION, (out[:20], y[:20]), (out[20:], y[20:])).result()
    want = {
        "r2": metrics.r2_score(y, out),
        "mse": metrics.mean_squared_error(y, out),
        "mae": metrics.mean_absolute_error(y, out),
        "loss": metrics.mean_squared_error(y, out),
    }
    assert found == pytest.approx(want, rel=1e-12)
    assert found["r2"] == pytest.approx(float(functional.r2_score(out, y)), rel=1e-9)
    pooled = 1 - float((out - y).square().sum() / (y - y.mean()).square().sum())
    assert found["r2"] != pytest.approx(pooled, rel=1e-3)  # control: one R2 over all values is another number


def test_regression_of_one_value_takes_a_column_for_a_list_and_broadcasts_nothing() -> None:
    out, y = torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([1.0, 2.0, 3.0])
    assert float(REGRESSION.loss(out, y)) == pytest.approx(4 / 3)
    assert float(((out - y) ** 2).mean()) != pytest.approx(4 / 3)  # control: what broadcasting makes of it
    assert state_of(REGRESSION, (out, y))["r2"] == pytest.approx(1 - 4 / 2)


def test_values_are_not_rounded_to_the_precision_of_outputs() -> None:
    y = torch.tensor([1.001, 2.003])
    out = y.bfloat16()
    assert float(REGRESSION.loss(out, y)) == pytest.approx(float((out.float() - y).square().mean()))
    assert float(nn.functional.mse_loss(out, y.bfloat16())) == 0  # control: rounded, they are equal
    assert REGRESSION.loss(torch.zeros(2, dtype=torch.float64, requires_grad=True), y).dtype == torch.float64


def test_r2_has_no_value_where_targets_do_not_vary_and_stands_large_means() -> None:
    out = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert math.isnan(state_of(REGRESSION, (out, torch.full((3,), 0.1, dtype=torch.float64)))["r2"])
    assert math.isnan(state_of(REGRESSION, (out[:1], out[:1]))["r2"])
    y = out + 1e4
    assert state_of(REGRESSION, (y + 0.5, y))["r2"] == pytest.approx(1 - 0.75 / 2, rel=1e-6)


def test_multi_label_is_that_of_scikit_learn_and_torchmetrics(rng: np.random.Generator) -> None:
    metrics, functional = pytest.importorskip("sklearn.metrics"), pytest.importorskip("torchmetrics.functional.classification")
    logits = torch.from_numpy(rng.normal(-1, 3, (400, 5)))
    y = torch.from_numpy((rng.random((400, 5)) < [0.5, 0.3, 0.1, 0.02, 0]).astype(int))
    logits += 2.0 * y
    logits[:, 4] = -5  # label 4 is nowhere: neither in targets, nor predicted
    found = state_of(TAGS, (logits[:100], y[:100]), (logits[100:], y[100:])).result()
    said, occurs = (logits > 0).long(), y.any(0)
    assert found["f1-micro"] == pytest.approx(metrics.f1_score(y, said, average="micro"), rel=1e-12)
    assert found["f1-macro"] == pytest.approx(metrics.f1_score(y, said, average="macro", zero_division=np.nan), rel=1e-12)
    assert found["f1-micro"] == pytest.approx(float(functional.multilabel_f1_score(logits, y, 5, average="micro")), rel=1e-6)
    assert found["loss"] == pytest.approx(float(nn.functional.binary_cross_entropy_with_logits(logits, y.double())), rel=1e-9)
    binned = ((logits.clamp(-16, 15.999) + 16) * 32).long()
    exact = metrics.average_precision_score(y[:, occurs], binned[:, occurs])
    assert found["mean-average-precision"] == pytest.approx(exact, rel=1e-12)
    unbinned = metrics.average_precision_score(y[:, occurs], logits[:, occurs])
    assert found["mean-average-precision"] == pytest.approx(unbinned, abs=0.01)
    coarse = metrics.average_precision_score(y[:, occurs], said[:, occurs])
    assert abs(coarse - unbinned) > 0.05  # control: what two bins make of it


def test_where_no_label_occurs_there_is_no_f1_and_no_precision() -> None:
    found = state_of(TAGS, (torch.full((3, 2), -1.0), torch.zeros(3, 2, dtype=torch.int64))).result()
    assert [math.isnan(found[name]) for name in TAGS.declared()] == [True] * 3
    diverged = state_of(TAGS, (torch.full((3, 2), math.nan), torch.ones(3, 2, dtype=torch.int64)))
    assert diverged["f1-micro"] == 0
    assert math.isnan(diverged.loss)


@pytest.mark.parametrize("classes", [2, 4])
def test_auc_is_that_of_scikit_learn_and_torchmetrics(classes: int, rng: np.random.Generator) -> None:
    metrics, functional = pytest.importorskip("sklearn.metrics"), pytest.importorskip("torchmetrics.functional.classification")
    y = torch.from_numpy(rng.integers(0, classes, 400))
    scores = torch.from_numpy(rng.normal(size=(400, classes))) + torch.eye(classes)[y]
    for strength in (0.1, 1.0, 30.0):  # 30: probabilities of which the floats are exactly 1
        found = state_of(ClassificationAUC(), (scores[:90] * strength, y[:90]), (scores[90:] * strength, y[90:])).result()
        own = [float(functional.binary_auroc(log_odds(scores * strength)[:, label], (y == label).long())) for label in range(classes)]
        assert found["auc"] == pytest.approx(np.mean(own), abs=2e-3)
        assert found["accuracy"] == pytest.approx(metrics.accuracy_score(y, scores.argmax(1)))
    softmax = scores.softmax(1)
    exact = metrics.roc_auc_score(y, softmax[:, 1] if classes == 2 else softmax, multi_class="ovr")
    assert state_of(ClassificationAUC(), (scores, y))["auc"] == pytest.approx(exact, abs=2e-3)
    coarse = np.mean([metrics.roc_auc_score(y == label, scores.argmax(1) == label) for label in range(classes)])
    assert abs(coarse - exact) > 0.02  # control: the order of the predictions alone


def test_a_class_without_samples_has_no_part_in_the_auc_and_one_class_has_none() -> None:
    scores = torch.tensor([[2.0, 1.0, 9.0], [1.0, 2.0, 9.0], [3.0, 0.0, 9.0]])
    assert state_of(ClassificationAUC(), (scores, torch.tensor([0, 1, 0])))["auc"] == 1.0
    assert math.isnan(state_of(ClassificationAUC(), (scores, torch.tensor([1, 1, 1])))["auc"])
    assert state_of(ClassificationAUC(), (torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])))["auc"] == 0.5  # all are equal


def network(outputs: int = 1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs))


def test_batches_of_any_loader_are_read(rng: np.random.Generator) -> None:
    x, y = torch.from_numpy(rng.normal(size=(20, 3))).float(), torch.from_numpy(rng.integers(0, 4, 20))
    model = network(4)
    want = evaluate(model, Samples(x, y), 7).result()
    loaders: dict[str, tuple[Any, Task]] = {
        "DataLoader": (DataLoader(TensorDataset(x, y), batch_size=7), CLASSIFICATION),
        "dicts": (DataLoader([{"image": a, "label": b} for a, b in zip(x, y, strict=True)], batch_size=7), CLASSIFICATION),
        "a generator": (((x[i : i + 7], y[i : i + 7]) for i in range(0, 20, 7)), CLASSIFICATION),
        "keys": (
            [{"label": y[i : i + 7].flip(0), "fine": y[i : i + 7], "image": x[i : i + 7], "id": i} for i in range(0, 20, 7)],
            Classification(target_key="fine", input_keys=("image",)),
        ),
    }
    for name, (batches, task) in loaders.items():
        assert evaluate(model, batches, task=task).result() == pytest.approx(want, rel=1e-6), name
    wrong = Classification(target_key="label", input_keys=("image",))
    assert evaluate(model, loaders["keys"][0], task=wrong)["loss"] != pytest.approx(want["loss"], rel=1e-3)  # control: other labels


class Several(nn.Module):
    """Two inputs; answers with a tuple or a dict."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.net, self.form = network(4), form

    def forward(self, image: Tensor, shift: Tensor) -> Any:
        out, aux = self.net(image + shift), image.sum()
        return {"tuple": (out, aux), "dict": {"aux": aux, "logits": out}, "named": {"aux": aux, "mine": out}}[self.form]


@pytest.mark.parametrize(("form", "key"), [("tuple", None), ("dict", None), ("named", "mine"), ("tuple", 0)])
def test_networks_with_several_inputs_that_answer_in_tuples_or_dicts(form: str, key: str | int | None, rng: np.random.Generator) -> None:
    x, y = torch.from_numpy(rng.normal(size=(9, 3))).float(), torch.from_numpy(rng.integers(0, 4, 9))
    task, model = Classification(output_key=key), Several(form)
    want = evaluate(model.net, Samples(x + 1, y)).result()
    ones = torch.ones_like(x)
    for inputs in ({"image": x, "shift": ones}, (x, ones), [x, ones]):
        raw = task.forward(model.eval(), inputs)
        assert state_of(task, (task.output(raw), y)).result() == pytest.approx(want, rel=1e-6)
    assert evaluate(model, [{"image": x, "shift": ones, "label": y}], task=task).result() == pytest.approx(want, rel=1e-6)


def test_labels_may_have_an_axis_of_channels() -> None:
    """MONAI's masks are (B, 1, H, W), MedMNIST's labels (B, 1). A label below 0 is none, as in torch's losses."""
    made = torch.Generator().manual_seed(0)
    scores, masks = torch.randn(4, 3, 5, 6, generator=made), torch.randint(0, 3, (4, 5, 6), generator=made)
    masks[0, 0], masks[1, 0] = 255, -100
    for task in (Segmentation(), Dice(), Dice(cross_entropy=1.0)):
        assert torch.equal(task.loss(scores, masks.unsqueeze(1)), task.loss(scores, masks))
        assert state_of(task, (scores, masks.unsqueeze(1))).result() == state_of(task, (scores, masks)).result()
        assert task.loss(scores, masks) == task.loss(scores, masks.masked_fill(masks < 0, 255))
        assert task.count(masks) == task.count(masks.masked_fill(masks < 0, 255))
    scores, labels = torch.randn(8, 3, generator=made), torch.tensor([0, 1, 2, 0, 1, 2, -100, 0])
    for task in (Classification(), ClassificationAUC()):
        assert torch.equal(task.loss(scores, labels[:, None]), task.loss(scores, labels))
        known = state_of(task, (scores[labels >= 0], labels[labels >= 0])).result()
        assert {**state_of(task, (scores, labels[:, None])).result(), "loss": 0} == {**known, "loss": 0}


def test_the_loss_of_partly_labelled_samples_does_not_hang_on_the_batches() -> None:
    made = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(16, 3, generator=made), torch.randint(0, 3, (16,), generator=made)
    labels[:7] = -100
    for task in (Classification(), ClassificationAUC()):
        whole = state_of(task, (scores, labels)).result()
        for sizes in ([8, 8], [7, 9], [1, 15]):
            parts = zip(scores.split(sizes), labels.split(sizes), strict=True)
            assert state_of(task, *parts).result() == pytest.approx(whole), sizes
        assert whole["loss"] == pytest.approx(float(task.loss(scores[7:], labels[7:])))
        other = labels.masked_fill(labels < 0, -1)
        assert state_of(task, (scores, other)).result() == pytest.approx(whole)


def test_a_batch_without_any_label_changes_nothing() -> None:
    """Before, its loss was NaN, and so was the mean of the round."""
    scores = torch.randn(4, 3, requires_grad=True)
    for none in (-100, -1):
        loss = Classification().loss(scores, torch.full((4,), none))
        (gradient,) = torch.autograd.grad(loss, scores)
        assert (loss.item(), gradient.abs().max().item()) == (0, 0)


@pytest.mark.parametrize("some", [-100, 0])
def test_the_loss_is_bit_for_bit_that_of_torch(some: int) -> None:
    scores, labels = torch.randn(7, 3, requires_grad=True), torch.tensor([0, 1, 2, some, some, 2, 1])
    ours, theirs = Classification().loss(scores, labels), torch.nn.functional.cross_entropy(scores, labels)
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad(loss, scores)[0] for loss in (ours, theirs)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_labels_may_have_any_dtype_of_whole_numbers(dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(0)
    scores, masks = torch.randn(4, 3, 5, 6, generator=made), torch.randint(0, 3, (4, 5, 6), generator=made)
    for task in (Segmentation(), Dice(), Dice(cross_entropy=1.0), Classification()):
        assert task.loss(scores, masks.to(dtype)) == task.loss(scores, masks)
        assert state_of(task, (scores, masks.to(dtype))).result() == state_of(task, (scores, masks)).result()
    assert Classification().loss(scores[:, :2, 0, 0], torch.tensor([True, False, True, False])) > 0
    assert Segmentation().samples_behind(masks.masked_fill(masks == 1, -1))["accuracy-class-1"] == 0


def test_class_255_counts_where_it_is_a_class() -> None:
    labels = torch.tensor([[255, 255, 255, 3]])
    scores = torch.nn.functional.one_hot(labels, 300).double().transpose(1, 2)
    result = state_of(Classification(), (scores, labels)).result()
    assert (result["accuracy"], result["accuracy-class-255"]) == (1.0, 1.0)
    assert state_of(Segmentation(), (scores, labels)).result()["accuracy-class-3"] == 1.0


def test_one_label_may_come_without_an_axis() -> None:
    scores, labels = torch.tensor([[2.0], [-1.0], [0.5]]), torch.tensor([1, 0, 0])
    assert state_of(TAGS, (scores, labels)).result() == state_of(TAGS, (scores, labels[:, None])).result()
    assert TAGS.loss(scores, torch.full((3, 1), 0.9)) > 0  # soft labels train


def test_an_output_with_attributes_answers_by_name() -> None:
    """A tensor is the prediction, as in torchvision's networks in evaluation mode."""
    task = Classification(output_key="logits")
    assert task.output(SimpleNamespace(logits=3)) == 3
    assert task.output(namedtuple("Both", ("logits", "aux"))(4, 5)) == 4
    assert torch.equal(task.output(torch.ones(2)), torch.ones(2))
    assert CLASSIFICATION.output({"mine": 2}) == 2


def test_the_task_of_a_kind_of_targets() -> None:
    assert isinstance(find_task("auto", kind_of(ZEROS)), Classification)
    assert isinstance(find_task("auto", kind_of(ZEROS.view(2, 1, 1))), Segmentation)
    assert find_task("auto") == CLASSIFICATION
    assert find_task("regression", kind_of(torch.zeros(2))) == Regression()


class Images(nn.Module):
    """Takes a list of images as one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, images: list[Tensor]) -> Tensor:
        return self.layer(torch.stack(images))


class Lists(Classification):
    def read(self, batch: Any) -> Any:
        return (batch[0],), batch[1]


ZEROS = torch.zeros(2, dtype=torch.int64)
IMAGES = [torch.zeros(4) for _ in range(5)], torch.arange(5) % 3
MONAI = {"image": torch.ones(4, 3), "label": torch.arange(4) % 2, "image_meta_dict": {"filename_or_obj": ["a", "b", "c", "d"]}}
"""As MONAI's loaders give them: an image, its label, and what else is known of it."""
PIXELS, SCORES = torch.zeros(2, 3, 4, 4), torch.zeros(4, 2)


def test_a_task_of_one_s_own_or_a_key_is_the_way_out_for_odd_batches() -> None:
    assert evaluate(Images(), [IMAGES], task=Lists()).count == 5
    net = nn.Sequential(nn.Linear(3, 2))
    told = evaluate(net, [MONAI], task=Classification(input_keys=("image",))).result()
    assert told == evaluate(net, [(MONAI["image"], MONAI["label"])]).result()


@pytest.mark.parametrize(("network", "batch"), [(Images(), IMAGES), (nn.Sequential(nn.Linear(3, 2)), MONAI)])
def test_a_network_that_takes_other_arguments_is_told_what_it_got(network: nn.Module, batch: Any) -> None:
    with pytest.raises(TypeError) as caught:
        evaluate(network, [batch], task=Classification())
    assert "read(batch)" in caught.value.__notes__[0]


def test_pixels_without_a_label_do_not_count_in_classification() -> None:
    masks = torch.arange(32).view(2, 4, 4) % 3
    masks[0, 0] = 255
    found = Classification().sums(PIXELS, masks)
    assert torch.equal(found["confusion"], Classification().sums(PIXELS, masks.masked_fill(masks == 255, -100))["confusion"])
    assert int(found["confusion"].sum()) == 28


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
        (lambda: Dice().loss(PIXELS[:, :1], torch.zeros(2, 4, 4, dtype=torch.int64)), "class"),
        (lambda: Dice(cross_entropy=-1), "cross_entropy"),
        (lambda: CLASSIFICATION.output({"aux": 1, "mine": 2}), "aux, mine"),
        (lambda: Classification(output_key="logits").output(SimpleNamespace(out=3)), "output_key"),
        (lambda: find_task("auto", kind_of(torch.zeros(2, 3))), "regression"),
        (lambda: find_task("auto", kind_of(ZEROS.view(2, 1))), "multi-label"),
        (lambda: find_task("regression", kind_of(ZEROS)), "regression"),
        (lambda: find_task("regresion"), "regression"),
        *[(lambda name=name: type("Wrong", (Regression,), {"metric": name}), "metric") for name in ("loss", "Mean Error", "mae_1")],
        *[
            (lambda y=y: Segmentation().loss(torch.zeros(4, 3, 5, 6), y), "labels")
            for y in (torch.zeros(4, 5, 6), torch.zeros(4, 1, 5, 6), torch.zeros(4, dtype=torch.int64))
        ],
        (lambda: Classification().sums(torch.zeros(4), torch.zeros(4, dtype=torch.int64)), "scores"),
        (lambda: Classification().loss(SCORES, torch.tensor([1, -1, -1, 1])), "-1"),  # the class -1 was left out once
        (lambda: Classification().sums(SCORES, torch.tensor([1, -1, -1, 1])), "-1"),
        (lambda: Classification().sums(PIXELS, torch.full((2, 4, 4), 7)), "7"),
        (lambda: ClassificationAUC().sums(PIXELS[:, :, 0, 0], torch.tensor([7, 0])), "7"),
        (lambda: TAGS.loss(torch.zeros(2, 3), torch.tensor([[1, 0, -1], [0, 1, 1]])), "-1"),  # CheXpert's uncertain label
        (lambda: state_of(TAGS, (torch.zeros(2, 3), torch.full((2, 3), 0.9))), "0.9"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(call: Callable[[], Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        call()


PER_PIXEL = Segmentation()
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
    found = state(PER_PIXEL, COUNTS, total=3.5).result()
    assert (found["loss"], found["accuracy"]) == (0.5, 5 / 7)
    assert series(found, CLASS)[:3] == [3 / 4, 1, 0]
    assert math.isnan(series(found, CLASS)[3])
    assert len(series(found, CLASS)) == 4
    assert found["mean-iou"] == pytest.approx((3 / 5 + 2 / 3 + 0 / 1) / 3)  # of class 0: 3 hits, 1 missed, 1 too many
    assert "mean-iou" not in state(CLASSIFICATION, COUNTS).result()


def test_nothing_to_count_is_nan() -> None:
    empty = state(PER_PIXEL, torch.zeros(3, 3, dtype=torch.int64))
    assert math.isnan(empty["accuracy"])
    assert math.isnan(empty["mean-iou"])
    assert empty.loss == 0
    with pytest.raises(ValueError):  # noqa: PT011
        PER_PIXEL.state().result()


def test_counts_and_mean_iou_are_torchmetrics(rng: np.random.Generator) -> None:
    functional = pytest.importorskip("torchmetrics.functional.classification")
    out, y = masks(rng)
    counts = confusion_counts(out, y)
    assert counts.tolist() == functional.multiclass_confusion_matrix(out, y, 6, ignore_index=255).tolist()
    want = functional.multiclass_jaccard_index(out, y, 6, ignore_index=255)
    found = state(PER_PIXEL, counts)
    assert found["mean-iou"] == pytest.approx(float(want), rel=1e-6)
    accuracies = functional.multiclass_accuracy(out, y, 6, average=None, ignore_index=255)
    assert series(found.result(), CLASS)[:4] == pytest.approx(accuracies[:4].tolist(), rel=1e-6)
    hits, union = counts.diagonal().double(), counts.sum(0) + counts.sum(1) - counts.diagonal()
    assert float((hits / union.clamp(min=1)).mean()) != pytest.approx(float(want), rel=1e-2)  # control: a class nowhere is not IoU 0
    assert PER_PIXEL.count(y) == found.count == 3 * 4 * 7  # control: 255 is counted nowhere


def test_the_loss_leaves_unlabelled_pixels_out_and_only_those_of_masks(rng: np.random.Generator) -> None:
    out, y = masks(rng)
    labelled = out.movedim(1, -1)[y != 255]
    assert float(PER_PIXEL.loss(out, y)) == pytest.approx(float(F.cross_entropy(labelled, y[y != 255])), rel=1e-12)
    nothing = PER_PIXEL.loss(out.requires_grad_(), torch.full_like(y, 255))
    nothing.backward()
    assert float(nothing.detach()) == 0 == float(out.grad.abs().max())  # type: ignore[union-attr]
    classes = torch.randn(3, 300, dtype=torch.float64)
    label = torch.tensor([255, 1, 255])  # ImageNet has such a class
    assert torch.equal(CLASSIFICATION.loss(classes, label), F.cross_entropy(classes, label))
    assert not torch.equal(CLASSIFICATION.loss(classes, label), F.cross_entropy(classes, label, ignore_index=255))  # control
    assert int(confusion_counts(classes, label).sum()) == 3


def test_means_over_clients_are_of_those_that_have_the_class() -> None:
    clients = [
        {"accuracy": 1.0, "loss": 1.0, "mean-iou": 0.5, **named_series(CLASS, [1.0, math.nan, math.nan])},
        {"accuracy": 0.5, "loss": 2.0, **named_series(CLASS, [0.5, 0.25])},
        {"accuracy": 0.0, "loss": 6.0, "mean-iou": 7.0, **named_series(CLASS, [-1.0, 0.75])},  # what is no share does not count
    ]
    found = over_clients(PER_PIXEL, clients)
    assert (found["accuracy"], found["accuracy-min"], found["loss"]) == (0.5, 0.0, 3.0)
    assert found["accuracy-std"] == pytest.approx((1 / 6) ** 0.5)
    assert found["mean-iou"] == 0.5
    assert series(found, CLASS)[:2] == [0.75, 0.5]
    assert math.isnan(series(found, CLASS)[2])
    assert len(series(found, CLASS)) == 3
    made_up = over_clients(PER_PIXEL, [{"accuracy": 1.0, "loss": 1.0, f"{CLASS}99999999": 1.0}])
    assert set(made_up) == {"accuracy", "accuracy-std", "accuracy-min", "loss"}  # one that is made up costs nothing
