"""FBN: normalise with shared running statistics, correct the variance for the spread of the clients' means.

Overcoming the Challenges of Batch Normalization in Federated Learning, Guerraoui et al. (seed 003), Algorithm 2.

The statistics of the round before are constants in training. Clients report moments of their data; the server pools them and takes one
running step. With ``momentum`` and one local step this is Algorithm 2 exactly, also for unequal batches.

By default the server follows slowly (``methods.tracking``), by ``tracking`` per round whatever the number of local steps, and slower as
the learning rate falls: weights that move less need statistics that move less. With several local steps only the first batch of a round is
seen by the shared weights; the others belong to a local model.

Symbols: b (beta) -> momentum, K n -> count of the pooled moments, E -> steps.
"""

from functools import partial

from fl_bn.layers import FederatedBatchNorm
from fl_bn.methods.method import LayerReports, Method, Report
from fl_bn.methods.tracking import follow
from fl_bn.moments import Running, ema, pool

REPORTS = {"first": Report.FIRST, "pass": Report.PASS, "all": Report.BATCHES}
TRACKING = 0.02


def combine(reports: LayerReports, tracking: float, momentum: float | None, report: Report) -> Running:
    pooled = pool(reports.parts, reports.average)
    if momentum is None:
        return follow(reports.shared, pooled, tracking * reports.pace)
    batches = reports.steps if report is Report.BATCHES else 1
    return ema(reports.shared, pooled, 1 - (1 - momentum) ** batches)


def fbn(tracking: float | None = None, momentum: float | None = None, report: str = "first") -> Method:
    """FBN.

    ``tracking``: weight of a round's pooled moments in the shared statistics, in (0, 1], at the first round's learning rate and on unit
    scale; None is ``TRACKING``. ``momentum``: instead, the weight of one batch, as in Algorithm 2. ``report``: the moments of the
    ``first`` training batch, of a ``pass`` over the client's data before training, or of ``all`` training batches.
    """
    tracking = TRACKING if tracking is None else tracking
    for name, value in {"tracking": tracking, "momentum": momentum}.items():
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"fbn's {name} must be in (0, 1], but got {value}")
    if report not in REPORTS:
        raise ValueError(f"fbn's report must be one of {', '.join(REPORTS)}, but got {report!r}")
    return Method(
        "fbn",
        layer=FederatedBatchNorm.from_batch_norm,
        report=REPORTS[report],
        combine=partial(combine, tracking=tracking, momentum=momentum, report=REPORTS[report]),
        calibrate=True,
        constant=True,
    )
