"""A task: what a batch holds, what a network's output costs, and which metrics are measured.

A task's metrics are computed from sums: those of two sets of data add up to those of their union (torchmetrics' merge rule). So an
evaluation in batches, at clients, by domain, or under secure aggregation gives what one pass over all data gives.

A task of one's own is a class of about ten lines. Its network has one output per sample, its labels are grades:

>>> class Grades(Task):
...     name, metric, higher_is_better = "grades", "mae", False
...
...     def loss(self, output, targets):
...         return F.smooth_l1_loss(output.squeeze(1), targets.float())
...
...     def sums(self, output, targets):
...         return {"error": (output.squeeze(1) - targets).abs().sum(), "samples": len(targets)}
...
...     def metrics(self, sums):
...         return {"mae": float(sums["error"] / sums["samples"])}
>>> state = Grades().state()
>>> state.update(torch.tensor([[1.0], [2.5]]), torch.tensor([1, 3]))
>>> state.result()
{'loss': 0.0625, 'mae': 0.25}

Legend: B samples of a batch, C classes, D values, K labels, H height, W width.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn.own_code import Modules, function

IGNORE = 255  # what a mask says of a pixel that counts neither in the loss nor in the score
AUTO, OWN = "auto", "package.module:function"
MEAN_IOU, CLASS = "mean-iou", "accuracy-class-"
LABELS, MASKS, VALUES, LABEL_SETS = "one label per sample", "masks", "values", "a set of labels per sample"  # what targets may be

Range = tuple[float, float]
SHARE: Range = (0.0, 1.0)
ANY: Range = (-math.inf, math.inf)

_TARGET_KEYS = ("label", "labels", "y", "target", "targets", "mask")
_OUTPUT_KEYS = ("logits", "out")  # of transformers' and torchvision's networks


@dataclass(frozen=True)
class Task(ABC):
    """What a network is trained for: a loss, and metrics computed from sums. One of your own takes ten lines: docs/how-to/task.md.

    >>> from fl_bn import Classification, Task
    >>> task: Task = Classification(target_key="digit", output_key="scores")  # batches and networks may be dicts
    >>> state = task.state()
    >>> state.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    >>> state["accuracy"]
    0.5
    """

    name: ClassVar[str]
    metric: ClassVar[str]  # the one that tables and pictures show
    higher_is_better: ClassVar[bool] = True
    # Least and most of every metric; a name that ends in "-" stands for a series of them, numbered from 0. Where ``metric`` is not among
    # them, its range is ``ANY``. A metric that is neither does not travel from a client.
    ranges: ClassVar[Mapping[str, Range]] = {}
    takes: ClassVar[tuple[str, ...]] = ()  # the kinds of targets that the task learns from (``kind_of``); empty: any

    target_key: str = ""  # of batches that are dicts; ``read`` says what happens without
    input_keys: tuple[str, ...] = ()
    output_key: str | int | None = None  # the prediction in a network's output; ``output`` says what happens without

    def __init_subclass__(cls) -> None:
        names = [*getattr(cls, "ranges", {}), *([cls.metric] if hasattr(cls, "metric") else [])]
        for name in names:
            if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*-?", name) or name == "loss":
                raise ValueError(
                    f"task {cls.__name__}: a metric needs a name of small letters, digits and hyphens (and 'loss' is always there), "
                    f"but got {name!r}"
                )

    @abstractmethod
    def loss(self, output: Any, targets: Any) -> Tensor:
        """Mean over the batch, a scalar. ``output``: what ``self.output`` made of the network's."""

    @abstractmethod
    def sums(self, output: Any, targets: Any) -> Mapping[str, Tensor | float]:
        """Sums over the batch from which ``metrics`` computes; over several batches they are added up, in float64 or int64."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Metrics by name, of ``sums`` over any data; NaN where there is nothing to compute from."""

    def count(self, targets: Any) -> int:
        """How much a batch weighs in the mean loss: its number of samples."""
        return len(targets)

    def read(self, batch: Any) -> tuple[Any, Any]:
        """Inputs and targets of a batch: a pair, or a dict as many data sets give it.

        Of a dict, the targets are entry ``target_key`` or, without one, the only entry called label, labels, y, target, targets or mask.
        The inputs are the entries ``input_keys``, or all others: one alone as it is, several as a dict, which ``forward`` gives to the
        network as keyword arguments.

        Raises:
            ValueError: it is none of these.
        """
        if isinstance(batch, Mapping):
            found = [self.target_key] if self.target_key else [key for key in _TARGET_KEYS if key in batch]
            keys = list(self.input_keys) or [key for key in batch if key not in found]
            if len(found) != 1 or not keys or any(key not in batch for key in [*found, *keys]):
                raise ValueError(
                    f"task {self.name}: which of {', '.join(map(str, batch))} are inputs and targets? Name them: "
                    f"{type(self).__name__}(target_key=..., input_keys=(...,))"
                )
            return batch[keys[0]] if len(keys) == 1 else {key: batch[key] for key in keys}, batch[found[0]]
        if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) == 2:
            return batch[0], batch[1]
        shown = f"{type(batch).__name__}{f' of {len(batch)}' if isinstance(batch, Sequence) else ''}"
        raise ValueError(f"task {self.name}: a batch must be (inputs, targets) or a dict, but is a {shown}; override read(batch)")

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """The network's answer: a dict of inputs becomes keyword arguments, a tuple or list positional ones."""
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)

    def output(self, raw: Any) -> Any:
        """The prediction in a network's answer, which ``loss`` and ``sums`` get.

        That is entry ``output_key`` of a tuple or dict. Without one: a tuple's first, or of a dict the only one, or that called logits or
        out. A task whose loss needs more than the prediction overrides this.

        Raises:
            ValueError: a dict has none of these.
        """
        if isinstance(raw, Mapping):
            keys = list(raw) if len(raw) == 1 else [key for key in _OUTPUT_KEYS if key in raw]
            key = self.output_key if self.output_key is not None else keys[0] if len(keys) == 1 else None
            if key not in raw:
                raise ValueError(
                    f"task {self.name}: which of the network's outputs {', '.join(map(str, raw))} is the prediction? Name it: "
                    f"{type(self).__name__}(output_key=...)"
                )
            return raw[key]
        return raw[int(self.output_key or 0)] if isinstance(raw, tuple | list) else raw

    def predict(self, model: nn.Module, inputs: Any) -> Any:
        """``output(forward(model, inputs))``."""
        return self.output(self.forward(model, inputs))

    def state(self) -> MetricState:
        """Empty sums."""
        return MetricState(self)

    @classmethod
    def declared(cls) -> dict[str, Range]:
        """The range of every metric that the task may give, ``metric`` first."""
        return {cls.metric: cls.ranges.get(cls.metric, ANY), **cls.ranges}

    @classmethod
    def scale(cls, metric: str = "") -> float:
        """100 for a metric between 0 and 1, which tables and pictures show in percent, else 1. Empty: of ``cls.metric``."""
        return 100.0 if cls.declared().get(metric or cls.metric) == SHARE else 1.0

    @classmethod
    def shown(cls, value: float) -> str:
        """A value of ``metric`` for a log: 51.2%, or 0.3456."""
        return f"{value:.1%}" if cls.scale() == 100 else f"{value:.4g}"

    @classmethod
    def worst(cls) -> str:
        """What the worst client's value of ``metric`` is: ``min``, or ``max`` where lower is better."""
        return "min" if cls.higher_is_better else "max"


class MetricState:
    """The sums behind a task's metrics over some data, and the loss. ``update`` adds a batch, ``+`` and ``union`` other data.

    ``total`` is the sum of the losses of ``count`` samples (labelled pixels of masks).
    """

    def __init__(self, task: Task, total: float = 0.0, count: int = 0, sums: Mapping[str, Tensor] | None = None) -> None:
        self.task, self.total, self.count, self.sums = task, total, count, dict(sums or {})

    @torch.no_grad()
    def update(self, output: Any, targets: Any) -> None:
        """Add one batch. ``output``: what ``task.output`` made of the network's."""
        count = self.task.count(targets)
        self.total += float(self.task.loss(output, targets)) * count
        self.count += count
        for name, value in self.task.sums(output, targets).items():
            value = torch.as_tensor(value)
            value = value.to(torch.float64 if value.is_floating_point() else torch.int64)
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    @property
    def loss(self) -> float:
        """Mean over the samples; 0 where none is labelled."""
        return self.total / max(self.count, 1)

    def result(self) -> dict[str, float]:
        """``loss`` and the task's metrics by name. Raises ValueError where no batch was added."""
        if not self.sums:
            raise ValueError(f"task {self.task.name}: no batch was evaluated, so there is nothing to compute metrics from")
        return {"loss": self.loss, **self.task.metrics({name: value.cpu() for name, value in self.sums.items()})}

    def __getitem__(self, name: str) -> float:
        """One of ``result``."""
        return self.result()[name]

    def __add__(self, other: MetricState) -> MetricState:
        return self.union([self, other])

    @classmethod
    def union(cls, parts: Iterable[MetricState]) -> Self:
        """The state of all parts' data together: the parts' mean losses weigh by their counts, sums are added.

        Raises:
            ValueError: there is no part, or they are of several tasks.
        """
        parts = list(parts)
        if len({part.task for part in parts}) != 1:
            raise ValueError(f"a union needs parts of one task, but got {[part.task.name for part in parts] or 'no parts'}")
        count = sum(part.count for part in parts)
        total = sum(part.loss * part.count for part in parts)
        filled = [part.sums for part in parts if part.sums]
        names = filled[0] if filled else {}
        sums = {name: torch.stack([part[name].cpu() for part in filled]).sum(0) for name in names}
        return cls(parts[0].task, total, count, sums)

    def tensors(self) -> dict[str, Tensor]:
        """All of it as tensors on the CPU, which may travel and be added up: ``total`` float64, ``count`` int64, and the sums."""
        numbers = {"total": torch.tensor(self.total, dtype=torch.float64), "count": torch.tensor(self.count)}
        return numbers | {f"sums/{name}": value.cpu() for name, value in self.sums.items()}

    @classmethod
    def from_tensors(cls, task: Task, tensors: Mapping[str, Tensor]) -> Self:
        """The inverse of ``tensors``."""
        sums = {name.removeprefix("sums/"): value for name, value in tensors.items() if name.startswith("sums/")}
        return cls(task, float(tensors["total"]), int(tensors["count"]), sums)


class Classification(Task):
    """One of C classes per sample: scores (B, C), labels int64 (B,). Cross-entropy; accuracy, of all and of each class.

    >>> from fl_bn import Classification
    >>> state = Classification().state()
    >>> state.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    >>> state["accuracy"], state["accuracy-class-0"]
    (0.5, 0.5)
    """

    name, metric = "classification", "accuracy"
    ranges: ClassVar[Mapping[str, Range]] = {"accuracy": SHARE, MEAN_IOU: SHARE, CLASS: SHARE}
    takes = (LABELS,)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets)

    def sums(self, output: Tensor, targets: Tensor) -> dict[str, Tensor | float]:
        return {"confusion": confusion_counts(output, targets)}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        confusion = sums["confusion"]
        labels = int(confusion.sum())
        accuracy = int(confusion.trace()) / labels if labels else math.nan
        per_class = confusion.diagonal().double() / confusion.sum(1)  # NaN where the data have none of a class
        return {"accuracy": accuracy} | {f"{CLASS}{index}": value for index, value in enumerate(per_class.tolist())}


class Segmentation(Classification):
    """One of C classes per pixel: scores (B, C, H, W), masks int64 (B, H, W) with ``IGNORE`` where a pixel has no label.

    Over labelled pixels: the metrics of ``Classification``, and ``mean-iou``, the mean over classes that occur (torchmetrics' macro
    JaccardIndex).

    >>> from fl_bn import Segmentation
    >>> state = Segmentation().state()
    >>> state.update(torch.eye(2)[None, :, None], torch.tensor([[[0, 255]]]))
    >>> state["mean-iou"]
    1.0
    """

    name = "segmentation"
    takes = (MASKS,)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Mean over labelled pixels; 0 where there is none (torch's is NaN then)."""
        return F.cross_entropy(output, targets, ignore_index=IGNORE, reduction="sum") / (targets != IGNORE).sum().clamp(min=1)

    def count(self, targets: Tensor) -> int:
        return int((targets != IGNORE).sum())

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        hits = sums["confusion"].diagonal().double()
        union = sums["confusion"].sum(0) + sums["confusion"].sum(1) - hits
        return super().metrics(sums) | {MEAN_IOU: float((hits / union)[union > 0].mean())}


class Regression(Task):
    """D values per sample: outputs and targets (B, D), or (B,) and (B, 1) of one value. Mean squared error; R2, MSE and MAE.

    ``r2``: the mean over values that vary (scikit-learn's and torchmetrics' uniform average); good to ``1e-16 (mean / sd)^2``.

    >>> from fl_bn import Regression
    >>> state = Regression().state()
    >>> state.update(torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 3.0]))
    >>> state["r2"], state["mae"]
    (0.5, 0.5)
    """

    name, metric = "regression", "r2"
    ranges: ClassVar[Mapping[str, Range]] = {"r2": (-math.inf, 1.0), "mse": (0.0, math.inf), "mae": (0.0, math.inf)}
    takes = (VALUES,)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        output, targets = _alike(self, output, targets)
        dtype = torch.promote_types(output.dtype, targets.dtype)  # values are not rounded to the bfloat16 of mixed precision
        return F.mse_loss(output.to(dtype), targets.to(dtype))

    def sums(self, output: Tensor, targets: Tensor) -> dict[str, Tensor | float]:
        output, y = (t.double().reshape(len(t), -1) for t in _alike(self, output, targets))
        error = output - y
        sums = {"squared-error": error.square(), "absolute-error": error.abs(), "targets": y, "squared-targets": y.square()}
        return {"samples": len(y), **{name: value.sum(0) for name, value in sums.items()}}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        n, squares = sums["samples"], sums["squared-targets"]
        spread = squares - sums["targets"].square() / n
        varies = spread > 8 * torch.finfo(torch.float64).eps * squares
        r2 = (1 - sums["squared-error"] / spread)[varies].mean()
        return {"r2": float(r2), "mse": float((sums["squared-error"] / n).mean()), "mae": float((sums["absolute-error"] / n).mean())}


class MultiLabel(Task):
    """Any of K labels per sample: logits (B, K), targets 0 or 1 (B, K). Binary cross-entropy; mean average precision, F1.

    ``mean-average-precision``: scikit-learn's, of logits rounded to ``BINS`` bins. ``f1-micro``, ``f1-macro``: above probability 1/2.

    >>> from fl_bn import MultiLabel
    >>> state = MultiLabel().state()
    >>> state.update(torch.tensor([[3.0, -1.0], [1.0, 2.0]]), torch.tensor([[1, 0], [0, 1]]))
    >>> state["mean-average-precision"], state["f1-micro"]
    (1.0, 0.8)
    """

    name, metric = "multi-label", "mean-average-precision"
    ranges: ClassVar[Mapping[str, Range]] = {"mean-average-precision": SHARE, "f1-micro": SHARE, "f1-macro": SHARE}
    takes = (LABEL_SETS,)
    # The exact average precision needs the order of all scores, which no sum of fixed size has: logits are counted in equal bins between
    # -16 and 16, each 1/32 wide. Labels count that occur; for F1, in targets or predictions.
    BINS: ClassVar[int] = 1024

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        output, targets = _alike(self, output, targets)
        return F.binary_cross_entropy_with_logits(output, targets.to(output.dtype))

    def sums(self, output: Tensor, targets: Tensor) -> dict[str, Tensor | float]:
        output, y = _alike(self, output, targets)
        y, labels = y.long(), output.shape[1]
        said = (output > 0).long()
        binned = ((output.double() + 16) * (self.BINS / 32)).nan_to_num().long().clamp(0, self.BINS - 1)
        place = (torch.arange(labels, device=y.device) * 2 + y) * self.BINS + binned
        scores = torch.bincount(place.flatten(), minlength=labels * 2 * self.BINS).view(labels, 2, self.BINS)
        hits, missed, too_many = said * y, (1 - said) * y, said * (1 - y)
        return {"counts": torch.stack([hits.sum(0), missed.sum(0), too_many.sum(0)]), "scores": scores}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        hits, missed, too_many = sums["counts"].double()
        either = 2 * hits + missed + too_many
        f1 = (2 * hits / either)[either > 0]
        wrong, right = sums["scores"].flip(2).cumsum(2).double().unbind(1)  # above each threshold, from the highest one down
        recall = right / right[:, -1:]
        steps = recall.diff(dim=1, prepend=torch.zeros(len(recall), 1, dtype=torch.float64))
        precision = (steps * (right / (right + wrong).clamp(min=1))).sum(1)
        micro = float(2 * hits.sum() / either.sum())
        return {"mean-average-precision": float(precision.nanmean()), "f1-micro": micro, "f1-macro": float(f1.mean())}


CLASSIFICATION = Classification()
TASKS: dict[str, type[Task]] = {task.name: task for task in (Classification, Segmentation, Regression, MultiLabel)}


def kind_of(targets: Tensor) -> str:
    """``LABELS`` int64 (N,), ``LABEL_SETS`` int64 (N, K), ``MASKS`` int64 (N, H, W), or ``VALUES`` of floats (N,) or (N, D)."""
    return VALUES if targets.is_floating_point() else {1: LABELS, 2: LABEL_SETS}.get(targets.ndim, MASKS)


def find_task(name: str, kind: str | None = None, modules: Modules | None = None) -> Task:
    """The task ``name``: one of ``TASKS``, one's own as "package.module:function", or "auto" for classes per sample or pixel.

    A function, or class, of one's own is called without arguments. ``kind``: of the data's targets (``kind_of``); None: unknown, where
    "auto" is classification, whose metrics' names segmentation shares. ``modules``: where one's own may come from; None: from anywhere.

    Raises:
        ValueError: there is no such task, or it does not learn from targets of this kind.
    """
    if name == AUTO:
        if kind in (None, LABELS, MASKS):
            return Segmentation() if kind == MASKS else Classification()
        wanted = Regression.name if kind == VALUES else MultiLabel.name
        raise ValueError(f"the data have {kind}: if that is meant, set task='{wanted}'; task='auto' is for classes per sample or pixel")
    if name in TASKS:
        task: Task = TASKS[name]()
    elif ":" in name:
        try:
            task = function("your own task", name, modules)()
        except ValueError:
            raise
        except Exception as error:  # a stranger's module: anything may happen in it
            raise ValueError(f"task {name!r} raised {type(error).__name__}: {error}") from error
        if not isinstance(task, Task):
            raise ValueError(f"task {name!r} must return a Task (fl_bn.task), but returned {type(task).__name__}")
    else:
        raise ValueError(f"task must be {AUTO}, one of {', '.join(TASKS)}, or your own as {OWN}, but got {name!r}")
    if task.takes and kind is not None and kind not in task.takes:
        raise ValueError(f"task {task.name!r} learns from {' or '.join(task.takes)}, but the data have {kind}")
    return task


def to_device(batch: Any, device: torch.device) -> Any:
    """A tensor, or a tuple, list or dict of tensors, on ``device``."""
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return (tuple if isinstance(batch, tuple) else list)(to_device(value, device) for value in batch)
    return batch.to(device) if isinstance(batch, Tensor) else batch


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """A tensor, or those in a tuple, list or dict, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(part)


def confusion_counts(output: Tensor, targets: Tensor) -> Tensor:
    """Int64 (C, C), rows: labels, of scores (B, C) and labels (B,), or of scores (B, C, H, W) and masks (B, H, W)."""
    classes, predicted = output.shape[1], output.argmax(1)
    if targets.ndim > 1:
        labelled = targets != IGNORE
        predicted, targets = predicted[labelled], targets[labelled]
    return torch.bincount(targets * classes + predicted, minlength=classes**2).view(classes, classes)


def _alike(task: Task, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one shape: (B, 1) fits (B,), and nothing else is broadcast."""
    if output.shape == targets.shape:
        return output, targets
    if output.numel() == targets.numel() == len(targets):
        return output.reshape(-1), targets.reshape(-1)
    raise ValueError(f"task {task.name}: outputs {tuple(output.shape)} do not fit targets {tuple(targets.shape)}")
