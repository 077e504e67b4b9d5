"""Summarise clients' metrics, and read numbered ones such as ``accuracy-class-0``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import count, takewhile

import numpy as np

from fl_bn.task import Task, weighted_mean


def series(metrics: Mapping[str, float], stem: str) -> list[float]:
    """Return the metrics ``stem`` + "0", ``stem`` + "1", ..., up to the first missing name."""
    names = (f"{stem}{index}" for index in count())
    return [metrics[name] for name in takewhile(metrics.__contains__, names)]


def named_series(stem: str, values: Sequence[float]) -> dict[str, float]:
    """Return ``stem`` + "0", ``stem`` + "1", ... -> value: the inverse of ``series``."""
    return {f"{stem}{index}": value for index, value in enumerate(values)}


def fits(task: Task, name: str, value: float) -> bool:
    """Tell whether ``value`` is finite and in the range of the task's metric ``name``."""
    low, high = task.declared()[name]
    return math.isfinite(value) and low <= value <= high


def over_clients(task: Task, measured: Sequence[Mapping[str, float]], robust: bool = False) -> dict[str, float]:
    """Summarise the metrics of several clients, each client counted once.

    Of the task's own metric: mean, standard deviation and worst value (``accuracy``, ``accuracy-std``,
    ``accuracy-min``). Of ``loss``: mean, or median if ``robust``, since it has no range. Of every other: the mean
    of the values in the metric's range; NaN without any.
    """
    own = np.array([metrics[task.metric] for metrics in measured])
    worst = own.min() if task.higher_is_better else own.max()
    spread = {task.metric: own.mean(), f"{task.metric}-std": own.std(), f"{task.metric}-{task.worst()}": worst}
    losses = [metrics["loss"] for metrics in measured]
    summary = {name: float(value) for name, value in spread.items()} | {"loss": float(np.median(losses) if robust else np.mean(losses))}
    for stem in task.declared():
        if stem != task.metric:
            for name in _names(stem, measured):
                values = [metrics[name] for metrics in measured if name in metrics and fits(task, stem, metrics[name])]
                summary[name] = sum(values) / len(values) if values else math.nan
    return summary


def over_samples(measured: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Return each metric's mean over clients, weighted by numbers of test samples.

    Clients without a metric are left out of its mean: one without samples of class 3 has no accuracy of class 3.
    """
    names = dict.fromkeys(name for _, metrics in measured for name in metrics)
    known = {name: [(count, metrics[name]) for count, metrics in measured if name in metrics] for name in names}
    return {name: weighted_mean(of) for name, of in known.items()}


def _names(stem: str, measured: Sequence[Mapping[str, float]]) -> list[str]:
    names = (f"{stem}{index}" for index in count()) if stem.endswith("-") else iter([stem])
    return list(takewhile(lambda name: any(name in metrics for metrics in measured), names))
