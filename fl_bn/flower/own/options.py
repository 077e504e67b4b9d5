"""Hold the arguments of ``OwnAppStrategy``, check them, and make the objects of a run from them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from fl_bn.bn.conversion import check_kinds
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.auxiliary import auxiliary
from fl_bn.federation.callbacks import Callback
from fl_bn.federation.composition import check_composition
from fl_bn.federation.defence import Defence
from fl_bn.federation.narrow import check_payload
from fl_bn.federation.norm_layers import check_layers
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.rounds import Rounds, constant_rate
from fl_bn.federation.settings import LocalTraining
from fl_bn.flower.log import log
from fl_bn.flower.own.metrics import EXAMPLES, Combine, OwnMetrics, Ranges, is_number
from fl_bn.flower.population import RunFailed
from fl_bn.flower.wire.fields import OURS
from fl_bn.flower.wire.messages import CLIENTS
from fl_bn.methods import Method
from fl_bn.objectives import Objective
from fl_bn.support.client_names import ClientNames
from fl_bn.support.names import check_name

RATES = ("lr", "learning_rate", "learning-rate")
"""The names by which a ``train_config`` may give the clients' learning rate, as in Flower's own examples."""


def named_rate(config: Mapping[str, Any]) -> float | None:
    """Return the first number in ``config`` under one of the names ``RATES``, also one that is written as text; None if there is none.

    Raises:
        RunFailed: The number is negative or not finite.
    """
    for name in RATES:
        if (value := as_number(config.get(name))) is None:
            continue
        if not 0 <= value < math.inf:
            raise RunFailed(f"{name} in the train config must be a finite number >= 0 (the learning rate), but is {value}")
        return value
    return None


def as_number(value: Any) -> float | None:
    """Return a number, or the number that a text such as ``"0.1"`` is; None for anything else."""
    if is_number(value):
        return float(value)
    with suppress(ValueError):
        return float(value) if isinstance(value, str) else None
    return None


class NamedRates:
    """Map rounds to learning rates. A round whose config has no rate uses the rate of the last round before it that has one."""

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}

    def note(self, round: int, config: Mapping[str, Any]) -> bool:
        """Store the learning rate in the train config of ``round``, if it has one. Return whether this changes the round's rate.

        Raises:
            RunFailed: The rate is negative or not finite.
        """
        before = self(round, round)
        if (rate := named_rate(config)) is not None:
            self._rates[round] = rate
        return self(round, round) != before

    def __call__(self, round: int, rounds: int) -> float:
        """Return the learning rate of ``round``: the last one that was stored for this or an earlier round.

        If there is none, return the rate of the first later round that has one. If no rate was stored, return that of
        ``constant_rate``.
        """
        if not self._rates:
            return constant_rate(round, rounds)
        before = [number for number in self._rates if number <= round]
        return self._rates[max(before) if before else min(self._rates)]


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


@dataclass(frozen=True)
class Given:
    """Hold the arguments of ``OwnAppStrategy`` that are not Flower's, by the same names.

    They are in one object, so that a user's subclass may set attributes such as ``self.model`` without replacing them.

    Raises:
        ValueError: an argument is out of its range, or arguments contradict each other.
        TypeError: an argument is of another type.
    """

    model: nn.Module
    method: Method
    seed: int
    rate: Callable[[int, int], float]
    calibrate: int
    unit_scale: bool
    exchange: ExchangeSettings
    payload: str
    optimizer: ServerOptimizer | None
    defence: Defence
    objective: Objective
    callbacks: tuple[Callback, ...]
    client_weights: str
    clients: int
    ranges: Ranges

    def __post_init__(self) -> None:
        check_kinds(self.model, self.method)
        check_name("client_weights", self.client_weights, ("samples", "uniform"))
        for name, kind, such in (
            ("optimizer", ServerOptimizer | None, "fl_bn.federation.optimizers.fedadam()"),
            ("defence", Defence, "fl_bn.Defence(...)"),
            ("objective", Objective, "fl_bn.objectives.FedProx()"),
            ("exchange", ExchangeSettings, "fl_bn.exchange.ExchangeSettings()"),
        ):
            if not isinstance(value := getattr(self, name), kind):
                raise TypeError(f"{name} must be an object such as {such}, but got {value!r}")
        if type(self.clients) is not int or not 0 <= self.clients <= CLIENTS:
            raise ValueError(
                f"clients must be 1..{CLIENTS}, or 0 to take the value of num-partitions that most nodes report, but got {self.clients!r}"
            )
        for name, limits in self.ranges.items():
            if not (isinstance(limits, tuple | list) and len(limits) == 2 and all(is_number(one) for one in limits)):
                raise ValueError(
                    f"ranges must give a metric's smallest and largest value, such as ranges={{{name!r}: (0, 100)}}, but got {limits!r}"
                )
        check_composition(self.method, self.settings, robust=self.defence.active)
        check_layers(self.model, self.method)
        check_payload(self.payload, self.method)

    @property
    def settings(self) -> LocalTraining:
        """Return settings of local training with the objective. The clients' own loops decide all other settings."""
        return LocalTraining(batch_size=2, epochs=1, objective=self.objective)

    def rounds(self, clients: int, flower: FlowerArguments, called: ClientNames, timeout: float, train_config: Mapping[str, Any]) -> Rounds:
        """Make the policy of the run's rounds.

        Args:
            clients: the number of clients of the run.
            flower: Flower's arguments.
            called: the names of nodes and clients.
            timeout: seconds to wait for the replies of a round.
            train_config: the values for every train message. They may name the learning rate.
        """
        known = len(called.nodes) == clients  # else the app counts its clients in a way of its own
        for name in ("min_train_nodes", "min_evaluate_nodes"):
            if (least := getattr(flower, name)) > max(clients, 2):
                log(logging.WARNING, "%s is %d, but there are %d clients: all of them take part in every round", name, least, clients)
        rate = self.rate
        if rate is constant_rate:
            rate = NamedRates()
            rate.note(1, train_config)
        return Rounds(
            clients,
            flower.fraction_train,
            timeout=timeout,
            at_start=min(flower.min_available_nodes, clients),
            min_cohort=min(flower.min_train_nodes, clients),
            client_weights=self.client_weights,
            seed=self.seed,
            rate=rate,
            calibrate=self.calibrate,
            unit_scale=self.unit_scale,
            auxiliary=auxiliary(self.settings),
            objective=self.objective.described,
            exchange=self.exchange,
            payload=self.payload,
            nodes=called.nodes if known else (),
            names=called.names if known else (),
            registered=called.registered,
        )

    def metrics(self, flower: FlowerArguments, rounds: Rounds, needs: tuple[str, ...] | None) -> OwnMetrics:
        """Make the object that combines the clients' metrics.

        Args:
            flower: Flower's arguments.
            rounds: the policy of the run's rounds.
            needs: the metrics that each evaluation must have, see ``OwnMetrics``.
        """
        return OwnMetrics(
            flower.weighted_by_key,
            self.ranges,
            flower.train_metrics_aggr_fn,
            flower.evaluate_metrics_aggr_fn,
            alike=self.defence.active,
            called=rounds.called,
            needs=needs,
        )
