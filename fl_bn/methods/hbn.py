"""HBN: a learnable mix of batch statistics and unbiased global ones.

Hybrid Batch Normalisation: Resolving the Dilemma of Batch Normalisation in Federated Learning (seed 002), equations 7-11.

Before training, each client measures the moments of its data under the global statistics; the server pools them (law of total
variance, unbiased) and moves the global statistics towards them. The mixing logits are trained with the weights' optimiser
and never leave their client.

The global statistics lag behind the weights. Before an evaluation they are replaced by statistics of the weights that are evaluated:
``exact``, those of the union of all data, or ``hybrid``, those that training normalises with (``Refresh``).

Symbols: G -> shared statistics, lam -> lam, p -> mixing_logit, a -> sigmoid(mixing_logit).
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fl_bn.layers import HybridBatchNorm
from fl_bn.methods.method import LOWER_LAYERS, LayerReports, Method, Refresh, Report, StatisticsPass
from fl_bn.methods.tracking import follow, tracking
from fl_bn.moments import Running, ema, pool
from fl_bn.options import Options, option, takes
from fl_bn.roles import Role

TRACKING, PARTIAL = 0.05, 0.01
"""With full and with partial participation."""
SCALE = 0.3
"""Deviation of every BatchNorm layer's input at the start, about that of a fresh network.

At a scale of 1 a step of the same rate moves what the network computes by a tenth of that. HBN then learned too slowly on ordinary data, by
ten points in 25 rounds: docs/concepts/statistics.md.
"""


@dataclass(frozen=True)
class HBNOptions(Options):
    name: ClassVar[str] = "hbn"
    lam: float | None = option(
        None,
        "weight of a round's pooled moments in the global statistics, in the place of tracking",
        "(0, 1]",
        symbol="lambda",
        unset=0.0,
        otherwise="tracking",
    )
    stat_samples: int = option(0, "samples of the statistics pass; 0: all of the client's", "0 or >= 2")
    lower_layers: str = option("hybrid", "what lower layers normalise with in the statistics pass", LOWER_LAYERS)
    evaluate: str = option(
        "auto",
        "statistics that are evaluated and saved: exact, of the union of all data (an exchange per layer), or hybrid, as training "
        "normalises (one exchange); auto: exact for lam=1, else hybrid",
        ("auto", "exact", "hybrid"),
    )
    tracking: float | None = tracking(None, f"{TRACKING:g}, or {PARTIAL:g} with fraction below 1", instead="hbn-lam")
    fraction: float = option(1.0, "share of the clients that take part in a round", "(0, 1]", key="fraction")


def combine(reports: LayerReports, tracking: float, lam: float | None) -> Running:
    pooled = pool(reports.parts, reports.average)
    return follow(reports.shared, pooled, tracking, reports.scale) if lam is None else ema(reports.shared, pooled, lam)


@takes(HBNOptions)
def hbn(options: HBNOptions) -> Method:
    """HBN.

    ``tracking`` is the weight at the scale that a run starts with (``methods.tracking``), ``lam`` that of equation 11, which leaves
    gradients as they are; without it they are centred (``federation.centring``). ``lower_layers``: see ``StatisticsPass``; ``hybrid`` is
    as in the paper's code.

    ``evaluate``: ``exact`` is right where the global statistics follow the weights at once (lam = 1): what is evaluated is BatchNorm of
    the union, by one exchange per layer. ``hybrid`` is right below: training then normalises with a mixture that holds old statistics,
    and the network has learnt under it.
    """
    weight = options.tracking or (TRACKING if options.fraction == 1 else PARTIAL)
    evaluate = ("exact" if options.lam == 1 else "hybrid") if options.evaluate == "auto" else options.evaluate
    return Method(
        "hbn",
        layer=HybridBatchNorm.from_batch_norm,
        local=frozenset({Role.MIXING}),
        report=Report.PASS,
        combine=partial(combine, tracking=weight, lam=options.lam),
        refresh=Refresh(evaluate),
        calibrate=True,
        scale=SCALE,
        centre=options.lam is None,
        statistics_pass=StatisticsPass(options.lower_layers, options.stat_samples),
    )
