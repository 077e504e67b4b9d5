"""FBN: normalise with shared running statistics, correct the variance for the spread of the clients' means.

Overcoming the Challenges of Batch Normalization in Federated Learning, Guerraoui et al. (seed 003), Algorithm 2.

The statistics of the round before are constants in training. Clients report moments of their data; the server pools them and takes one
running step. With ``momentum`` and one local step this is Algorithm 2 exactly, also for unequal batches.

By default the server follows slowly (``methods.tracking``), by ``tracking`` per round whatever the number of local steps, and slower as
the learning rate falls: weights that move less need statistics that move less. With several local steps only the first batch of a round is
seen by the shared weights; the others belong to a local model.

Symbols: b (beta) -> momentum, K n -> count of the pooled moments, E -> steps.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fl_bn.layers import FederatedBatchNorm
from fl_bn.methods.method import LayerReports, Method, Report
from fl_bn.methods.tracking import follow, tracking
from fl_bn.moments import Running, ema, pool
from fl_bn.options import Options, option, takes

BOUNDED_SCALE = 0.3
"""Deviation of every BatchNorm layer's input at the start where gradients are clipped, about that of a fresh network.

At a scale of 1 a step of the same rate moves what the network computes by a tenth of that, and FBN learns more slowly. Without clipping it
diverges at 0.3, with one class per client and several steps: docs/methods/fbn.md.
"""

REPORTS = {"first": Report.FIRST, "pass": Report.PASS, "all": Report.BATCHES}


@dataclass(frozen=True)
class FBNOptions(Options):
    name: ClassVar[str] = "fbn"
    tracking: float = tracking(0.02, instead="fbn-momentum")
    momentum: float | None = option(
        None,
        "weight of one batch in the shared statistics, as in Algorithm 2, in the place of tracking",
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


def combine(reports: LayerReports, tracking: float, momentum: float | None, report: Report) -> Running:
    pooled = pool(reports.parts, reports.average)
    if momentum is None:
        return follow(reports.shared, pooled, tracking * reports.pace, reports.scale)
    batches = reports.steps if report is Report.BATCHES else 1
    return ema(reports.shared, pooled, 1 - (1 - momentum) ** batches)


@takes(FBNOptions)
def fbn(options: FBNOptions) -> Method:
    """FBN. ``tracking`` holds at the first round's learning rate and at the scale that a run starts with (``methods.tracking``).

    Gradients are centred (``federation.centring``), and the scale at the start is ``BOUNDED_SCALE`` where they are clipped, too; not so
    with ``momentum``, which is Algorithm 2.
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
