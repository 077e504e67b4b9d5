"""Define the base class of tasks: a loss, metrics from sums, and how batches are read."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fl_bn.task.metrics import NAME, MetricState
from fl_bn.task.targets import batch_size

Range = tuple[float, float]
SHARE: Range = (0.0, 1.0)
ANY: Range = (-math.inf, math.inf)

_TARGET_KEYS = ("label", "labels", "y", "target", "targets", "mask")
_OUTPUT_KEYS = ("logits", "out")  # of transformers' and torchvision's networks


@dataclass(frozen=True)
class Task(ABC):
    """Define what a network learns: a loss, and metrics computed from sums.

    Your own takes ten lines: docs/how-to/task.md.

    >>> from fl_bn import Classification, Task
    >>> task: Task = Classification(target_key="digit", output_key="scores")  # batches and networks may be dicts
    >>> state = task.state()
    >>> state.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    >>> state["accuracy"]
    0.5

    Attributes:
        name: as in the run config and in messages.
        metric: name of the metric in tables and pictures.
        higher_is_better: whether higher values of ``metric`` are better.
        ranges: least and greatest value of every metric. A name that ends in "-" stands
            for a series, numbered from 0. Without an entry, the range of ``metric`` is
            ``ANY``. Clients send only ``metric`` and the metrics in ``ranges``.
        takes: kinds of targets that the task learns from. Empty: any.
        target_key: key of the targets, if batches are dicts. Empty: see ``read``.
        input_keys: keys of the inputs, if batches are dicts. Empty: see ``read``.
        output_key: key or index of the prediction in a network's output. None: see
            ``output``.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    higher_is_better: ClassVar[bool] = True
    ranges: ClassVar[Mapping[str, Range]] = {}
    takes: ClassVar[tuple[str, ...]] = ()

    target_key: str = ""
    input_keys: tuple[str, ...] = ()
    output_key: str | int | None = None

    def __init_subclass__(cls) -> None:
        names = [*getattr(cls, "ranges", {}), *([cls.metric] if hasattr(cls, "metric") else [])]
        for name in names:
            if not NAME.fullmatch(name) or name == "loss":
                raise ValueError(f"task {cls.__name__}: metric {name!r} is 'loss', or not in lower-case letters, digits and single hyphens")

    @abstractmethod
    def loss(self, output: Any, targets: Any) -> Tensor:
        """Compute the mean loss over a batch, a scalar.

        Args:
            output: the prediction, from ``self.output``.
            targets: of the batch.
        """

    @abstractmethod
    def sums(self, output: Any, targets: Any) -> Mapping[str, Tensor | float]:
        """Compute sums over a batch, for ``metrics``.

        Those of several batches are added up, in float64 or int64.

        Args:
            output: the prediction, from ``self.output``.
            targets: of the batch.

        Returns:
            Tensors or numbers by name, of the same shapes for every batch.
        """

    @abstractmethod
    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Compute the metrics from sums over any data.

        Args:
            sums: by name, on the CPU.

        Returns:
            Metrics by name; NaN for one that the data do not define.
        """

    def objects(self) -> Mapping[str, Any]:
        """Return further metrics by name: objects such as torchmetrics has (``MetricObject``).

        Every evaluation copies them, calls ``update`` for every batch, and ``compute``
        once. So the metric is that of all samples, not a mean over batches. Over several
        domains, it is the mean of the domains' values, weighted by samples.
        """
        return {}

    def samples_behind(self, targets: Any) -> dict[str, int]:
        """Return the number of samples in each metric of a part of ``targets``, such as a class.

        A client withholds a metric of fewer samples than its site's ``min-samples``.
        """
        return {}

    def count(self, targets: Any) -> int:
        """Return a batch's weight in the mean loss: its number of samples.

        Raises:
            ValueError: ``read`` returned no targets.
        """
        if targets is None:
            raise ValueError(f"task {self.name}: read(batch) returned no targets, so samples cannot be counted: return the inputs again")
        return batch_size(None, targets)

    def read(self, batch: Any) -> tuple[Any, Any]:
        """Split a batch into inputs and targets.

        A dict's targets are its entry ``target_key`` or else the only entry called label,
        labels, y, target, targets or mask. The inputs are the entries ``input_keys``, or
        all others. A single input is returned as it is, several as a dict, which
        ``forward`` passes to the network as keyword arguments.

        Args:
            batch: a pair of inputs and targets, or a dict.

        Raises:
            ValueError: the batch has another form, or its entries are ambiguous.
        """
        if isinstance(batch, Mapping):
            targets = [self.target_key] if self.target_key else [key for key in _TARGET_KEYS if key in batch]
            inputs = list(self.input_keys) or [key for key in batch if key not in targets]
            if len(targets) != 1 or not inputs or any(key not in batch for key in [*targets, *inputs]):
                raise ValueError(f"task {self.name}: expected target_key and input_keys that tell {', '.join(map(str, batch))} apart")
            return batch[inputs[0]] if len(inputs) == 1 else {key: batch[key] for key in inputs}, batch[targets[0]]
        if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) == 2:
            return batch[0], batch[1]
        kind = f"{type(batch).__name__}{f' of {len(batch)}' if isinstance(batch, Sequence) else ''}"
        raise ValueError(f"task {self.name}: a batch must be (inputs, targets) or a dict, but is a {kind}; override read(batch)")

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """Call the network on the inputs of a batch.

        Args:
            model: the network.
            inputs: a dict is passed as keyword arguments, a tuple or list as positional
                ones.

        Raises:
            TypeError: the network takes other arguments. A note names those of the call.
        """
        try:
            if isinstance(inputs, Mapping):
                return model(**inputs)
            return model(*inputs) if isinstance(inputs, tuple | list) and not isinstance(inputs, PackedSequence) else model(inputs)
        except TypeError as error:
            given = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else f"a {type(inputs).__name__}"
            error.add_note(
                f"task {self.name}: the network got the inputs of a batch ({given}); a dict as keyword arguments, a tuple or list as "
                f"positional ones. {type(self).__name__}(input_keys=(...,)) chooses among them; for other names override read(batch)"
            )
            raise

    def output(self, raw: Any) -> Any:
        """Select the prediction in a network's output, for ``loss`` and ``sums``.

        It is the entry ``output_key`` of a tuple or dict, or an object's attribute of
        this name. If ``output_key`` is None, it is a tuple's first entry, a dict's only
        entry, or in a larger dict the one called logits or out. A tensor is the
        prediction itself. A task whose loss needs more overrides this method.

        Args:
            raw: the network's output.

        Raises:
            ValueError: no entry or attribute is known to be the prediction.
        """
        if isinstance(self.output_key, str) and not isinstance(raw, Mapping | Tensor):
            if not hasattr(raw, self.output_key):
                raise ValueError(f"task {self.name}: output_key={self.output_key!r}, but a {type(raw).__name__} has no such attribute")
            return getattr(raw, self.output_key)
        if isinstance(raw, Mapping):
            keys = list(raw) if len(raw) == 1 else [key for key in _OUTPUT_KEYS if key in raw]
            key = self.output_key if self.output_key is not None else keys[0] if len(keys) == 1 else None
            if key not in raw:
                raise ValueError(f"task {self.name}: expected output_key, one of {', '.join(map(str, raw))} of the network's output")
            return raw[key]
        return raw[int(self.output_key or 0)] if isinstance(raw, tuple | list) else raw

    def predict(self, model: nn.Module, inputs: Any) -> Any:
        """Return the network's prediction for the inputs of a batch."""
        return self.output(self.forward(model, inputs))

    def state(self) -> MetricState:
        """Return an empty ``MetricState`` of this task."""
        return MetricState(self)

    @classmethod
    def declared(cls) -> dict[str, Range]:
        """Return the ranges of all metrics, ``metric`` first."""
        return {cls.metric: cls.ranges.get(cls.metric, ANY), **cls.ranges}

    @classmethod
    def scale(cls, metric: str = "") -> float:
        """Return the factor for tables: 100 (percent) for a range of 0 to 1, else 1.

        Args:
            metric: a name. Empty: ``cls.metric``.
        """
        return 100.0 if cls.declared().get(metric or cls.metric) == SHARE else 1.0

    @classmethod
    def format_metric(cls, value: float) -> str:
        """Format a value of ``metric`` for a log: ``51.2%`` of a share, else ``0.3456``."""
        return f"{value:.1%}" if cls.scale() == 100 else f"{value:.4g}"

    @classmethod
    def worst(cls) -> str:
        """Return ``min``, or ``max`` if lower is better."""
        return "min" if cls.higher_is_better else "max"
