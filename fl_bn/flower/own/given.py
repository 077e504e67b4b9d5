"""Hold the arguments of ``OwnAppStrategy`` that are not Flower's, and make the objects of a run from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
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
from fl_bn.flower.own.arguments import FlowerArguments
from fl_bn.flower.own.metrics import OwnMetrics, Ranges
from fl_bn.flower.own.rates import NamedRates, is_number
from fl_bn.flower.wire.messages import CLIENTS
from fl_bn.methods import Method
from fl_bn.objectives import Objective
from fl_bn.support.client_names import ClientNames
from fl_bn.support.names import check_name


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
