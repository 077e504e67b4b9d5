"""Provide the strategy for a Flower app of your own. It has Flower's arguments, hooks and ``start``, and runs a method's rounds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from torch import nn

from fl_bn.bn.conversion import convert
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.callbacks import Callback, checked_callbacks
from fl_bn.federation.defence import NO_DEFENCE, Defence
from fl_bn.federation.narrow import AS_THE_MODEL
from fl_bn.federation.network import Network
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.record import RoundRecord
from fl_bn.federation.rounds import AS_METHOD, constant_rate, exchanges_in_rounds
from fl_bn.flower.app.normalisation import say_layers
from fl_bn.flower.compat import simulated
from fl_bn.flower.deployment import Progress, called_in
from fl_bn.flower.grid_transport import EvaluateFn
from fl_bn.flower.hooks import RunResult, check_unwrapped
from fl_bn.flower.log import log
from fl_bn.flower.own.arguments import FlowerArguments
from fl_bn.flower.own.given import Given
from fl_bn.flower.own.loop import UNKNOWN, OwnLoop, needs_number
from fl_bn.flower.own.metrics import EXAMPLES, RANGES, Combine, Ranges
from fl_bn.flower.own.rates import is_number
from fl_bn.flower.own.rounds import Evaluators, OwnRounds
from fl_bn.flower.population import RunFailed
from fl_bn.flower.subclassing import HOOKS, OwnNames
from fl_bn.flower.wire.introductions import introduced
from fl_bn.methods import Method
from fl_bn.objectives import PLAIN, Objective

TIMEOUT = 3600.0  # Flower's
AGAIN = (
    "start was called again in one run of Flower's. Under %s every client then begins with the server's BatchNorm layers, not with its "
    "own: call start once, and use hooks or callbacks between its rounds"
)
_STARTED: WeakSet[Grid] = WeakSet()
"""The grids on which ``start`` was called in this process."""
NOTHING: Mapping[str, Any] = MappingProxyType({})


class OwnAppStrategy(OwnNames):
    """Train your model by a method, over a Flower app of your own.

    The app's ClientApp uses ``fl_bn.flower.answer`` and ``fl_bn.flower.training``.

    A subclass may override the hooks ``configure_train``, ``aggregate_train``, ``configure_evaluate``,
    ``aggregate_evaluate``, ``summary`` and ``start``, and call ``super()`` in them. The arrays that a hook gets
    have the names of your network's state_dict. Tensors that clients keep are not among them. A name that begins with
    ``_`` is refused in a subclass if this class uses it. All other names are yours.

    A node that names another number of clients than the run has, or that cannot take part, is refused, and the log names
    it. The run goes on with the others, if there are at least ``min_available_nodes``.

    Args:
        model: your network, unconverted.
        method: the method, the same as the clients'.
        fraction_train: the share of the clients that train in a round, in (0, 1], as in Flower's ``FedAvg``.
        fraction_evaluate: the share of the clients that evaluate in a round, 0..1. 0: nobody evaluates.
        min_train_nodes: the smallest number of clients in a round.
        min_evaluate_nodes: the smallest number of clients that evaluate, unless nobody does.
        min_available_nodes: the smallest number of clients for the run to start.
        weighted_by_key: the metric by which a client is weighted in the means of metrics. In the average of the model,
            a client is weighted by the ``samples`` that it passes to ``round.message``.
        arrayrecord_key: must be ``arrays``. It has no effect, since ``training`` loads the arrays.
        configrecord_key: the name of the record that ``train_config`` and ``evaluate_config`` become.
        train_metrics_aggr_fn: ``f(records, weighted_by_key)`` combines the clients' own training metrics.
            Default: means. The records hold only metrics.
        evaluate_metrics_aggr_fn: combines the clients' evaluations in the same way.
        seed: the seed that decides the cohorts.
        rate: maps ``(round, rounds)`` to the learning rate. FBN's shared statistics move more slowly as this rate falls.
            Default: the rate that ``train_config`` names (``RATES``), which your clients read, too. A hook may change
            this rate in the config of any round. In rounds with frozen statistics, the clients get a lower rate
            (``Method.learning_rate``).
        calibrate: the number of statistics-only exchanges before round 1. -1: as many as make all layers exact;
            -2: like -1 if the method needs exact statistics, otherwise none.
        unit_scale: whether the weights are rescaled after this calibration (``federation.unit_scale``).
        exchange: the settings of FedTAN's layer-wise exchange.
        payload: the dtype in which weights are sent while clients train: ``float32``, ``bfloat16`` or ``float16``.
            Default: the model's dtype.
        optimizer: steps on the pseudo-gradient at the server. Every ``start`` takes a copy without earlier momentum. Default: the
            average becomes the new model.
        defence: the robust rules against Byzantine clients.
        objective: the objective that your ``training`` uses. SCAFFOLD needs it here, too, because the server sends control
            variates. If it is given, clients with another one raise an error.
        callbacks: called at the start, after every round and at the end of ``start``.
        client_weights: a client's weight in averages: ``samples``, or ``uniform``, which counts every client once (as FedBN's paper).
        clients: the number of clients, 0..100000. 0: the value of ``num-partitions`` that most nodes report.
        ranges: the smallest and the largest value of a client's metric, by name.
        num_rounds: the number of rounds of a loop of your own, which calls the hooks itself. 0: unknown. FixBN
            without ``freeze_after`` needs it, and so does a ``rate``. ``start`` has its own argument.

    Raises:
        ValueError: an argument is out of its range, ``callbacks`` is no list of callbacks, or arguments contradict each other.
        TypeError: ``model``, ``method``, ``optimizer``, ``defence``, ``objective`` or ``exchange`` is of another type.
    """

    _needed_metrics: tuple[str, ...] | None = None  # of an evaluation, see ``OwnMetrics``
    open_names = (
        *HOOKS,
        *(field.name for field in fields(FlowerArguments)),
        *("num_rounds", "round_records", "global_model", "save", "initialize_parameters"),
    )

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        *,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = EXAMPLES,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: Combine | None = None,
        evaluate_metrics_aggr_fn: Combine | None = None,
        seed: int = 0,
        rate: Callable[[int, int], float] = constant_rate,
        calibrate: int = AS_METHOD,
        unit_scale: bool = True,
        exchange: ExchangeSettings = ExchangeSettings(),  # noqa: B008 - frozen
        payload: str = AS_THE_MODEL,
        optimizer: ServerOptimizer | None = None,
        defence: Defence = NO_DEFENCE,
        objective: Objective = PLAIN,
        callbacks: Sequence[Callback] = (),
        client_weights: str = "samples",
        clients: int = 0,
        ranges: Ranges = RANGES,
        num_rounds: int = 0,
    ) -> None:
        if type(num_rounds) is not int or num_rounds < 0:
            raise ValueError(f"num_rounds must be the number of rounds of your own loop, or 0 (unknown), as an int, but got {num_rounds!r}")
        self._given = Given(
            model, method, seed, rate, calibrate, unit_scale, exchange, payload, optimizer, defence, objective,
            checked_callbacks(callbacks), client_weights, clients, dict(RANGES if ranges is None else ranges),
        )  # fmt: skip
        self.fraction_train, self.fraction_evaluate = fraction_train, fraction_evaluate  # by Flower's names, as its FedAvg has them
        self.min_train_nodes, self.min_evaluate_nodes = min_train_nodes, min_evaluate_nodes if fraction_evaluate else 0
        self.min_available_nodes, self.weighted_by_key = min_available_nodes, weighted_by_key
        self.arrayrecord_key, self.configrecord_key = arrayrecord_key, configrecord_key
        self.train_metrics_aggr_fn, self.evaluate_metrics_aggr_fn = train_metrics_aggr_fn, evaluate_metrics_aggr_fn
        self._flower_arguments()
        self.num_rounds = num_rounds
        self._rounds: OwnRounds | None = None
        self._met: FlowerArguments | None = None  # Flower's arguments with which the run began
        self._starts = False
        self._loop: OwnLoop | None = None

    def _flower_arguments(self) -> FlowerArguments:
        """Check and return the current values of Flower's arguments. A subclass may have set them after this constructor.

        Raises:
            ValueError: an argument is out of its range, or is not supported.
        """
        return FlowerArguments(
            self.fraction_train,
            self.fraction_evaluate,
            self.min_train_nodes,
            self.min_evaluate_nodes if self.fraction_evaluate else 0,
            self.min_available_nodes,
            self.weighted_by_key,
            self.arrayrecord_key,
            self.configrecord_key,
            self.train_metrics_aggr_fn,
            self.evaluate_metrics_aggr_fn,
        )

    @property
    def _running(self) -> OwnRounds:
        """Return the strategy that runs the rounds.

        Raises:
            RunFailed: neither ``start`` nor a hook was called yet, so the clients are not known.
        """
        if self._rounds is None:
            raise RunFailed("the clients are not known before the start: call strategy.start(...), or strategy.configure_train(...)")
        return self._rounds

    @property
    def round_records(self) -> list[RoundRecord]:
        """Return the round records of a loop of your own so far. ``start`` returns its records in its result."""
        return [] if self._loop is None else list(self._loop.records)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Make one train message per client of the cohort.

        Args:
            server_round: the round, from 1.
            arrays: the shared tensors, by the names of your network's state_dict.
            config: values for every message, such as ``lr``. ``start`` passes the same object, its ``train_config``, in
                every round. So if your override changes a value in it, later rounds get the changed value, too.
            grid: Flower's grid.

        Raises:
            RunFailed: a loop of your own called this method, and one of these holds. The first call finds too few clients; the
                round was trained already; or the strategy needs ``start``.
        """
        hooks = self._running if self._starts else self._own_loop(grid, arrays, config)
        if self._met is not None and self._met != (now := self._flower_arguments()):
            changed = next(one.name for one in fields(now) if getattr(now, one.name) != getattr(self._met, one.name))
            log(logging.WARNING, "strategy.%s was changed during the run. That has no effect: set it before the start", changed)
            self._met = now
        return hooks.configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the replies to the train messages.

        Args:
            server_round: the round.
            replies: the replies. The records whose names do not begin with ``fl-bn/`` are your own.

        Returns:
            The shared tensors and the combined metrics; ``(None, None)`` if too few replies are usable.

        Raises:
            RunFailed: a loop of your own called this method, and the round was not configured, or was aggregated already.
        """
        hooks = self._running if self._starts else self._begun(f"aggregate_train({server_round}, ...) needs configure_train")
        return hooks.aggregate_train(server_round, replies)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Make one evaluate message per client that evaluates.

        Args:
            server_round: the round.
            arrays: the shared tensors, by the names of your network's state_dict.
            config: values for every message. ``start`` passes the same object, its ``evaluate_config``, in every round. So
                if your override changes a value in it, later rounds get the changed value, too.
            grid: Flower's grid.

        Raises:
            RunFailed: a loop of your own called this method, and the first call finds too few clients, or the strategy needs
                ``start``.
        """
        hooks = self._running if self._starts else self._own_loop(grid, arrays)
        return hooks.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Combine the clients' metrics.

        Args:
            server_round: the round.
            replies: the replies to the evaluate messages.

        Returns:
            The combined metrics; None if there are none.

        Raises:
            RunFailed: a loop of your own has not called ``configure_evaluate`` for this round yet.
        """
        hooks = self._running if self._starts else self._begun(f"aggregate_evaluate({server_round}, ...) needs configure_evaluate")
        return hooks.aggregate_evaluate(server_round, replies)

    def global_model(self, server_round: int, arrays: ArrayRecord) -> ArrayRecord | None:
        """Return the global model for a loop of your own, as arrays that load into your network.

        ``start`` calls its ``evaluate_fn`` with the same arrays.

        If clients keep their BatchNorm layers, the server asks for them over the grid. The arrays hold the average of the
        layers that clients send (``answer(..., tells=True)``).

        Args:
            server_round: the round that was aggregated last.
            arrays: the arrays that ``aggregate_train`` returned.

        Returns:
            The arrays; None if there is no global model. The log then has the reason.

        Raises:
            RunFailed: no hook was called yet.
        """
        return self._begun("global_model(...) needs configure_train").global_model(server_round, arrays)

    def summary(self) -> None:
        """Log what the method does with every normalisation layer."""
        say_layers(self._given.model, convert(self._given.model, self._given.method), self._given.method)

    def save(self, path: str | Path) -> None:
        """Save the current shared model as a safetensors file. After ``start``, this is the model of the last evaluation.

        The file has the names of your network's state_dict, without the tensors that the clients keep.

        Args:
            path: the path of the file.

        Raises:
            RunFailed: neither ``start`` nor a hook was called yet.
        """
        self._running.save(path)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = TIMEOUT,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> RunResult:
        """Run the rounds, as Flower's ``Strategy.start`` does.

        Args:
            grid: Flower's grid.
            initial_arrays: the tensors to start from, ``ArrayRecord(net.state_dict())``. Default: the model's
                own. BatchNorm tensors that clients keep start from them, too.
            num_rounds: the number of rounds, 0 or more.
            timeout: the seconds to wait for the clients at the start, and for the replies of a round.
            train_config: values for every train message, such as ``lr``.
            evaluate_config: values for every evaluate message.
            evaluate_fn: evaluates at the server, besides the clients: ``evaluate_fn(round, arrays)``, from round
                0 on. The arrays load into your network by ``load_state_dict``. If clients keep their BatchNorm
                layers, the arrays hold the average of the layers that clients send (``answer(..., tells=True)``).

        Returns:
            Flower's result, with the arrays of the last evaluation and every round's record.

        Raises:
            RunFailed: clients are missing, too many rounds in a row failed, or the clients' app does not answer. If the
                app has no handler for fl-bn's introduction, the message names the line to add.
            ValueError: ``initial_arrays`` do not fit the network, or ``num_rounds`` is no number of rounds.
        """
        if type(num_rounds) is not int or num_rounds < 0:
            raise ValueError(f"num_rounds must be a whole number of rounds, 0 or more, but got {num_rounds!r}")
        if not is_number(timeout) or not timeout > 0:
            raise ValueError(f"timeout must be a number of seconds above 0, but got {timeout!r}")
        if grid in _STARTED and self._given.method.personal:
            log(logging.WARNING, AGAIN, self._given.method.name)
        _STARTED.add(grid)
        config = ConfigRecord() if train_config is None else train_config
        Progress.of(grid).begin(num_rounds)
        self._rounds, self._loop = self._meet(grid, timeout, config), None
        self._starts = True
        try:
            return self._rounds.start(grid, initial_arrays, num_rounds, timeout, config, evaluate_config, evaluate_fn, hooks=self)
        finally:
            self._starts = False

    def initialize_parameters(self, client_manager: object) -> None:
        """Refuse Flower's older API, which calls this first: ``start_simulation``, ``start_server``, ``ServerAppComponents``.

        Args:
            client_manager: the client manager of the older API.

        Raises:
            RunFailed: always. The message says what to do.
        """
        raise RunFailed(
            f"{type(self).__name__} works with Flower's message API only, not with start_simulation, start_server or ServerAppComponents: "
            "call strategy.start(grid, ...) in @app.main() of a ServerApp(), and start both apps by flwr run or "
            "fl_bn.flower.run_in_process(...). Or keep your server_fn with Flower's older FedAvg, and make the ServerApp by "
            "legacy_server_app(server_fn, Net, method)"
        )

    def _own_loop(self, grid: Grid, arrays: ArrayRecord, train_config: Mapping[str, Any] = NOTHING) -> OwnLoop:
        """Return the ``OwnLoop`` for a user's loop that calls the hooks. The first call waits for the clients, and makes the ``OwnLoop``.

        Raises:
            RunFailed: clients are missing, or the strategy needs something that such a loop cannot do.
        """
        if self._loop is None:
            self._check_own_loop()
            if simulated():
                from fl_bn.flower.app import lost_actors  # imports Ray

                lost_actors.repair()
            Progress.of(grid).begin(self.num_rounds)
            self._rounds = self._meet(grid, TIMEOUT, train_config)
            self._loop = OwnLoop(self._rounds, grid, arrays, self.num_rounds or UNKNOWN, TIMEOUT)
        return self._loop

    def _begun(self, needs: str) -> OwnLoop:
        if self._loop is None:
            raise RunFailed(f"{needs}(...) before it: call that hook first, or call strategy.start(grid, ...)")
        return self._loop

    def _check_own_loop(self) -> None:
        check_unwrapped(self, self._given.method)
        name = type(self).__name__
        if exchanges_in_rounds(self._given.method):
            raise RunFailed(
                f"{name}'s clients exchange statistics within a round, and only start(...) runs such rounds: in a start of your own, call "
                "super().start(...), and put your steps into the hooks and into callbacks=[...]"
            )
        if self._given.callbacks:
            raise RunFailed(
                f"{name} has callbacks, which only start(...) calls: in a start of your own, call super().start(...), or leave callbacks "
                "out and do their work in your loop"
            )
        depends = needs_number(self._given.method, None if self._given.rate is constant_rate else self._given.rate)
        if depends and not self.num_rounds:
            raise RunFailed(
                f"{depends}, but your loop's number of rounds is unknown: give {name}(..., num_rounds=20), or set strategy.num_rounds"
            )

    def _meet(self, grid: Grid, timeout: float, train_config: Mapping[str, Any]) -> OwnRounds:
        """Wait for the clients, and return the ``OwnRounds`` that runs the rounds with them."""
        own, given = self._given, self._flower_arguments()
        self._met = given
        if words := own.method.other_fraction(given.fraction_train):
            log(logging.WARNING, "%s", words)
        wanted = Network(convert(own.model, own.method), own.method).signature
        called = called_in(grid)
        clients, introductions = introduced(grid, given.min_available_nodes, timeout, wanted, own.clients, called)
        policy = own.rounds(clients, given, called, timeout, train_config)
        return OwnRounds(
            own.model,
            own.method,
            policy,
            optimizer=own.optimizer,
            defence=own.defence,
            callbacks=own.callbacks,
            evaluators=Evaluators(given.fraction_evaluate, given.min_evaluate_nodes),
            metrics=own.metrics(given, policy, self._needed_metrics),
            introductions=introductions,
            configrecord_key=given.configrecord_key,
        )
