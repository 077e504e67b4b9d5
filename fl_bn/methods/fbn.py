"""Define FBN: normalise with shared running statistics, and correct the variance for the spread of the clients' means.

Overcoming the Challenges of Batch Normalization in Federated Learning, Guerraoui et al., Algorithm 2.

The statistics of the round before are constants in training. Clients report moments of their data. The server
pools these moments and moves the shared statistics towards them, as BatchNorm's running update does. With
``momentum`` and one local step this is Algorithm 2 exactly, also for unequal batches.

By default each round moves the shared statistics towards the pooled moments, by the share ``tracking`` of the difference
(``methods.tracking``). The share does not depend on the number of local steps. It falls with the learning rate, because
the weights then change less. With several local steps, only the first batch of a round passes through the shared
weights. Later batches pass through weights that the client has changed.

Symbols: b (beta) -> momentum, K n -> count of the pooled moments, E -> steps.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fl_bn.bn.layers import FederatedBatchNorm
from fl_bn.bn.moments import Running, ema, pool
from fl_bn.methods.method import LayerReports, Method, StatisticsReport
from fl_bn.methods.tracking import follow, tracking
from fl_bn.options import Options, option, takes

BOUNDED_SCALE = 0.3
"""Standard deviation of every BatchNorm layer's input at the start of training with clipped gradients. New networks have about 0.3, too.

At a scale of 1, a step of the same rate changes the network's outputs a tenth as much, and FBN learns more slowly. At 0.3 without clipping,
it diverges with one class per client and several steps: docs/methods/fbn.md.
"""

REPORTS = {"first": StatisticsReport.FIRST, "pass": StatisticsReport.PASS, "all": StatisticsReport.BATCHES}


@dataclass(frozen=True)
class FBNOptions(Options):
    """Hold the options of ``fbn``."""

    name: ClassVar[str] = "fbn"
    tracking: float = tracking(0.02, instead="fbn-momentum")
    momentum: float | None = option(
        None,
        "weight of one batch in the shared statistics, as in Algorithm 2, instead of tracking",
        "(0, 1]",
        symbol="beta",
        unset=0.0,
        otherwise="tracking",
    )
    report: str = option(
        "first",
        "moments that clients report: of the first training batch, of a pass over their data before training, or of all batches",
        REPORTS,
    )


def combine(reports: LayerReports, tracking: float, momentum: float | None, report: StatisticsReport) -> Running:
    """Compute a layer's new shared statistics from the old ones and the clients' moments.

    The clients' pooled moments get the weight ``tracking``, reduced with the learning rate and by
    ``methods.tracking.slowdown``. If ``momentum`` is given, BatchNorm's running update replaces this rule. The
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
    rate. It also falls in a layer whose input grows in standard deviation (``methods.tracking``). Gradients are centred
    (``federation.centring``). If gradients are clipped, the inputs of BatchNorm layers start with the standard deviation
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
