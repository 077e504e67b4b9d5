"""Provide one strategy per method, by name, with the method's options as arguments."""

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
    """Run one method. Its options are arguments of the strategy, beside those of ``BatchNormStrategy``.

    Args:
        model: any torch network, unconverted.
        rounds: the server's settings for rounds.
        options: the options of the method and of ``BatchNormStrategy``, by name.
    """

    of: ClassVar[str]

    def __init__(self, model: nn.Module, rounds: Rounds, **options: Any) -> None:
        own = _take(self.of, options)
        super().__init__(model, METHODS[self.of](**own), rounds, **options)


def _take(method: str, options: dict[str, Any]) -> dict[str, Any]:
    """Remove the method's options from ``options``, and return them."""
    return {name: options.pop(name) for name, _ in options_by_key(METHODS[method]).values() if name in options}


class FedAvgBNStrategy(OfMethod):
    """Run FedAvg, the baseline: the server averages the running means and, separately, the running variances.

    Args:
        model: any torch network, unconverted.
        rounds: the server's settings for rounds.
        options: as in ``methods.fedavg`` and ``BatchNormStrategy``, by name.
    """

    of = "fedavg"


class FixBNStrategy(OfMethod):
    """Run FixBN: the statistics are frozen after round ``freeze_after``.

    Args:
        model: any torch network, unconverted.
        rounds: the server's settings for rounds.
        options: as in ``methods.fixbn`` and ``BatchNormStrategy``, by name.
    """

    of = "fixbn"


class FedBNStrategy(OfMethod):
    """Run FedBN: all BatchNorm tensors stay at their client.

    Args:
        model: any torch network, unconverted.
        rounds: the server's settings for rounds.
        options: as in ``methods.fedbn`` and ``BatchNormStrategy``, by name.
    """

    of = "fedbn"


class SiloBNStrategy(OfMethod):
    """Run SiloBN: running statistics stay at their client, scale and shift are shared.

    Args:
        model: any torch network, unconverted.
        rounds: the server's settings for rounds.
        options: as in ``methods.silobn`` and ``BatchNormStrategy``, by name.
    """

    of = "silobn"


class HBNStrategy(BatchNormStrategy):
    """Run HBN: layers normalise by a learnable mix of batch statistics and pooled global statistics.

    Args:
        model: any torch network, unconverted.
        rounds: the server's settings for rounds. Its ``fraction`` is also the method's ``fraction``.
        evaluate: maps the global model to metrics, as in ``BatchNormStrategy``. The method's option ``evaluate`` is
            called ``evaluate_with`` here.
        options: as in ``methods.hbn`` and ``BatchNormStrategy``, by name.
    """

    def __init__(
        self, model: nn.Module, rounds: Rounds, *, evaluate: Callable[[nn.Module], dict[str, float]] | None = None, **options: Any
    ) -> None:
        own = _take("hbn", options)
        if "evaluate_with" in options:
            own["evaluate"] = options.pop("evaluate_with")
        super().__init__(model, METHODS["hbn"](**own, fraction=rounds.fraction), rounds, evaluate=evaluate, **options)


class FBNStrategy(OfMethod):
    """Run FBN: clients train with shared running statistics, corrected for the spread of the clients' means.

    Args:
        model: any torch network, unconverted.
        rounds: the server's settings for rounds.
        options: as in ``methods.fbn`` and ``BatchNormStrategy``, by name.
    """

    of = "fbn"


class RobustFBNStrategy(FBNStrategy):
    """Run FBN against Byzantine clients (FBN paper, section 5), with robust rules for the statistics and the updates.

    The default rules are nearest-neighbour mixing (NNM), then the coordinate-wise median.

    Args:
        model: any torch network, unconverted.
        rounds: the server's settings for rounds.
        f: the number of Byzantine clients that the rules withstand, 0 or more.
        statistics_rule: the name of the rule for statistics, such as ``"nnm+trimmed-mean"`` (``robust.rule_named``).
        update_rule: the name of the rule for updates, in the same form.
        options: as in ``methods.fbn`` and ``BatchNormStrategy``, by name.
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
    """Run FedTAN: the first local step of every round equals a step of centralised training.

    Args:
        model: any torch network, unconverted.
        rounds: the server's settings for rounds.
        options: as in ``methods.fedtan`` and ``BatchNormStrategy``, by name.
    """

    of = "fedtan"


class FedTAN2Strategy(OfMethod):
    """Run FedTAN-II: FedTAN up to round ``freeze_after``, then the statistics are frozen.

    Args:
        model: any torch network, unconverted.
        rounds: the server's settings for rounds.
        options: as in ``methods.fedtan2`` and ``BatchNormStrategy``, by name.
    """

    of = "fedtan2"


class FedAvgAlg2Strategy(OfMethod):
    """Run FedAvg with only the forward half of FedTAN's exchange: clients exchange moments, but not their gradients.

    Args:
        model: any torch network, unconverted.
        rounds: the server's settings for rounds.
        options: as in ``methods.fedavg_alg2`` and ``BatchNormStrategy``, by name.
    """

    of = "fedavg-alg2"
