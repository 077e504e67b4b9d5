"""The strategies by name: each binds a method, whose options become its own."""

from __future__ import annotations

from typing import Any

from torch import nn

from fl_bn.federation.defence import Defence
from fl_bn.federation.rounds import Rounds
from fl_bn.flower.strategy import BatchNormStrategy
from fl_bn.methods.fbn import fbn
from fl_bn.methods.fedavg import fedavg
from fl_bn.methods.fedbn import fedbn
from fl_bn.methods.fedtan import fedavg_alg2, fedtan, fedtan2
from fl_bn.methods.fixbn import fixbn
from fl_bn.methods.hbn import hbn
from fl_bn.methods.silobn import silobn


class FedAvgBNStrategy(BatchNormStrategy):
    """FedAvg with plainly averaged running statistics: the baseline."""

    def __init__(self, model: nn.Module, rounds: Rounds, **options: Any) -> None:
        super().__init__(model, fedavg(), rounds, **options)


class FixBNStrategy(BatchNormStrategy):
    """FixBN: statistics frozen after round ``freeze_after`` (default: half of the rounds)."""

    def __init__(self, model: nn.Module, rounds: Rounds, *, freeze_after: int | None = None, **options: Any) -> None:
        super().__init__(model, fixbn(freeze_after), rounds, **options)


class FedBNStrategy(BatchNormStrategy):
    """FedBN: every BatchNorm tensor stays on its client."""

    def __init__(self, model: nn.Module, rounds: Rounds, **options: Any) -> None:
        super().__init__(model, fedbn(), rounds, **options)


class SiloBNStrategy(BatchNormStrategy):
    """SiloBN: running statistics stay on their client, scale and shift are shared."""

    def __init__(self, model: nn.Module, rounds: Rounds, **options: Any) -> None:
        super().__init__(model, silobn(), rounds, **options)


class HBNStrategy(BatchNormStrategy):
    """HBN: a learnable mix of batch and pooled global statistics; options as in ``methods.hbn``."""

    def __init__(
        self,
        model: nn.Module,
        rounds: Rounds,
        *,
        lam: float | None = None,
        stat_samples: int = 0,
        lower_layers: str = "hybrid",
        evaluate_with: str = "auto",
        tracking: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, hbn(lam, stat_samples, lower_layers, evaluate_with, tracking, rounds.fraction), rounds, **options)


class FBNStrategy(BatchNormStrategy):
    """FBN: shared running statistics with the variance corrected; options as in ``methods.fbn``."""

    def __init__(
        self,
        model: nn.Module,
        rounds: Rounds,
        *,
        tracking: float | None = None,
        momentum: float | None = None,
        report: str = "first",
        **options: Any,
    ) -> None:
        super().__init__(model, fbn(tracking, momentum, report), rounds, **options)


class RobustFBNStrategy(BatchNormStrategy):
    """FBN against ``f`` Byzantine clients (FBN, section 5): NNM, then the coordinate-wise median, on the statistics and on the updates.

    The rules are those of ``robust.rule_named``, e.g. ``"nnm+trimmed-mean"``; the other options as in ``methods.fbn``.
    """

    def __init__(
        self,
        model: nn.Module,
        rounds: Rounds,
        *,
        f: int,
        statistics_rule: str = "nnm+median",
        update_rule: str = "nnm+median",
        tracking: float | None = None,
        momentum: float | None = None,
        report: str = "first",
        **options: Any,
    ) -> None:
        super().__init__(model, fbn(tracking, momentum, report), rounds, defence=Defence(f, statistics_rule, update_rule), **options)


class FedTANStrategy(BatchNormStrategy):
    """FedTAN: the first local step of every round is the centralised one; ``schedule`` as in ``methods.fedtan``."""

    def __init__(self, model: nn.Module, rounds: Rounds, *, schedule: str = "merged", **options: Any) -> None:
        super().__init__(model, fedtan(schedule), rounds, **options)


class FedTAN2Strategy(BatchNormStrategy):
    """FedTAN-II: FedTAN up to round ``freeze_after`` (default: half of the rounds), then the statistics are frozen."""

    def __init__(
        self, model: nn.Module, rounds: Rounds, *, freeze_after: int | None = None, schedule: str = "merged", **options: Any
    ) -> None:
        super().__init__(model, fedtan2(freeze_after, schedule), rounds, **options)


class FedAvgAlg2Strategy(BatchNormStrategy):
    """FedAvg with FedTAN's forward exchange alone."""

    def __init__(self, model: nn.Module, rounds: Rounds, *, schedule: str = "merged", **options: Any) -> None:
        super().__init__(model, fedavg_alg2(schedule), rounds, **options)
