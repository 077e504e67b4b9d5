"""FBN: normalise with shared running statistics, correct the variance for the spread of the clients' means.

Overcoming the Challenges of Batch Normalization in Federated Learning, Guerraoui et al. (seed 003), Algorithm 2.

The statistics of the round before are constants in training. Clients report moments of their data; the server pools them and takes one
running step. With ``momentum`` and one local step this is Algorithm 2 exactly, also for unequal batches.

Constants that follow the weights too fast let the scale of activations grow from round to round: the gradient does not know that the
statistics will cancel its step. So by default the server follows slowly, by ``tracking`` per round, whatever the number of local steps,
and slower as the learning rate falls: weights that move less need statistics that move less. It also follows slower as a layer's scale
grows from 1, where ``training.unit_scale`` starts it, and stops at ``LIMIT``: from there the gradient feels what its steps do.

With several local steps only the first batch of a round is seen by the shared weights; the others belong to a local model.

Symbols: b (beta) -> momentum, K n -> count of the pooled moments, E -> steps.
"""

import math
from functools import partial

import torch

from fl_bn.layers import FederatedBatchNorm
from fl_bn.methods.method import LayerReports, Method, Report
from fl_bn.moments import Running, ema, pool

REPORTS = {"first": Report.FIRST, "pass": Report.PASS, "all": Report.BATCHES}
TRACKING = 0.02
LIMIT = 2.0
"""Standard deviation, as its channels' geometric mean, at which the tracking of a layer's statistics has come to a stop."""


def combine(reports: LayerReports, tracking: float, momentum: float | None, report: Report) -> Running:
    weight = tracking * reports.pace * slowdown(reports.shared)
    if momentum is not None:  # of one batch, of which the report has so many
        weight = 1 - (1 - momentum) ** (reports.steps if report is Report.BATCHES else 1)
    return ema(reports.shared, pool(reports.parts, reports.average), weight)


def slowdown(shared: Running) -> float:
    """1 up to a deviation of 1, then falling with its logarithm to 0 at ``LIMIT``."""
    smallest = torch.finfo(shared.var.dtype).tiny
    log_deviation = float(shared.var.double().clamp_min(smallest).log().mean()) / 2
    return min(1.0, max(0.0, 1 - log_deviation / math.log(LIMIT)))


def fbn(tracking: float = TRACKING, momentum: float | None = None, report: str = "first") -> Method:
    """FBN.

    ``tracking``: weight of a round's pooled moments in the shared statistics, in (0, 1], at the first round's learning rate and while a
    layer's deviation is 1. ``momentum``: instead, the weight of one batch,
    as in Algorithm 2. ``report``: the moments of the ``first`` training batch, of a ``pass`` over the client's data before training, or
    of ``all`` training batches.
    """
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
