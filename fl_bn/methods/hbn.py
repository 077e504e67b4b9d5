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
from fl_bn.moments import Running, ema, pool
from fl_bn.roles import Role

EVALUATE = ("auto", "exact", "hybrid")
LAM = 0.01


def combine(reports: LayerReports, lam: float) -> Running:
    return ema(reports.shared, pool(reports.parts, reports.average), lam)


def hbn(lam: float = LAM, stat_samples: int = 0, lower_layers: str = "hybrid", evaluate: str = "auto") -> Method:
    """HBN.

    ``lam``: weight of a round's pooled moments in the global statistics, in (0, 1]; 1 suits full participation, 0.01
    partial. ``stat_samples`` and ``lower_layers``: of the pass before training, see ``StatisticsPass``; its ``hybrid`` is as in the
    paper's code, and trained a little better wherever both were measured (benchmarks/README.md): statistics measured under the
    statistics of the round before feed back on themselves, layer upon layer.

    ``evaluate``: ``exact`` is right where the global statistics follow the weights at once (lam = 1): what is evaluated is BatchNorm of
    the union, by one exchange per layer. ``hybrid`` is right below: training then normalises with a mixture that holds old statistics,
    and the network has learnt under it. ``auto``: exact for lam = 1, else hybrid.
    """
    if not 0 < lam <= 1:
        raise ValueError(f"lam must be in (0, 1], but got {lam}")
    if evaluate not in EVALUATE:
        raise ValueError(f"evaluate must be one of {', '.join(EVALUATE)}, but got {evaluate!r}")
    if evaluate == "auto":
        evaluate = "exact" if lam == 1 else "hybrid"
    return Method(
        "hbn",
        layer=HybridBatchNorm.from_batch_norm,
        local=frozenset({Role.MIXING}),
        report=Report.PASS,
        combine=partial(combine, lam=lam),
        refresh=Refresh(evaluate),
        calibrate=True,
        statistics_pass=StatisticsPass(stat_samples, lower_layers),
    )
