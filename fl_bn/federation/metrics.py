"""Metrics by name: series of them, and what those of several clients say together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import count, takewhile

import numpy as np

from fl_bn.task import Task


def series(metrics: Mapping[str, float], stem: str) -> list[float]:
    """The metrics called ``stem`` and a number, in order; empty if there is none."""
    names = (f"{stem}{index}" for index in count())
    return [metrics[name] for name in takewhile(metrics.__contains__, names)]


def named_series(stem: str, values: Sequence[float]) -> dict[str, float]:
    """The inverse of ``series``."""
    return {f"{stem}{index}": value for index, value in enumerate(values)}


def fits(task: Task, name: str, value: float) -> bool:
    """Whether ``value`` is a finite one in the range of the metric ``name``."""
    low, high = task.declared()[name]
    return math.isfinite(value) and low <= value <= high


def over_clients(task: Task, measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of several clients taken together, each client counted once.

    Of the task's own metric, all of which must be in its range: mean, standard deviation, and the worst (``accuracy``, ``accuracy-std``,
    ``accuracy-min``). Of ``loss`` the mean. Of every other metric the mean over the clients that have it: a value out of its range
    counts as absent; NaN where all are.
    """
    own = np.array([metrics[task.metric] for metrics in measured])
    worst = own.min() if task.higher_is_better else own.max()
    spread = {task.metric: own.mean(), f"{task.metric}-std": own.std(), f"{task.metric}-{task.worst()}": worst}
    found = {name: float(value) for name, value in spread.items()} | {"loss": float(np.mean([metrics["loss"] for metrics in measured]))}
    for stem in task.declared():
        if stem != task.metric:
            for name in _names(stem, measured):
                values = [metrics[name] for metrics in measured if name in metrics and fits(task, stem, metrics[name])]
                found[name] = sum(values) / len(values) if values else math.nan
    return found


def _names(stem: str, measured: Sequence[Mapping[str, float]]) -> list[str]:
    names = (f"{stem}{index}" for index in count()) if stem.endswith("-") else iter([stem])
    return list(takewhile(lambda name: any(name in metrics for metrics in measured), names))
