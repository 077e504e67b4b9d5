"""Tell from a metric's name whether lower values are better."""

from __future__ import annotations

import re

LOWER = re.compile(r"loss|error|perplexity|nll|brier|distance|(?<![a-z])(r?mse|mae)(?![a-z])", re.IGNORECASE)
"""Matches names of metrics of which lower values are better."""


def lower_is_better(metric: str) -> bool:
    """Return whether lower values of ``metric`` are better. Only its name decides.

    >>> [lower_is_better(name) for name in ("accuracy", "eval_loss", "val_MSE")]
    [False, True, True]
    """
    return LOWER.search(metric) is not None
