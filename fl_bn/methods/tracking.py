"""How fast shared statistics follow the weights, where training normalises with them (FBN, and half of HBN).

They are constants of a round: the gradient does not know that they will cancel its step (Batch Normalization, Ioffe and Szegedy, ICML 2015,
section 2). If they follow at once, the scale of activations grows from round to round, and the accuracy falls. So they follow slowly, and
the slower the more a layer's scale has grown from where ``federation.unit_scale`` started it; at ``LIMIT`` times that they stop, and from
there on the gradient feels what its steps do.
"""

from __future__ import annotations

import math
from typing import Any

from fl_bn.moments import Moments, Running, ema
from fl_bn.options import Used, option

LIMIT = 1.5
"""The growth of a layer's deviation, as its living channels' geometric mean, at which its statistics have come to a stop."""
DEAD = 1e-12
"""Share of the layer's median variance at which a channel counts as dead (behind a ReLU, or constant): it says nothing about a scale."""


def slowdown(shared: Running, scale: float = 1.0) -> float:
    """1 up to a deviation of ``scale``, then falling with its logarithm to 0 at ``LIMIT`` times that. Dead channels do not count; 1 where
    all are dead."""
    var = shared.var.double()
    living = var[var > DEAD * var.median()]
    if len(living) == 0:
        return 1.0
    log_growth = float(living.log().mean()) / 2 - math.log(scale)
    return min(1.0, max(0.0, 1 - log_growth / math.log(LIMIT)))


def follow(shared: Running, measured: Moments, tracking: float, scale: float = 1.0) -> Running:
    """One step of ``tracking``, in (0, 1], towards what was measured, slowed down as the scale has grown from ``scale``; float64."""
    return ema(shared, measured, tracking * slowdown(shared, scale))


def tracking(default: float | None, otherwise: str = "", *, instead: str) -> Any:
    """Return the option that FBN and HBN share. ``instead``: the key of the weight that takes its place where it is set."""
    return option(
        default,
        "weight of a round's pooled moments in the shared statistics, at the start",
        "(0, 1]",
        key="tracking",
        unset=0.0,
        otherwise=otherwise,
        used=Used(f"without {instead}", lambda config: not config[instead], (instead,)),
    )
