"""What a task is: a loss, metrics of sums that add, and how a batch and a network's answer are read."""

from __future__ import annotations

import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from fl_bn.task.metric_state import MetricState

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

    def samples_behind(self, targets: Any) -> dict[str, int]:
        """How many samples of ``targets`` each metric summarises, of those that do not summarise all: per-class ones, say.

        A client withholds a number that summarises fewer than its site's ``min-samples``.
        """
        return {}

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
        """The network's answer: a dict of inputs becomes keyword arguments, a tuple or list positional ones.

        Raises:
            ValueError: the network takes other arguments than the entries of a dict.
        """
        if isinstance(inputs, Mapping):
            try:
                return model(**inputs)
            except TypeError as error:
                if not (takes := _other_arguments(model, inputs)):
                    raise
                raise ValueError(
                    f"task {self.name}: the inputs of a batch are {', '.join(map(str, inputs))}, but {type(model).__name__}.forward takes "
                    f"{takes}. Name the entries that are its inputs: {type(self).__name__}(input_keys=('{next(iter(inputs))}',)); one "
                    "alone is given by position"
                ) from error
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


def _other_arguments(model: nn.Module, inputs: Mapping[Any, Any]) -> str:
    """Return what the network's ``forward`` takes, where it cannot be called with ``inputs`` as keyword arguments; else nothing."""
    try:
        takes = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a forward in C has none
        return ""
    try:
        takes.bind(**{str(key): value for key, value in inputs.items()})
    except TypeError:
        return ", ".join(takes.parameters) or "none"
    return ""
