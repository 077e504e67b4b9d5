"""FBN: normalise with shared running statistics, correct the variance for the spread of the clients' means.

Overcoming the Challenges of Batch Normalization in Federated Learning, Guerraoui et al. (seed 003), Algorithm 2.

The statistics of the round before are constants in training. Clients report the moments of all their training batches; the
server pools them and takes one running step. With one local step this is Algorithm 2 exactly, also for unequal batches; with E local steps
the momentum is that of E observations, 1 - (1 - b)^E.

Symbols: b (beta) -> momentum, K n -> count of the pooled moments, E -> steps.
"""

from functools import partial

from fl_bn.layers import FederatedBatchNorm
from fl_bn.methods.method import LayerReports, Method, Report
from fl_bn.moments import Running, ema, pool


def combine(reports: LayerReports, momentum: float | None) -> Running:
    b = reports.momentum if momentum is None else momentum
    return ema(reports.shared, pool(reports.parts, reports.average), 1 - (1 - b) ** reports.steps)


def fbn(momentum: float | None = None) -> Method:
    """``momentum``: weight of one batch in the running statistics, in (0, 1]; None is each layer's own (torch's default 0.1)."""
    if momentum is not None and not 0 < momentum <= 1:
        raise ValueError(f"fbn's momentum must be in (0, 1], but got {momentum}")
    return Method("fbn", layer=FederatedBatchNorm.from_batch_norm, report=Report.BATCHES, combine=partial(combine, momentum=momentum))
