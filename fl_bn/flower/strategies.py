"""Provide the strategy for a Flower app of your own, and one strategy per method, by name.

    strategy = FixBN(Net(), freeze_after=10, fraction_train=0.5)
    result = strategy.start(grid, initial_arrays, num_rounds=20, train_config=ConfigRecord({"lr": 0.1}))

A subclass may override their hooks, which are Flower's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any, ClassVar

from flwr.app import ConfigRecord
from flwr.serverapp import Grid
from torch import nn

from fl_bn.bn.conversion import check_kinds, convert
from fl_bn.federation.aggregation import NO_DEFENCE, Defence
from fl_bn.federation.callbacks import Callback, checked_callbacks
from fl_bn.federation.composition import OBJECTS, check_composition, check_layers
from fl_bn.federation.network import Network
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.policy import ServerPolicy, constant_rate
from fl_bn.federation.server import Server
from fl_bn.federation.settings import LocalTraining
from fl_bn.flower.compat import log, simulates
from fl_bn.flower.deployment import called_in
from fl_bn.flower.grid_transport import GridTransport
from fl_bn.flower.own_metrics import EXAMPLES, Combine, NamedRates, OwnApp, OwnMetrics
from fl_bn.flower.population import Population
from fl_bn.flower.strategy import BatchNormStrategy
from fl_bn.flower.wire.codec import OURS
from fl_bn.flower.wire.messages import CLIENTS
from fl_bn.methods import METHODS, Method
from fl_bn.objectives import PLAIN, Objective
from fl_bn.options import Options, check_fits, option

TIMEOUT = 3600.0  # Flower's
PATIENCE = 120.0  # seconds that an app of one's own waits for a node's answer, and for further nodes once enough have come
SIMULATED = 600.0  # the same in a simulation, where Ray may be slow to start
not_ours = lambda name: bool(name) and not name.startswith(OURS)  # noqa: E731
COMBINES = lambda value: value is None or callable(value), "a function of (records, weighted_by_key)"


@dataclass(frozen=True, kw_only=True)
class FlowersArguments(Options):
    """Hold the arguments that Flower's ``FedAvg`` has in all supported versions."""

    name: ClassVar[str] = "the strategy"

    fraction_train: float = option(1.0, "share of the clients that train (to only measure statistics: num_rounds=0)", "(0, 1]")
    fraction_evaluate: float = option(1.0, "share of the clients that evaluate; 0: nobody does", "0..1")
    min_train_nodes: int = option(2, "smallest number of clients in a round", ">= 1")
    min_evaluate_nodes: int = option(2, "smallest number of clients that evaluate", ">= 0")
    min_available_nodes: int = option(2, "smallest number of clients for the run to start", ">= 1")
    weighted_by_key: str = option(EXAMPLES, "a client's weight in means of metrics", "the name of a metric", bool)
    arrayrecord_key: str = option("arrays", "no other, since fl-bn sends several records, which training(...) loads", ("arrays",))
    configrecord_key: str = option("config", "record of the config", f"a name that does not begin with {OURS!r}", not_ours)
    train_metrics_aggr_fn: Combine | None = None
    evaluate_metrics_aggr_fn: Combine | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"train_metrics_aggr_fn": self.train_metrics_aggr_fn, "evaluate_metrics_aggr_fn": self.evaluate_metrics_aggr_fn}
        check_fits(dict.fromkeys(given, COMBINES), given)


FLOWERS = [one.name for one in fields(FlowersArguments)]


class OwnAppStrategy(BatchNormStrategy):
    """Train your model by a method, over a Flower app of your own.

    The app's ClientApp uses ``fl_bn.flower.answer`` and ``fl_bn.flower.training``.

    A subclass may override hooks, as with ``BatchNormStrategy``. Their arrays have
    the names of your network's state_dict, without tensors that clients keep. Names
    that begin with ``_``, and ``transport``, are fl-bn's.

    A node that names another number of clients, or that cannot take part, is
    refused. The run goes on with at least ``min_available_nodes``.

    The arguments of Flower's ``FedAvg`` are keywords here. A subclass may also set
    them, as attributes of these names, until ``start`` is called.

    - ``fraction_train``, ``fraction_evaluate``: the shares of the clients that
      train and evaluate in a round. With ``fraction_evaluate=0`` nobody evaluates.
    - ``min_train_nodes``, ``min_evaluate_nodes``, ``min_available_nodes``: the
      smallest numbers of clients that train, that evaluate, and for the run to
      start.
    - ``weighted_by_key``: the metric that weights a client in the means of metrics.
      In the average of the model, its weight is the ``samples`` that it passes to
      ``round.message``.
    - ``arrayrecord_key`` must be ``arrays``; ``configrecord_key`` is the name of
      the record that ``train_config`` and ``evaluate_config`` become.
    - ``train_metrics_aggr_fn``, ``evaluate_metrics_aggr_fn``: ``f(records,
      weighted_by_key)`` combines the clients' own metrics. Default: means. The
      records hold only metrics.

    Args:
        model: your network, unconverted.
        method: the method, the same as the clients'.
        optimizer: steps on the pseudo-gradient at the server. Every ``start`` takes
            a copy without earlier momentum. Default: the average becomes the new
            model.
        defence: the robust rules against Byzantine clients.
        objective: the objective of your ``training``. SCAFFOLD needs it here, too,
            because the server sends control variates. If it is given, clients with
            another one raise an error.
        callbacks: called at the start, after every round and at the end of
            ``start``.
        clients: the number of clients. 0: the most frequent ``num-partitions`` of
            the nodes.
        options: the fields of ``ServerPolicy`` by name, such as ``seed``,
            ``calibrate``, ``unit_scale``, ``client_weights``, ``exchange`` (FedTAN)
            and ``rate``. Without ``rate``, the learning rate is the one that
            ``train_config`` names (``RATES``), which a hook may change in the
            config of any round. FBN's shared statistics move more slowly as it
            falls. In rounds with frozen statistics, clients get a lower one.

    Raises:
        ValueError: an argument has a wrong type or value, or arguments contradict
            each other.
        TypeError: ``model`` is no network, ``method`` no method, or an option does
            not exist.
    """

    _policy: ServerPolicy | None = None  # None: this strategy runs fl-bn's own ClientApp, and its transport has the policy

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        *,
        optimizer: ServerOptimizer | None = None,
        defence: Defence = NO_DEFENCE,
        objective: Objective = PLAIN,
        callbacks: Sequence[Callback] = (),
        clients: int = 0,
        **options: Any,
    ) -> None:
        flowers = FlowersArguments(**{name: options.pop(name) for name in FLOWERS if name in options})
        vars(self).update(vars(flowers))  # by Flower's names, as its FedAvg has them
        check_kinds(model, method)
        check_fits(OBJECTS, {"optimizer": optimizer, "defence": defence, "objective": objective})
        settings = LocalTraining(batch_size=2, epochs=1, objective=objective)  # the clients' own loops decide all others
        check_composition(method, settings, robust=defence.active)
        check_layers(model, method)
        self._policy = ServerPolicy(
            clients=clients or CLIENTS,
            fraction=flowers.fraction_train,
            auxiliary=settings.auxiliary,
            objective=objective.described,
            **{"timeout": TIMEOUT, **options},
        )
        self._model, self._method, self._clients = model, method, clients
        self._optimizer, self._defence, self._callbacks = optimizer, defence, checked_callbacks(callbacks)

    def _begun(self, grid: Grid, timeout: float | None, train_config: ConfigRecord) -> tuple[GridTransport, float]:
        """Wait for the clients, and make the transport of a new run."""
        if self._policy is None:
            return super()._begun(grid, timeout, train_config)
        now, rate = FlowersArguments(**{name: getattr(self, name) for name in FLOWERS}), self._policy.rate  # a subclass may have set them
        seconds = self._policy.timeout if timeout is None else timeout
        wanted = Network(convert(self._model, self._method), self._method).signature
        wait = SIMULATED if simulates(grid) else PATIENCE
        meeting = replace(self._policy, timeout=seconds, wait=min(seconds, wait))
        population = Population(grid, meeting, wanted, called_in(grid), self._clients, now.min_available_nodes)
        clients, called = population.gather(), population.called
        if words := self._method.other_fraction(max(now.fraction_train, min(now.min_train_nodes / clients, 1.0))):
            log(logging.WARNING, "%s", words)
        for name in ("min_train_nodes", "min_evaluate_nodes"):
            if (least := getattr(now, name)) > max(clients, 2):
                log(logging.WARNING, "%s is %d, but there are %d clients: all of them take part in every round", name, least, clients)
        if rate is constant_rate:
            rate = NamedRates()
            rate.note(1, train_config)
        policy = replace(
            self._policy,
            clients=clients,
            fraction=now.fraction_train,
            timeout=seconds,
            at_start=min(now.min_available_nodes, clients),
            min_cohort=min(now.min_train_nodes, clients),
            at_clients=True,
            evaluate_share=now.fraction_evaluate,
            evaluate_least=now.min_evaluate_nodes,
            rate=rate,
            nodes=called.nodes,
            names=called.names,
            registered=called.registered,
        )
        combine = now.train_metrics_aggr_fn, now.evaluate_metrics_aggr_fn
        metrics = OwnMetrics(now.weighted_by_key, *combine, self._defence.active)
        own_app = OwnApp(metrics, population, now.configrecord_key)
        server = Server(self._model, self._method, policy, optimizer=self._optimizer, defence=self._defence)
        return GridTransport(server, callbacks=self._callbacks, own_app=own_app), seconds


class OfMethod(OwnAppStrategy):
    """Train by one method, over a Flower app of your own or, with ``rounds``, over fl-bn's own ClientApp.

    Args:
        model: your network, unconverted.
        rounds: the server's settings for rounds, for fl-bn's own ClientApp. None:
            the app is your own.
        options: by name, the method's options (``fl_bn.methods``), and the
            arguments of ``OwnAppStrategy`` or, with ``rounds``, of
            ``BatchNormStrategy``. HBN's ``evaluate`` is the method's.
    """

    of: ClassVar[str]

    def __init__(self, model: nn.Module, rounds: ServerPolicy | None = None, **options: Any) -> None:
        of_method = set(signature(METHODS[self.of]).parameters)
        chosen = {name: value for name, value in options.items() if name in of_method}
        others = {name: value for name, value in options.items() if name not in of_method}
        fraction = others.get("fraction_train", 1.0) if rounds is None else rounds.fraction
        if "fraction" in of_method and fraction != 1.0:  # HBN tracks more slowly with a part of the clients
            chosen.setdefault("fraction", fraction)
        method = METHODS[self.of](**chosen)
        if rounds is None:
            super().__init__(model, method, **others)
        else:
            BatchNormStrategy.__init__(self, model, method, rounds, **others)


class FedAvgBN(OfMethod):
    """Run FedAvg, the baseline: the server averages running means and, separately, variances."""

    of = "fedavg"


class FixBN(OfMethod):
    """Run FixBN: the statistics are frozen after round ``freeze_after``."""

    of = "fixbn"


class FedBN(OfMethod):
    """Run FedBN: all BatchNorm tensors stay at their client."""

    of = "fedbn"


class SiloBN(OfMethod):
    """Run SiloBN: running statistics stay at their client, scale and shift are shared."""

    of = "silobn"


class HBN(OfMethod):
    """Run HBN: layers normalise by a learnable mix of batch and pooled global statistics."""

    of = "hbn"


class FBN(OfMethod):
    """Run FBN: clients train with shared running statistics, corrected for their means' spread."""

    of = "fbn"


class FedTAN(OfMethod):
    """Run FedTAN: the first local step of every round equals a step of centralised training."""

    of = "fedtan"


class FedTAN2(OfMethod):
    """Run FedTAN-II: FedTAN up to round ``freeze_after``, then the statistics are frozen."""

    of = "fedtan2"
