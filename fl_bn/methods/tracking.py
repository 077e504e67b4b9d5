"""Limit how fast shared statistics change, if training normalises with them alone (FBN) or mixed with batch statistics (HBN).

Within a round the statistics are constants, so the gradient ignores their later change. That change undoes part of the
step (Batch Normalization, Ioffe and Szegedy, ICML 2015, section 2). If the statistics were replaced in every round, the
scale of activations would grow from round to round, and the accuracy would fall. So each round moves the statistics
only part of the way to the measured moments (``follow``). This part shrinks as a layer's scale grows beyond the scale
that ``federation.unit_scale`` set (``slowdown``). At ``LIMIT`` times that scale the statistics no longer change, so the
gradient is then exact.
"""

from __future__ import annotations

import math
from typing import Any

from fl_bn.bn.moments import Moments, Running, ema
from fl_bn.options import Used, option

LIMIT = 1.5
"""Factor by which the standard deviation of a layer's input may grow before the layer's statistics no longer change.

The deviation of a layer is the geometric mean over its channels, without the dead ones.
"""
DEAD = 1e-12
"""Share of the layer's median variance below which a channel counts as dead (constant, perhaps behind a ReLU) and has no scale."""


def slowdown(shared: Running, scale: float = 1.0) -> float:
    """Return a factor from 0 to 1 for the weight of new moments in a layer's shared statistics.

    The factor falls as the standard deviation of the layer's input grows. This deviation is the geometric mean over the
    channels, without dead ones (``DEAD``).

    Args:
        shared: the layer's shared statistics.
        scale: the standard deviation at the start of the run.

    Returns:
        1 up to a deviation of ``scale``. Above it the factor falls linearly with the logarithm of the deviation, to 0 at
        ``LIMIT`` times ``scale``. It is 1 if all channels are dead.
    """
    var = shared.var.double()
    living = var[var > DEAD * var.median()]
    if len(living) == 0:
        return 1.0
    log_growth = float(living.log().mean()) / 2 - math.log(scale)
    return min(1.0, max(0.0, 1 - log_growth / math.log(LIMIT)))


def follow(shared: Running, measured: Moments, tracking: float, scale: float = 1.0) -> Running:
    """Move the shared statistics towards the measured moments by one step.

    Args:
        shared: the statistics before.
        measured: the pooled moments of the round.
        tracking: weight of ``measured`` in the result, in (0, 1]. It is multiplied by ``slowdown``.
        scale: standard deviation of the layer's input at the start of the run.

    Returns:
        The new statistics in float64.
    """
    return ema(shared, measured, tracking * slowdown(shared, scale))


def tracking(default: float | None, otherwise: str = "", *, instead: str) -> Any:
    """Declare the option ``tracking`` of FBN and HBN.

    Args:
        default: the option's default. None: the method chooses the value.
        otherwise: in words, the value that the method chooses if ``default`` is None.
        instead: run-config key of the option that takes the place of ``tracking`` if it is set.
    """
    return option(
        default,
        "weight of a round's pooled moments in the shared statistics, at the start",
        "(0, 1]",
        key="tracking",
        unset=0.0,
        otherwise=otherwise,
        used=Used(f"without {instead}", lambda config: not config[instead], (instead,)),
    )
