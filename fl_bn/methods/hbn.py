"""HBN: a learnable mix of batch statistics and unbiased global ones.

Hybrid Batch Normalisation: Resolving the Dilemma of Batch Normalisation in Federated Learning (seed 002), equations 7-11.

Before training, each client measures the moments of its data under the global statistics; the server pools them (law of total
variance, unbiased) and moves the global statistics towards them. The mixing logits are trained with the weights' optimiser
and never leave their client.

The global statistics lag behind the weights. Before an evaluation they are replaced by statistics of the weights that are evaluated:
``exact``, those of the union of all data, or ``hybrid``, those that training normalises with (``Refresh``).

Symbols: G -> shared statistics, lam -> lam, p -> mixing_logit, a -> sigmoid(mixing_logit).
"""

from functools import partial

from fl_bn.layers import HybridBatchNorm
from fl_bn.methods.method import LayerReports, Method, Refresh, Report, StatisticsPass
from fl_bn.methods.tracking import follow
from fl_bn.moments import Running, ema, pool
from fl_bn.roles import Role

EVALUATE = ("auto", "exact", "hybrid")
TRACKING, PARTIAL = 0.05, 0.01
"""With full and with partial participation."""


def combine(reports: LayerReports, tracking: float, lam: float | None) -> Running:
    pooled = pool(reports.parts, reports.average)
    return follow(reports.shared, pooled, tracking) if lam is None else ema(reports.shared, pooled, lam)


def hbn(
    lam: float | None = None,
    stat_samples: int = 0,
    lower_layers: str = "hybrid",
    evaluate: str = "auto",
    tracking: float | None = None,
    fraction: float = 1.0,
) -> Method:
    """HBN.

    ``tracking``: weight of a round's pooled moments in the global statistics, in (0, 1], on unit scale (``methods.tracking``); None is
    ``TRACKING``, or ``PARTIAL`` where a ``fraction`` below 1 of the clients takes part. ``lam``: instead, the weight as in equation 11,
    whatever the scale. ``stat_samples`` and ``lower_layers``: of the pass before training, see ``StatisticsPass``; its ``hybrid`` is as in
    the paper's code.

    ``evaluate``: ``exact`` is right where the global statistics follow the weights at once (lam = 1): what is evaluated is BatchNorm of
    the union, by one exchange per layer. ``hybrid`` is right below: training then normalises with a mixture that holds old statistics,
    and the network has learnt under it. ``auto``: exact for lam = 1, else hybrid.
    """
    if tracking is None:
        tracking = TRACKING if fraction == 1 else PARTIAL
    for name, value in {"lam": lam, "tracking": tracking}.items():
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"hbn's {name} must be in (0, 1], but got {value}")
    if evaluate not in EVALUATE:
        raise ValueError(f"evaluate must be one of {', '.join(EVALUATE)}, but got {evaluate!r}")
    if evaluate == "auto":
        evaluate = "exact" if lam == 1 else "hybrid"
    return Method(
        "hbn",
        layer=HybridBatchNorm.from_batch_norm,
        local=frozenset({Role.MIXING}),
        report=Report.PASS,
        combine=partial(combine, tracking=tracking, lam=lam),
        refresh=Refresh(evaluate),
        calibrate=True,
        statistics_pass=StatisticsPass(stat_samples, lower_layers),
    )
