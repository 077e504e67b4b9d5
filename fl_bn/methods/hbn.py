"""Define HBN: normalise with a learnable mixture of batch and global statistics.

Hybrid Batch Normalisation: Resolving the Dilemma of Batch Normalisation in
Federated Learning, equations 7 to 11.

Before training, each client measures the moments of its data (equation 7). The
server pools them without bias (equation 8) and moves the global statistics towards
them (equation 11). A layer normalises with a mixture of its batch's statistics and
the global ones (equation 9). The mixing logits are trained as weights, and never
leave their client.

The global statistics contain moments of older weights. So before an evaluation they
are measured with the evaluated weights (``Refresh``).

The ablations of Table 6 are options: ``separate=False`` (1), ``merge="average"``
(2), and ``mixing``: ``"shared"`` (3), ``"batch"`` (4), ``"half"`` (5).

Symbols: G -> shared statistics, lambda -> lam, p -> mixing_logit, a ->
sigmoid(mixing_logit).
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fl_bn.bn.layers import HybridBatchNorm
from fl_bn.bn.moments import Running, ema, plain_average, pool
from fl_bn.bn.roles import Role
from fl_bn.methods.fbn import follow, tracking
from fl_bn.methods.method import (
    AS_TRAINED,
    COHORT,
    EVERYONE,
    FEWEST,
    INPUTS,
    MEASURED,
    LayerReports,
    Method,
    Refresh,
    StatisticsPass,
    StatisticsReport,
    replace_by_averaged,
    replace_by_pooled,
)
from fl_bn.options import Options, option, takes

TRACKING, PARTIAL = 0.05, 0.01
"""Defaults of ``tracking``: with all clients in every round, and with some."""
SCALE = 0.3
"""Standard deviation of BatchNorm inputs at the start, about that of a new network.

At 1, HBN lost ten points in 25 rounds on ordinary data:
docs/concepts/statistics.md.
"""
ONE_SIDED = 100.0
"""A mixing logit whose sigmoid is exactly 1 in float64, that of its negative nearly 0."""
MIXING = {"learned": None, "half": 0.0, "batch": ONE_SIDED, "shared": -ONE_SIDED}
"""Mixing logits for every value of ``mixing``. None: they start at 0 and learn."""


@dataclass(frozen=True)
class HBNOptions(Options):
    """Hold the options of ``hbn``."""

    name: ClassVar[str] = "hbn"
    lam: float | None = option(
        None,
        "weight of a round's pooled moments in the global statistics, instead of tracking (lambda in the paper); 0: tracking",
        "(0, 1]",
        unset=0.0,
    )
    stat_samples: int = option(
        AS_TRAINED,
        f"random samples of the statistics pass; 0: all of the client's; -1: as many as it trains on in the round, but at least {FEWEST}",
        "-1..0 or >= 2",
    )
    lower_layers: str = option(
        "hybrid", "statistics with which lower layers normalise in the statistics pass", ("shared", "hybrid"), hidden=True
    )
    evaluate: str = option(
        "auto",
        "statistics that are evaluated: exact, of all data, or hybrid, as training normalises; auto: exact for lam=1, else hybrid",
        ("auto", "exact", "hybrid"),
        hidden=True,
    )
    measured: str = option(
        INPUTS,
        "what the pass measures: the layers' inputs, or the mixtures that layers normalise with (normalisers), as the authors' code does",
        MEASURED,
        hidden=True,
    )
    evaluate_clients: str = option(
        EVERYONE,
        "whose statistics are evaluated: all clients', or those of the round's cohort, as in the paper",
        (EVERYONE, COHORT),
        hidden=True,
    )
    mixing: str = option(
        "learned",
        "mixture of a batch's own and the global statistics: learned, half (ablation 5), batch alone (4), or shared alone (3)",
        MIXING,
        hidden=True,
    )
    merge: str = option(
        "unbiased",
        "how clients' variances become one: unbiased adds the spread of their means, average leaves it out (ablation 2)",
        ("unbiased", "average"),
        hidden=True,
    )
    separate: bool = option(
        True,
        "statistics are measured in a pass of their own; false: they are moving averages over the training batches (ablation 1)",
        hidden=True,
    )
    tracking: float | None = tracking(None)
    fraction: float = option(1.0, "share of the clients that take part in a round", "(0, 1]", key="fraction")


def combine(reports: LayerReports, tracking: float, lam: float | None, merge: str = "unbiased") -> Running:
    """Compute a layer's new global statistics from the clients' moments.

    Their weight is ``lam`` (equation 11) or, if it is None, ``tracking`` times
    ``slowdown``.
    """
    pooled = (pool if merge == "unbiased" else plain_average)(reports.parts, reports.average)
    return follow(reports.shared, pooled, tracking, reports.scale) if lam is None else ema(reports.shared, pooled, lam)


@takes(HBNOptions)
def hbn(options: HBNOptions) -> Method:
    """Make HBN: training normalises with a mixture of batch statistics and global ones.

    ``tracking`` is the weight of a round's moments in the global statistics,
    reduced by ``methods.fbn.slowdown``, and gradients are centred
    (``federation.gradients``). ``lam`` is equation 11's weight instead, without
    centring. ``lower_layers`` is explained at ``StatisticsPass``; the paper's code
    has ``hybrid``.

    ``evaluate="exact"`` suits ``lam=1``, where every round replaces the global
    statistics. It needs one exchange per layer. ``"hybrid"`` suits a smaller
    ``lam``: the mixtures of training then contain older statistics.

    ``separate=False`` has no statistics pass, and evaluates with the reports of the
    round's cohort. ``merge`` has no effect with ``evaluate="exact"``.
    """
    evaluate = ("exact" if options.lam == 1 else "hybrid") if options.evaluate == "auto" else options.evaluate
    weight = options.tracking or (TRACKING if options.fraction == 1 else PARTIAL)
    return Method(
        "hbn",
        layer=partial(HybridBatchNorm.from_batch_norm, fixed=MIXING[options.mixing]),
        local=frozenset({Role.MIXING}),
        report=StatisticsReport.PASS if options.separate else StatisticsReport.MOVING,
        combine=partial(combine, tracking=weight, lam=options.lam, merge=options.merge),
        refresh=Refresh(evaluate) if options.separate else Refresh.REPORTED,
        refreshed_by=options.evaluate_clients,
        renew=replace_by_pooled if options.merge == "unbiased" else replace_by_averaged,
        calibrate=True,
        scale=SCALE,
        centre=options.lam is None,
        statistics_pass=StatisticsPass(options.lower_layers, options.stat_samples, options.measured),
        fraction=options.fraction if options.tracking is None and options.lam is None else None,
    )
