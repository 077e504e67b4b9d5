"""Define FBN: normalise with shared statistics, which include the means' spread.

Overcoming the Challenges of Batch Normalization in Federated Learning, Guerraoui et
al., Algorithm 2.

Clients report moments. The server pools them and moves the shared statistics
towards them, by the share ``tracking`` of the difference (``follow``), whatever the
number of local steps. The share falls with the learning rate, because the weights
then change less. With ``momentum`` and one local step this is Algorithm 2 exactly,
also for unequal batches.

Within a round the statistics are constants, so the gradient ignores their later
change, which undoes part of the step (Batch Normalization, Ioffe and Szegedy, ICML
2015, section 2). If each round replaced the statistics, the scale of activations
would grow, and the accuracy would fall. So the share also shrinks as a layer's
scale grows beyond that of ``federation.unit_scale`` (``slowdown``). At ``LIMIT``
times that scale the statistics stay, and the gradient is exact.

Symbols: b (beta) -> momentum, K n -> count of the pooled moments, E -> steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from fl_bn.bn.layers import FederatedBatchNorm
from fl_bn.bn.moments import Moments, Running, ema, pool
from fl_bn.methods.method import LayerReports, Method, StatisticsReport
from fl_bn.options import Options, option, takes

BOUNDED_SCALE = 0.3
"""Standard deviation of BatchNorm inputs at the start, with clipped gradients.

At 1, FBN learns more slowly. At 0.3 without clipping, it diverges with one class
per client and several steps: docs/methods/fbn.md.
"""

LIMIT = 1.5
"""Growth of an input's deviation at which its layer's statistics stay."""
DEAD = 1e-12
"""Share of a layer's median variance below which a channel counts as dead."""


def slowdown(shared: Running, scale: float = 1.0) -> float:
    """Return a factor from 0 to 1 for the weight of a layer's new moments.

    It is 1 up to an input of standard deviation ``scale``. Above, it falls linearly
    with the logarithm of the deviation, to 0 at ``LIMIT`` times ``scale``. The
    deviation is the geometric mean over the channels, without dead ones (``DEAD``).
    If all are dead, it is 1.
    """
    var = shared.var.double()
    living = var[var > DEAD * var.median()]
    if len(living) == 0:
        return 1.0
    log_growth = float(living.log().mean()) / 2 - math.log(scale)
    return min(1.0, max(0.0, 1 - log_growth / math.log(LIMIT)))


def follow(shared: Running, measured: Moments, tracking: float, scale: float = 1.0) -> Running:
    """Move shared statistics towards the measured moments by one step.

    ``measured`` has the weight ``tracking``, in (0, 1], times ``slowdown``. The
    result is float64.
    """
    return ema(shared, measured, tracking * slowdown(shared, scale))


def tracking(default: float | None) -> Any:
    """Declare the option ``tracking`` of FBN and HBN. None: the method's choice."""
    meaning = "weight of a round's pooled moments in the shared statistics, at the start"
    return option(default, meaning, "(0, 1]", key="tracking", unset=0.0, hidden=True)


REPORTS = {"first": StatisticsReport.FIRST, "pass": StatisticsReport.PASS, "all": StatisticsReport.BATCHES}


@dataclass(frozen=True)
class FBNOptions(Options):
    """Hold the options of ``fbn``."""

    name: ClassVar[str] = "fbn"
    tracking: float = tracking(0.02)
    momentum: float | None = option(
        None,
        "weight of one batch in the shared statistics, as in Algorithm 2, instead of tracking (beta in the paper); 0: tracking",
        "(0, 1]",
        unset=0.0,
    )
    report: str = option(
        "first",
        "moments that clients report: of the first training batch, of a pass over their data before training, or of all batches",
        REPORTS,
        hidden=True,
    )


def combine(reports: LayerReports, tracking: float, momentum: float | None, report: StatisticsReport) -> Running:
    """Compute a layer's new shared statistics from the clients' moments.

    Their weight is ``tracking``, reduced with the learning rate and by
    ``slowdown``. ``momentum`` means BatchNorm's running update instead: once or, if
    ``report`` is ``BATCHES``, once per local step.
    """
    pooled = pool(reports.parts, reports.average)
    if momentum is None:
        return follow(reports.shared, pooled, tracking * reports.pace, reports.scale)
    batches = reports.steps if report is StatisticsReport.BATCHES else 1
    return ema(reports.shared, pooled, 1 - (1 - momentum) ** batches)


@takes(FBNOptions)
def fbn(options: FBNOptions) -> Method:
    """Make FBN: training normalises with shared statistics, which follow the pooled moments.

    Without ``momentum``, gradients are centred (``federation.gradients``). If
    gradients are also clipped, BatchNorm inputs start with the standard deviation
    ``BOUNDED_SCALE``, otherwise 1. With ``momentum`` it is 1, and the method is
    Algorithm 2.
    """
    report, own = REPORTS[options.report], options.momentum is None
    return Method(
        "fbn",
        layer=FederatedBatchNorm.from_batch_norm,
        report=report,
        combine=partial(combine, tracking=options.tracking, momentum=options.momentum, report=report),
        calibrate=True,
        constant=True,
        bounded_scale=BOUNDED_SCALE if own else None,
        centre=own,
    )
