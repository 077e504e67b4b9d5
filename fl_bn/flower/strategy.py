"""Run any method's rounds over a Flower grid, as a Flower strategy."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import nn

from fl_bn.federation.aggregation import NO_DEFENCE, Defence
from fl_bn.federation.composition import describe_layers
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.passes import Measured, Newest, TooFewMeasured
from fl_bn.federation.policy import ServerPolicy
from fl_bn.federation.record import RoundRecord, batches_trained, in_words, why_failed
from fl_bn.federation.run import Diverged, run
from fl_bn.federation.server import Server
from fl_bn.flower.compat import DETAIL, log, repeat_cancelled, simulated
from fl_bn.flower.deployment import Progress
from fl_bn.flower.evaluation import EvaluateFn
from fl_bn.flower.grid_transport import GridTransport, Pair, RunResult
from fl_bn.flower.population import Client, RunFailed
from fl_bn.flower.recovery import Checkpoint
from fl_bn.methods import Method
from fl_bn.options import Fits, check_fits
from fl_bn.support.durable import save_network

STARTS: Fits = {
    "num_rounds": (lambda value: type(value) is int and value >= 0, "a whole number of rounds, 0 or more"),
    "timeout": (lambda value: value is None or type(value) in (int, float) and value > 0, "a number of seconds above 0"),
}
REPLIES = ("aggregate_train", "aggregate_evaluate")  # hooks that get clients' replies, which a secure sum hides


class BatchNormStrategy(Strategy):
    """Train a model by a method over the clients of a grid, which run fl-bn's own ClientApp.

    A subclass may override the hooks ``configure_train``, ``aggregate_train``,
    ``configure_evaluate``, ``aggregate_evaluate``, ``summary``, ``start`` and
    ``save``, and call ``super()`` in them. Only ``start`` may call the hooks.
    fl-bn's own attributes are ``transport`` and names that begin with ``_``.

    The hooks' argument ``arrays`` holds all shared tensors by state_dict name:
    weights, affine parameters and statistics.

    Args:
        model: any torch network, unconverted. The run starts from its tensors.
        method: the method, the same as the clients'.
        rounds: the server's settings for rounds.
        optimizer: steps on the pseudo-gradient of the shared weights. Default: the
            average becomes the new model.
        defence: the robust rules for statistics (also in FedTAN's layer-wise
            exchange) and updates.
        options: by name, the other arguments of ``GridTransport``: ``evaluate``,
            ``callbacks``, ``save_clients``, ``keep_checkpoint``, ``secure``,
            ``task``.

    Raises:
        ValueError: arguments contradict each other.
    """

    _transport: GridTransport | None = None

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        rounds: ServerPolicy,
        *,
        optimizer: ServerOptimizer | None = None,
        defence: Defence = NO_DEFENCE,
        **options: Any,
    ) -> None:
        self._transport = GridTransport(Server(model, method, rounds, optimizer=optimizer, defence=defence), **options)

    @property
    def transport(self) -> GridTransport:
        """Return the object that carries the rounds. Before ``start``, raise ``RunFailed``."""
        if self._transport is None:
            alone = "call its own strategy.start(...); a strategy around it cannot (for noise: dp-noise, docs/privacy.md)"
            raise RunFailed(f"{type(self).__name__} does not know its clients before the start: {alone}")
        return self._transport

    def _called(self) -> GridTransport:
        """Return the transport, for a hook that it called, or raise ``RunFailed``."""
        if self._transport is None or self._transport.strategy is not self:
            advice = "put your steps into overridden hooks, evaluate_fn or callbacks (for noise: dp-noise, docs/privacy.md)"
            raise RunFailed(f"only strategy.start(grid, ...) of {type(self).__name__} itself calls its hooks: {advice}")
        return self._transport

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Make one train message per client of the cohort, in client order.

        Args:
            server_round: the round's number, from 1.
            arrays: the shared tensors.
            config: values for every message, such as ``lr``. It is the same object,
                ``train_config``, in every round, so your changes stay.
            grid: Flower's grid.

        Raises:
            RunFailed: another loop than ``start`` called this hook.
        """
        return self._called().ask_to_train(server_round, arrays, config)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Pair:
        """Read the replies, and combine them into the new shared model, as the method says.

        In ``replies``, the records whose names do not begin with ``fl-bn/`` are
        your own.

        Returns:
            The shared tensors, and the combined metrics (``loss`` and ``samples``
            among them); ``(None, None)`` if too few replies are usable.
        """
        return self._called().combine(server_round, replies)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Make one evaluate message per client that evaluates, with the same ``config`` object in every round.

        If clients have models of their own, only those that have trained evaluate.
        """
        return self._called().evaluations.ask(server_round, arrays, config)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Combine the clients' metrics, each client once. None: none sent a valid metric."""
        return self._called().evaluations.combine(server_round, replies)

    # What the transport calls: each hook, and a check of what it returned

    def _overrides(self, hook: str) -> bool:
        """Return whether user code defines ``hook``, in a class or as an attribute."""
        owner = next(kind for kind in type(self).__mro__ if hook in vars(kind))
        return hook in vars(self) or not owner.__module__.startswith("fl_bn.flower.")

    def _configured(self, kind: str, number: int, arrays: ArrayRecord, config: ConfigRecord) -> tuple[list[Message], list[Client]]:
        """Call a configuring hook. Return its messages, and each one's client."""
        transport, hook = self._called(), f"configure_{kind}"
        if (returned := getattr(self, hook)(number, arrays, config, transport.grid)) is None:
            raise _wrong(hook, "messages", None)
        messages = list(returned)  # a hook may be a generator, which chooses the clients only now
        clients = transport.cohort if kind == "train" else transport.evaluations.clients
        nodes = [message.metadata.dst_node_id for message in messages]
        if len(chosen := set(nodes)) < len(nodes) or chosen - {client.node for client in clients}:
            known = ", ".join(str(client.node) for client in clients)
            raise _wrong(hook, f"at most one message for each client of this round (on nodes {known})", f"messages for nodes {nodes}")
        if missing := [client.index for client in clients if client.node not in chosen]:
            log(logging.INFO, "%s leaves out %s", hook, transport.policy.called.clients(missing))
        return messages, [client for client in clients if client.node in chosen]

    def _aggregated(self, number: int, replies: Iterable[Message]) -> Pair:
        """Call ``aggregate_train``, and return the arrays and the metrics, if any."""
        if self._overrides("aggregate_train"):
            replies = list(replies)  # the user's code may read them twice
        match returned := self.aggregate_train(number, replies):
            case (ArrayRecord() | None as arrays, MetricRecord() | None as metrics):
                return arrays, metrics
        raise _wrong("aggregate_train", "a pair, an ArrayRecord and a MetricRecord, or None for them", returned)

    def _evaluated(self, number: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Call ``aggregate_evaluate``, and return the metrics, if any."""
        if not isinstance(returned := self.aggregate_evaluate(number, replies), MetricRecord | None):
            raise _wrong("aggregate_evaluate", "a MetricRecord or None", returned)
        return returned

    def summary(self) -> None:
        """Log what the method does with every normalisation layer."""
        transport = self.transport
        first, *others = describe_layers(transport.server.source, transport.shared.model, transport.method)
        log(logging.INFO, "\t%s", first)
        for line in others:
            log(logging.INFO, "\t%s", line, extra={DETAIL: True})

    def save(self, path: str | Path) -> None:
        """Save the shared model of the last evaluation as safetensors, by the unconverted network's names.

        The file has all tensors except those that the clients keep.
        """
        save_network(Path(path), self.transport.running.arrays())

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        resume: Checkpoint | None = None,
    ) -> RunResult:
        """Run the rounds, as Flower's ``start`` does. ``num_rounds=0``: only measure the statistics.

        Args:
            grid: Flower's grid.
            initial_arrays: the tensors to start from,
                ``ArrayRecord(net.state_dict())``. Default: the model's own.
                BatchNorm tensors that clients keep start from them, too.
            num_rounds: the number of rounds, 0 or more.
            timeout: how many seconds to wait for the replies of a round, and in an
                app of your own for the clients at the start. Default: that of
                ``rounds``; in an app of your own Flower's 3600 s.
            train_config: values for every train message, such as ``lr``.
            evaluate_config: values for every evaluate message.
            evaluate_fn: evaluates at the server, besides the clients:
                ``evaluate_fn(round, arrays)``, from round 0 on. The arrays load
                into the network by ``load_state_dict``. BatchNorm layers that
                clients keep are averaged over the clients that send theirs.
            resume: a checkpoint, which ``keep_checkpoint`` got. The run goes on
                after its round.

        Returns:
            Flower's result, with the arrays of the last evaluation and every
            round's record.

        Raises:
            RunFailed: clients are missing, too many rounds in a row failed, there
                is nothing to measure, the clients' app does not answer, or the
                method's layer-wise exchange has no carrier for this grid.
            ValueError: ``initial_arrays`` do not fit the network, ``num_rounds`` is
                invalid, or a hook is overridden that secure aggregation never
                calls.
        """
        check_fits(STARTS, {"num_rounds": num_rounds, "timeout": timeout})
        if simulated():
            from fl_bn.flower import lost_actors  # imports Ray

            lost_actors.repair()
        progress = Progress.of(grid)
        progress.begin(num_rounds)
        configs = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        self._transport, seconds = self._begun(grid, timeout, configs[0])
        transport, server = self._transport, self._transport.server
        if transport.secure is not None and (hooks := [hook for hook in REPLIES if self._overrides(hook)]):
            raise ValueError(f"{type(self).__name__} overrides {hooks[0]}, but secure aggregation hides all replies: remove the hook")
        if server.method.exchanges:
            transport.exchanges.check(grid)
        server.rounds = num_rounds
        if num_rounds == 0 and (reason := transport.statistics.why_idle()):
            raise RunFailed(reason)
        self.summary()
        first, failed = (1, 0) if resume is None else (resume.round + 1, resume.failed)
        if resume is not None:
            transport.recovery.go_back(resume, num_rounds, server.shared, server.optimizer)
            if server.shared.statistics() and transport.statistics.rescales(num_rounds):
                server.shared.was_at_unit_scale()
        elif initial_arrays is not None:
            transport.kept.begin_with(initial_arrays)
        if (invoker := getattr(grid, "_retry_invoker", None)) is not None:  # the grid of a deployment
            repeat_cancelled(invoker)
        problem: BaseException | None = None
        newest = Newest(server.shared.tensors(), first - 1, first - 1)
        transport.begin(self, grid, seconds, configs, newest)
        transport.evaluations.evaluate_fn = evaluate_fn
        try:
            transport.callbacks.on_start(transport.running)
            self._rounds(transport, num_rounds, first, failed, progress, newest)
        except BaseException as error:
            problem = error
            newest.say(server.method)
            if isinstance(error, TooFewMeasured | Diverged):
                problem = RunFailed(str(error))
                raise problem from error
            raise
        finally:
            transport.strategy = None
            transport.exchanges.stop()
            transport.callbacks.on_end(problem)
        if transport.own_app is not None:  # as Flower's strategies end
            log(logging.INFO, "Final results:")
            for line in str(transport.result).splitlines():
                log(logging.INFO, "\t%s", line)
        return transport.result

    def _rounds(self, transport: GridTransport, rounds: int, first: int, failed: int, progress: Progress, newest: Newest) -> None:
        server, result = transport.server, transport.result

        def tell() -> RoundRecord:
            """Log the round's result, call the callbacks, and return the record."""
            transport.batches_trained += batches_trained([server.record])
            log(logging.INFO, "%s", in_words(server.record, rounds, transport.task, transport.policy.called))
            complete = transport.disclosures.enter(server.record)
            transport.callbacks.on_round(complete, rounds)
            progress.on_round(complete, rounds)
            return complete

        def show(measured: Measured) -> None:
            server.record, result.arrays, number = measured.record, transport.outward(measured.tensors), measured.record.round
            newest.take(0, measured.tensors)
            if measured.last or server.policy.due(number, 0):
                server.record = replace(server.record, evaluation=transport.evaluate(number, measured.tensors))
            tell()

        transport.meet(transport.grid)
        result.arrays = transport.outward(server.shared.tensors())
        if first == 1 and rounds:
            transport.evaluations.here(0, server.shared.tensors())
        for one in run(server, transport, rounds, transport.statistics, first, failed, transport.running.history, show):
            newest.take(one.record.round, one.evaluated)  # for the callbacks, which get this round next
            result.records.append(tell())
            result.arrays, failed = transport.outward(newest.tensors), one.failed
            if transport.running.reason and one.record.round < rounds:
                log(logging.INFO, "the run ends after round %s of %s: %s", one.record.round, rounds, transport.running.reason)
                newest.say(server.method)
                transport.evaluations.finish(one.record.round, newest.tensors)
                break
            transport.recovery.after_round(one.record.round, rounds, one.tensors, server.shared, server.optimizer, failed)
        if 0 < rounds == failed:
            raise RunFailed(f"none of the {failed} rounds had enough usable replies, so nothing was trained. {why_failed(server.record)}")

    def _begun(self, grid: Grid, timeout: float | None, train_config: ConfigRecord) -> tuple[GridTransport, float]:
        return self.transport, self.transport.policy.timeout if timeout is None else timeout


def _wrong(hook: str, wanted: str, returned: Any) -> RunFailed:
    return RunFailed(f"{hook} must return {wanted}, as super().{hook}(...) does, but returned {returned!r:.200}")
