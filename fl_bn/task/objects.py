"""Handle metrics that are objects with ``update``, ``compute`` and ``reset``, as torchmetrics has them."""

from __future__ import annotations

import copy
import logging
import math
import re
import threading
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch

from fl_bn.task.targets import to_device

if TYPE_CHECKING:
    from fl_bn.task.task import Task

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*-?")
"""The pattern of a metric's name. A name that ends in "-" stands for a series, such as one value per class."""
Own = TypeVar("Own", bound="Task")
LOGGER = logging.getLogger("flwr")
UNDEFINED = re.compile(r".*(undefined|ill-defined|not defined|meaningless|Returns 0|0/0)", re.DOTALL)
"""Matches the warnings with which torchmetrics and scikit-learn return a placeholder, because the data do not define a metric."""
_WATCHING = threading.RLock()  # Python's filters of warnings are those of all threads


@runtime_checkable
class MetricObject(Protocol):
    """Describe a metric over any number of batches: an object of torchmetrics, or one of your own."""

    def update(self, preds: Any, target: Any, /) -> None:
        """Add a batch, with the predictions that ``Task.output`` returns and the targets."""

    def compute(self) -> Any:
        """Return the metric over all batches since the last ``reset``, as one number."""

    def reset(self) -> None:
        """Forget all batches."""


def extended(task: Own, loss: Callable[[Any, Any], torch.Tensor] | None = None, metrics: Mapping[str, MetricObject] | None = None) -> Own:
    """Return a copy of ``task`` with another loss, or with further metrics.

    Args:
        task: The task.
        loss: A function that takes an output and the targets, and returns the mean loss over the batch. None: the loss
            of ``task``.
        metrics: Further metrics by name.

    Raises:
        ValueError: The name of a metric is not valid, or the task already has a metric of this name.
    """
    made, further = copy.copy(task), {**task.objects(), **(metrics or {})}
    for name in metrics or {}:
        if not NAME.fullmatch(name) or name.endswith("-") or name == "loss" or name in task.declared() or name in task.objects():
            raise ValueError(
                f"metrics: the name {name!r} is not allowed. A name begins with a lower-case letter, ends in a lower-case letter or digit, "
                "and has only lower-case letters, digits and single hyphens. These names are taken: loss, "
                f"{', '.join([*task.declared(), *task.objects()])}"
            )
    if loss is not None:
        vars(made)["loss"] = loss  # in place of the method of the class
    if metrics:
        vars(made)["objects"] = further.copy
    return made


def is_ours(task: Task) -> bool:
    """Return whether a task is one of fl-bn's, without a loss or metrics of the user's own."""
    return type(task).__module__.partition(".")[0] == "fl_bn" and not {"loss", "objects"} & vars(task).keys()


def fresh(task: Task) -> dict[str, MetricObject]:
    """Return copies of a task's metric objects, without any batch.

    Raises:
        ValueError: A metric is a class, or lacks one of the methods ``update``, ``compute`` and ``reset``.
    """
    made = {}
    for name, metric in task.objects().items():
        if isinstance(metric, type) or not isinstance(metric, MetricObject):
            what = f"the class {metric.__name__}" if isinstance(metric, type) else f"a {type(metric).__name__}"
            raise ValueError(f"metric {name!r} must be an object with update, compute and reset, such as torchmetrics has, but is {what}")
        made[name] = copy.deepcopy(metric)
        made[name].reset()
    return made


def update(objects: Mapping[str, MetricObject], output: Any, targets: Any) -> None:
    """Add a batch, copied to the CPU, to every metric object."""
    cpu = torch.device("cpu")
    output, targets = to_device(output, cpu), to_device(targets, cpu)
    for name, metric in objects.items():
        try:
            metric.update(output, targets)
        except Exception as error:
            error.add_note(f"in metric {name!r}, a {type(metric).__name__}")
            raise


def compute(objects: Mapping[str, MetricObject]) -> dict[str, float]:
    """Return name -> value of every metric object; NaN where the object warns that its value is undefined.

    Raises:
        ValueError: A value is not one number.
    """
    values = {}
    for name, metric in objects.items():
        computed = _computed(name, metric)
        try:
            value = torch.as_tensor(computed)
        except (RuntimeError, TypeError, ValueError) as error:
            what = "None" if computed is None else f"a {type(computed).__name__}"
            raise ValueError(
                f"metric {name!r} must compute one number, but computed {what}: return one number, such as math.nan where there is none, "
                "and give several numbers as several metrics"
            ) from error
        if value.numel() != 1:
            raise ValueError(
                f"metric {name!r} must compute one number, but computed a tensor of shape {tuple(value.shape)}: choose an average over "
                "classes"
            )
        if value.is_complex():
            raise ValueError(f"metric {name!r} must compute one real number, but computed {computed}: return its real part or its size")
        values[name] = float(value)
    return values


def _computed(name: str, metric: MetricObject) -> Any:
    """Return the metric's value. Return NaN if it warns (``UNDEFINED``), even where such a warning is ignored or raised as an error."""
    here, why = threading.get_ident(), list[str]()
    with _WATCHING, warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message: Warning | str, *where: Any, **how: Any) -> None:
            if threading.get_ident() == here and UNDEFINED.match(str(message)):
                why.append(str(message))
            else:
                shown(message, *where, **how)

        warnings.showwarning = show
        warnings.filterwarnings("always", UNDEFINED.pattern, UserWarning)
        value = metric.compute()
    if why:
        _say(name, why[0])
    return math.nan if why else value


@cache
def _say(name: str, why: str) -> None:
    """Log why a metric is NaN, once in a process."""
    LOGGER.warning("metric %r is NaN, and counts in no mean, where its object warns: %s", name, why)
