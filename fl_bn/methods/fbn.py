"""Define FBN: normalise with shared running statistics, and correct the variance for the spread of the clients' means.

Overcoming the Challenges of Batch Normalization in Federated Learning, Guerraoui et al., Algorithm 2.

The statistics of the round before are constants in training. Clients report moments of their data. The server
pools these moments and moves the shared statistics towards them, as BatchNorm's running update does. With
``momentum`` and one local step this is Algorithm 2 exactly, also for unequal batches.

By default each round moves the shared statistics towards the pooled moments, by the share ``tracking`` of the difference
(``follow``). The share does not depend on the number of local steps. It falls with the learning rate, because
the weights then change less. With several local steps, only the first batch of a round passes through the shared
weights. Later batches pass through weights that the client has changed.

Within a round the statistics are constants, so the gradient ignores their later change. That change undoes part of the
step (Batch Normalization, Ioffe and Szegedy, ICML 2015, section 2). If the statistics were replaced in every round, the
scale of activations would grow from round to round, and the accuracy would fall. So each round moves the statistics
only part of the way to the measured moments (``follow``), in FBN and in HBN. This part shrinks as a layer's scale grows beyond the
scale that ``federation.unit_scale`` set (``slowdown``). At ``LIMIT`` times that scale the statistics no longer change, so the
gradient is then exact.

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
"""Standard deviation of every BatchNorm layer's input at the start of training with clipped gradients. New networks have about 0.3, too.

At a scale of 1, a step of the same rate changes the network's outputs a tenth as much, and FBN learns more slowly. At 0.3 without clipping,
it diverges with one class per client and several steps: docs/methods/fbn.md.
"""

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


def tracking(default: float | None) -> Any:
    """Declare the option ``tracking`` of FBN and HBN. If ``default`` is None, the method chooses the value."""
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
    """Compute a layer's new shared statistics from the old ones and the clients' moments.

    The clients' pooled moments get the weight ``tracking``, reduced with the learning rate and by
    ``slowdown``. If ``momentum`` is given, BatchNorm's running update replaces this rule. The
    update is applied once or, if ``report`` is ``BATCHES``, once for each local step.
    """
    pooled = pool(reports.parts, reports.average)
    if momentum is None:
        return follow(reports.shared, pooled, tracking * reports.pace, reports.scale)
    batches = reports.steps if report is StatisticsReport.BATCHES else 1
    return ema(reports.shared, pooled, 1 - (1 - momentum) ** batches)


@takes(FBNOptions)
def fbn(options: FBNOptions) -> Method:
    """Make the method FBN: training normalises with the shared statistics, which follow the clients' pooled moments.

    ``tracking`` is the weight of the first round's moments in the shared statistics. The weight falls with the learning
    rate. It also falls in a layer whose input grows in standard deviation (``slowdown``). Gradients are centred
    (``federation.gradients``). If gradients are clipped, the inputs of BatchNorm layers start with the standard deviation
    ``BOUNDED_SCALE``, otherwise with 1.

    With ``momentum`` the method is Algorithm 2: gradients are not centred, and the inputs always start with standard deviation 1.
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
