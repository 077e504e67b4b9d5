"""Evaluate in a secure sum: the server learns the means of the clients' losses and of the task's own metric.

Each client counts once, as in evaluations outside of secure sums. The standard deviation, the worst client
and accuracies per class are not reported. With three clients, mean and standard deviation nearly reveal each
client's number. The accuracy of a class may come from few samples.

Loss and metric are scaled to the range that the task declares for them. An open end of a range is
``-LOSS_RANGE`` or ``LOSS_RANGE``. Values outside the range are cut off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fl_bn.federation.payload import Sections
from fl_bn.flower.secagg.sums import CHECK, LOSS_RANGE, Layout
from fl_bn.task import Task

SECTION, LOSS = "evaluation", "loss"


def layout(task: type[Task] | Task) -> Layout:
    """Return section -> name -> shape of the values in a secure sum of evaluations."""
    return {SECTION: {LOSS: (1,), task.metric: (1,)}, "check": {"check": (len(CHECK),)}}


def parts_of(metrics: Mapping[str, float], task: Task, limit: float) -> Sections:
    """Scale a client's metrics to the quantiser's range, by section of ``layout``.

    Args:
        metrics: the client's metrics, by name.
        task: the task, which declares the metric and its range.
        limit: the quantiser's range is ``[-limit, limit]``.

    Raises:
        ValueError: a metric is NaN, because there are no labels or the model diverged. The client then takes
            no part in the mean.
    """
    shares = {}
    for name in (LOSS, task.metric):
        if math.isnan(value := metrics[name]):
            raise ValueError(
                f"the {name} of this evaluation is NaN, which cannot be part of a sum: lower the learning rate, or check the test data"
            )
        low, high = _range(name, task)
        shares[name] = torch.tensor([(min(max(value, low), high) - low) / (high - low) * limit], dtype=torch.float64)
    return {SECTION: shares, "check": {"check": torch.tensor(CHECK, dtype=torch.float64) * limit}}


def values_of(average: Sections, task: Task, limit: float) -> dict[str, float]:
    """Convert an average over clients back to metrics, the inverse of ``parts_of``.

    Rounding may put a value outside of its range. Such a value is cut off.

    Args:
        average: the average, by section of ``layout`` and name.
        task: the task, which declares the metric and its range.
        limit: the quantiser's range is ``[-limit, limit]``.
    """
    values = {}
    for name, mean in average[SECTION].items():
        low, high = _range(name, task)
        values[name] = low + min(max(float(mean) / limit, 0.0), 1.0) * (high - low)
    return values


def _range(name: str, task: Task) -> tuple[float, float]:
    low, high = (-math.inf, math.inf) if name == LOSS else task.declared()[name]
    return max(low, -LOSS_RANGE), min(high, LOSS_RANGE)
