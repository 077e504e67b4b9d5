"""Evaluate in a secure sum: the server gets the means of the clients' losses and of the task's own metric.

Each client counts once, as in evaluations in the clear. Standard deviation, worst client and accuracies per
class are left out. Of three clients, mean and standard deviation nearly give each one's number, and a class may
have few samples.

Both numbers travel as shares of a range. This is the range that the task declares, with ``-LOSS_RANGE`` and
``LOSS_RANGE`` for an open end. Values beyond it are cut off.
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
    """Return the shapes of the summed values, by section and name."""
    return {SECTION: {LOSS: (1,), task.metric: (1,)}, "check": {"check": (len(CHECK),)}}


def parts_of(metrics: Mapping[str, float], task: Task, limit: float) -> Sections:
    """Return a client's numbers in units that fit a quantiser of ``[-limit, limit]``, by section of ``layout``.

    Args:
        metrics: the client's numbers, by name.
        task: the task, which declares the metric and its range.
        limit: the quantiser's range.

    Raises:
        ValueError: a number is NaN (no label, or a model that diverged), so the client has no part in the mean.
    """
    shares = {}
    for name in (LOSS, task.metric):
        if math.isnan(value := metrics[name]):
            raise ValueError(f"the {name} of this evaluation is NaN, which cannot be part of a sum")
        low, high = _range(name, task)
        shares[name] = torch.tensor([(min(max(value, low), high) - low) / (high - low) * limit], dtype=torch.float64)
    return {SECTION: shares, "check": {"check": torch.tensor(CHECK, dtype=torch.float64) * limit}}


def values_of(average: Sections, task: Task, limit: float) -> dict[str, float]:
    """Return the numbers in an average over clients, the inverse of ``parts_of``. A rounding beyond the range is cut off."""
    values = {}
    for name, mean in average[SECTION].items():
        low, high = _range(name, task)
        values[name] = low + min(max(float(mean) / limit, 0.0), 1.0) * (high - low)
    return values


def _range(name: str, task: Task) -> tuple[float, float]:
    low, high = (-math.inf, math.inf) if name == LOSS else task.declared()[name]
    return max(low, -LOSS_RANGE), min(high, LOSS_RANGE)
