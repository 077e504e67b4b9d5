"""Check the arguments that a strategy for an app of your own shares with Flower's ``FedAvg``."""

from __future__ import annotations

from dataclasses import dataclass

from fl_bn.flower.own.metrics import EXAMPLES, Combine
from fl_bn.flower.own.rates import is_number
from fl_bn.flower.wire.fields import OURS


@dataclass(frozen=True)
class FlowerArguments:
    """Hold the arguments that Flower's ``FedAvg`` has in all supported versions.

    Attributes:
        fraction_train: the share of the clients that train in a round.
        fraction_evaluate: the share of the clients that evaluate in a round.
        min_train_nodes: the smallest number of clients that train.
        min_evaluate_nodes: the smallest number of clients that evaluate.
        min_available_nodes: the smallest number of clients for the run to start.
        weighted_by_key: the metric by which a client's metrics are weighted.
        arrayrecord_key: the name of Flower's record of arrays. Only ``arrays`` is allowed.
        configrecord_key: the name of the user's config in a message.
        train_metrics_aggr_fn: combines training metrics. None: they are averaged.
        evaluate_metrics_aggr_fn: combines evaluations. None: they are averaged.

    Raises:
        ValueError: an argument is out of its range, or asks for something that fl-bn cannot do.
    """

    fraction_train: float = 1.0
    fraction_evaluate: float = 1.0
    min_train_nodes: int = 2
    min_evaluate_nodes: int = 2
    min_available_nodes: int = 2
    weighted_by_key: str = EXAMPLES
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    train_metrics_aggr_fn: Combine | None = None
    evaluate_metrics_aggr_fn: Combine | None = None

    def __post_init__(self) -> None:
        for name in ("fraction_train", "fraction_evaluate"):
            if not is_number(getattr(self, name)):
                raise ValueError(f"{name} must be a share of the clients, a number of at most 1, but got {getattr(self, name)!r}")
        if not 0 < self.fraction_train <= 1:
            raise ValueError(
                f"fraction_train must be in (0, 1], but got {self.fraction_train}: a round in which nobody trains changes nothing (to "
                "only measure statistics: start(..., num_rounds=0))"
            )
        if not 0 <= self.fraction_evaluate <= 1:
            raise ValueError(f"fraction_evaluate must be 0 (nobody evaluates) .. 1 (all clients do), but got {self.fraction_evaluate}")
        for name in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"):
            value, least = getattr(self, name), 0 if name == "min_evaluate_nodes" else 1
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be a whole number >= {least}, but got {value!r}")
        if self.arrayrecord_key != "arrays":
            raise ValueError(
                f"arrayrecord_key must stay 'arrays', but got {self.arrayrecord_key!r}: fl-bn sends tensors in several records "
                f"({OURS}weights, {OURS}statistics, ...), and training(...) loads them into your network"
            )
        if not isinstance(self.configrecord_key, str) or not self.configrecord_key or self.configrecord_key.startswith(OURS):
            raise ValueError(f"configrecord_key must be a name that does not begin with {OURS!r}, but got {self.configrecord_key!r}")
        if not isinstance(self.weighted_by_key, str) or not self.weighted_by_key:
            raise ValueError(f"weighted_by_key must be the name of a metric, but got {self.weighted_by_key!r}")
        for name in ("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise ValueError(f"{name} must be a function of (records, weighted_by_key), but got {getattr(self, name)!r}")
