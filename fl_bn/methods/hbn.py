"""HBN: a learnable mix of batch statistics and unbiased global ones.

Hybrid Batch Normalisation: Resolving the Dilemma of Batch Normalisation in Federated Learning (seed 002), equations 7-11.

Before training, each client measures the moments of its data under the global statistics; the server pools them (law of total
variance, unbiased) and moves the global statistics towards them. The mixing logits are trained with the weights' optimiser
and never leave their client.

Symbols: G -> shared statistics, lam -> lam, p -> mixing_logit, a -> sigmoid(mixing_logit).
"""

from functools import partial

from fl_bn.layers import HybridBatchNorm
from fl_bn.methods.method import LayerReports, Method, Report, StatisticsPass
from fl_bn.moments import Running, ema, pool
from fl_bn.roles import Role


def combine(reports: LayerReports, lam: float) -> Running:
    return ema(reports.shared, pool(reports.parts, reports.average), lam)


def hbn(lam: float = 1.0, stat_samples: int = 0, lower_layers: str = "hybrid") -> Method:
    """HBN.

    ``lam``: weight of a round's pooled moments in the global statistics, in (0, 1]; 1 suits full participation, 0.01
    partial. ``stat_samples`` and ``lower_layers``: see ``StatisticsPass``. ``hybrid``, as in the paper's code, is the default of the
    pass before training, since it trained a little better wherever both were measured (benchmarks/README.md): statistics measured under the
    statistics of the round before feed back on themselves, layer upon layer. The exchange before an evaluation replaces the statistics:
    it asks all clients, so there is no sampling noise to smooth.
    """
    if not 0 < lam <= 1:
        raise ValueError(f"lam must be in (0, 1], but got {lam}")
    return Method(
        "hbn",
        layer=HybridBatchNorm.from_batch_norm,
        local=frozenset({Role.MIXING}),
        report=Report.PASS,
        combine=partial(combine, lam=lam),
        synchronise=True,
        statistics_pass=StatisticsPass(stat_samples, lower_layers),
    )
