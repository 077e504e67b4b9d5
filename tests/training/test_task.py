"""Tasks: metrics against scikit-learn and torchmetrics, sums that add, batches and networks of any form."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fl_bn.federation.local import Samples, evaluate
from fl_bn.federation.metrics import over_clients
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import METHODS
from fl_bn.task import (
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
    find_task,
    kind_of,
    to_device,
)
from fl_bn.task.ranking import log_odds
from tests.local import train

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
    with pytest.raises(ValueError, match="parts of one task"):
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
    with pytest.raises(ValueError, match=r"outputs \(3, 2\) do not fit targets \(3,\)"):
        REGRESSION.loss(out.expand(3, 2), y)


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


class Own(Task):
    """Ten lines: grades as numbers, by absolute error; the lower the better."""

    name, metric, higher_is_better = "grades", "mean-absolute-error", False

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.smooth_l1_loss(output.squeeze(1), targets.to(output.dtype))

    def sums(self, output: Tensor, targets: Tensor) -> Mapping[str, Tensor | float]:
        return {"error": (output.squeeze(1) - targets).abs().sum(), "samples": len(targets)}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        return {"mean-absolute-error": float(sums["error"] / sums["samples"])}


def network(outputs: int = 1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs))


@pytest.mark.parametrize("task", [Own(), REGRESSION, TAGS], ids=lambda task: task.name)
def test_every_task_can_be_trained(task: Task, rng: np.random.Generator) -> None:
    x = torch.from_numpy(rng.normal(size=(40, 3))).float()
    y = (x[:, :2] > 0).long() if task is TAGS else x.sum(1) if task is REGRESSION else (x.sum(1) > 0).long() * 3
    model, samples = network(2 if task is TAGS else 1), Samples(x, y)
    before = evaluate(model, samples, task=task)
    result = train(model, samples, [np.arange(40)] * 60, LocalTraining(40, steps=60), 0.2, METHODS["fbn"](), task=task)
    after = evaluate(model, samples, task=task)
    assert after.loss < 0.7 * before.loss
    assert (after[task.metric] > before[task.metric]) is task.higher_is_better
    assert math.isfinite(result.loss)


def test_the_worst_client_of_a_metric_that_should_be_low_has_the_highest() -> None:
    found = over_clients(Own(), [{"mean-absolute-error": 1.0, "loss": 1.0}, {"mean-absolute-error": 3.0, "loss": 2.0}])
    assert found == {"mean-absolute-error": 2.0, "mean-absolute-error-std": 1.0, "mean-absolute-error-max": 3.0, "loss": 1.5}
    texts = Own().format_metric(0.51234), CLASSIFICATION.format_metric(0.51234), REGRESSION.format_metric(-12.3456)
    assert texts == ("0.5123", "51.2%", "-12.35")


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


@pytest.mark.parametrize(
    ("given_", "problem"),
    [
        ((1, 2, 3), r"a batch must be \(inputs, targets\) or a dict, but is a tuple of 3; override read"),
        (torch.zeros(2), "but is a Tensor"),
        ({"label": 1}, "which of label are inputs and targets"),
        ({"label": 1, "y": 2, "image": 3}, "Name them: Classification.target_key"),
        ({"image": 1, "text": 2}, "which of image, text"),
    ],
)
def test_a_batch_that_is_neither_is_refused_with_what_to_do(given_: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        CLASSIFICATION.read(given_)


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


def test_an_output_with_attributes_answers_by_name() -> None:
    """Before, output_key was ignored for such an object. A tensor is the prediction, as in torchvision's networks in evaluation mode."""
    task = Classification(output_key="logits")
    assert task.output(SimpleNamespace(logits=3)) == 3
    assert task.output(namedtuple("Both", ("logits", "aux"))(4, 5)) == 4
    assert torch.equal(task.output(torch.ones(2)), torch.ones(2))
    with pytest.raises(ValueError, match="output_key='logits', but the network's output is a SimpleNamespace without an attribute"):
        task.output(SimpleNamespace(out=3))


def test_a_dict_of_outputs_without_a_known_name_is_refused() -> None:
    with pytest.raises(ValueError, match="which of the network's outputs aux, mine is the prediction"):
        CLASSIFICATION.output({"aux": 1, "mine": 2})
    assert CLASSIFICATION.output({"mine": 2}) == 2


def test_kinds_of_targets_and_the_tasks_that_take_them() -> None:
    zeros = torch.zeros(2, dtype=torch.int64)
    assert isinstance(find_task("auto", kind_of(zeros)), Classification)
    assert isinstance(find_task("auto", kind_of(zeros.view(2, 1, 1))), Segmentation)
    assert find_task("auto") == CLASSIFICATION
    assert find_task("regression", kind_of(torch.zeros(2))) == Regression()
    for targets, wanted in ((torch.zeros(2, 3), "regression"), (zeros.view(2, 1), "multi-label")):
        with pytest.raises(ValueError, match=f"set task='{wanted}' for them"):
            find_task("auto", kind_of(targets))
    with pytest.raises(ValueError, match="task 'regression' learns from values, but the data have one label per sample"):
        find_task("regression", kind_of(zeros))
    with pytest.raises(ValueError, match="task must be auto, one of classification, classification-auc, segmentation, dice, regr"):
        find_task("regresion")


def test_a_metric_must_have_a_name_for_columns() -> None:
    for name in ("loss", "Mean Error", "mae_1"):
        with pytest.raises(ValueError, match="a metric's name must begin with a lower-case letter"):
            type("Wrong", (Regression,), {"metric": name})


def test_what_is_no_tensor_stays_as_it_is() -> None:
    moved = to_device({"a": (torch.zeros(1), "text"), "b": [3]}, torch.device("meta"))
    assert moved["a"][0].device.type == "meta"
    assert (moved["a"][1], moved["b"]) == ("text", [3])


def test_a_list_that_the_network_takes_as_one_argument_needs_a_task_of_its_own() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, images: list[Tensor]) -> Tensor:
            return self.layer(torch.stack(images))

    class Lists(Classification):
        def read(self, batch: Any) -> Any:
            return (batch[0],), batch[1]

    batch = [torch.randn(4) for _ in range(5)], torch.arange(5) % 3
    said = r"are a list of 5. Images.forward gets them as 5 arguments, but takes another number. .* Classification.read\(batch\)"
    with pytest.raises(ValueError, match=said):
        evaluate(Images(), [batch], task=Classification())
    assert evaluate(Images(), [batch], task=Lists()).count == 5


def test_entries_of_a_dict_that_the_network_does_not_take_are_named_with_the_way_out() -> None:
    """As MONAI's loaders give them: an image, its label, and what else is known of it."""
    x, y = torch.randn(4, 3), torch.arange(4) % 2
    monai = {"image": x, "label": y, "image_meta_dict": {"filename_or_obj": ["a", "b", "c", "d"]}}
    net = nn.Sequential(nn.Linear(3, 2))
    said = r"a batch are image, image_meta_dict, but Sequential.forward takes input\. .* Classification\(input_keys=\('image',\)\)"
    with pytest.raises(ValueError, match=said):
        evaluate(net, [monai])
    told = evaluate(net, [monai], task=Classification(input_keys=("image",))).result()
    assert told == evaluate(net, [(x, y)]).result()

    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, image: Tensor, image_meta_dict: Any) -> Tensor:
            raise TypeError("of its own")

    with pytest.raises(TypeError, match="of its own"):  # control: it takes these entries
        evaluate(Typed(), [monai])


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


@pytest.mark.parametrize("targets", [torch.zeros(4, 5, 6), torch.zeros(4, 1, 5, 6), torch.zeros(4, dtype=torch.int64)])
def test_labels_of_another_form_are_named(targets: Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected whole numbers \(4, 5, 6\) as labels of scores \(4, 3, 5, 6\)"):
        Segmentation().loss(torch.zeros(4, 3, 5, 6), targets)


def test_control_soft_labels_train() -> None:
    scores = torch.zeros(4, 3)
    assert float(Classification().loss(scores, torch.full((4, 3), 1 / 3))) == pytest.approx(math.log(3))


def test_a_batch_without_targets_cannot_be_counted() -> None:
    with pytest.raises(ValueError, match=r"task classification: read\(batch\) returns None as the targets, so an evaluation cannot count"):
        Classification().count(None)


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


def test_scores_without_an_axis_of_classes_are_named() -> None:
    with pytest.raises(ValueError, match="classification is evaluated by scores"):
        Classification().sums(torch.zeros(4), torch.zeros(4, dtype=torch.int64))


def test_two_classes_are_0_and_1() -> None:
    """Before, the class -1 was left out of training and evaluation, so that the accuracy was 1."""
    scores, labels = torch.randn(4, 2), torch.tensor([1, -1, -1, 1])
    said = "expected the labels 0 and 1 of two classes, but one is -1: write 0 for a class -1, and -100 for a sample without a label"
    with pytest.raises(ValueError, match=said):
        Classification().loss(scores, labels)
    with pytest.raises(ValueError, match=said):
        Classification().sums(scores, labels)
    Classification().loss(scores, labels.masked_fill(labels < 0, -100))  # control


def test_pixels_without_a_label_under_a_loss_of_ones_own() -> None:
    """Before, an evaluation ended in torch's error about a shape."""
    task, scores, masks = Classification(), torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    unlabelled = masks.clone()
    unlabelled[0, 0] = 255
    known = {name: value.clone() for name, value in task.sums(scores, unlabelled.masked_fill(unlabelled == 255, -100)).items()}
    found = task.sums(scores, unlabelled)
    assert all(torch.equal(found[name], known[name]) for name in known)
    assert int(found["confusion"].sum()) == 28
    said = "the network scores 3 classes, 0 to 2, but a label is 7: give the network an output for every"
    with pytest.raises(ValueError, match=said):
        task.sums(scores, masks.masked_fill(masks == 1, 7))
    with pytest.raises(ValueError, match=said):
        ClassificationAUC().sums(scores[:, :, 0, 0], torch.tensor([7, 0]))


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


def test_labels_of_several_that_are_neither_0_nor_1_are_named() -> None:
    """CheXpert has -1 for an uncertain label. Before, it counted as a sample of the label beside it."""
    scores, uncertain = torch.zeros(2, 3), torch.tensor([[1, 0, -1], [0, 1, 1]])
    with pytest.raises(ValueError, match="each target is 0 or 1, but one is -1: replace uncertain labels"):
        TAGS.loss(scores, uncertain)
    with pytest.raises(ValueError, match="each target is 0 or 1, but one is 0.9"):
        state_of(TAGS, (scores, torch.full((2, 3), 0.9)))
    assert TAGS.loss(scores, torch.full((2, 3), 0.9)) > 0  # soft labels train


def test_one_label_may_come_without_an_axis() -> None:
    scores, labels = torch.tensor([[2.0], [-1.0], [0.5]]), torch.tensor([1, 0, 0])
    assert state_of(TAGS, (scores, labels)).result() == state_of(TAGS, (scores, labels[:, None])).result()
