"""The strategies by name: each binds a method, whose options become its own, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from fl_bn.federation.defence import Defence
from fl_bn.federation.rounds import Rounds
from fl_bn.flower.strategy import BatchNormStrategy
from fl_bn.methods import METHODS
from fl_bn.options import options_by_key


class OfMethod(BatchNormStrategy):
    """A strategy that takes the options of a method, with the method's own defaults, beside those of ``BatchNormStrategy``."""

    of: ClassVar[str]

    def __init__(self, model: nn.Module, rounds: Rounds, **options: Any) -> None:
        own = _take(self.of, options)
        super().__init__(model, METHODS[self.of](**own), rounds, **options)


def _take(method: str, options: dict[str, Any]) -> dict[str, Any]:
    """Those of ``options`` that are the method's, which they then lack."""
    return {name: options.pop(name) for name, _ in options_by_key(METHODS[method]).values() if name in options}


class FedAvgBNStrategy(OfMethod):
    """FedAvg with plainly averaged running statistics: the baseline."""

    of = "fedavg"


class FixBNStrategy(OfMethod):
    """FixBN: statistics frozen after round ``freeze_after``; options as in ``methods.fixbn``."""

    of = "fixbn"


class FedBNStrategy(OfMethod):
    """FedBN: every BatchNorm tensor stays on its client."""

    of = "fedbn"


class SiloBNStrategy(OfMethod):
    """SiloBN: running statistics stay on their client, scale and shift are shared."""

    of = "silobn"


class HBNStrategy(BatchNormStrategy):
    """HBN: a learnable mix of batch and pooled global statistics.

    Options as in ``methods.hbn``, but for ``fraction``, which ``rounds`` has, and ``evaluate``, here ``evaluate_with``.
    """

    def __init__(
        self, model: nn.Module, rounds: Rounds, *, evaluate: Callable[[nn.Module], dict[str, float]] | None = None, **options: Any
    ) -> None:
        own = _take("hbn", options)
        if "evaluate_with" in options:
            own["evaluate"] = options.pop("evaluate_with")
        super().__init__(model, METHODS["hbn"](**own, fraction=rounds.fraction), rounds, evaluate=evaluate, **options)


class FBNStrategy(OfMethod):
    """FBN: shared running statistics with the variance corrected; options as in ``methods.fbn``."""

    of = "fbn"


class RobustFBNStrategy(FBNStrategy):
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
        **options: Any,
    ) -> None:
        super().__init__(model, rounds, defence=Defence(f, statistics_rule, update_rule), **options)


class FedTANStrategy(OfMethod):
    """FedTAN: the first local step of every round is the centralised one; options as in ``methods.fedtan``."""

    of = "fedtan"


class FedTAN2Strategy(OfMethod):
    """FedTAN-II: FedTAN up to round ``freeze_after``, then the statistics are frozen; options as in ``methods.fedtan2``."""

    of = "fedtan2"


class FedAvgAlg2Strategy(OfMethod):
    """FedAvg with FedTAN's forward exchange alone; options as in ``methods.fedavg_alg2``."""

    of = "fedavg-alg2"
