"""Run rounds over a Flower grid: send messages to clients, read their replies, and call the strategy's hooks in between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fl_bn.federation.payload import Named
from fl_bn.federation.transport import Transport
from fl_bn.federation.values import Instruction, Reply, RoundReplies
from fl_bn.flower.app.client_app import SAVE, STATISTICS
from fl_bn.flower.app.unseen import average_kept
from fl_bn.flower.compat import repeat_cancelled
from fl_bn.flower.global_model import GlobalModel
from fl_bn.flower.hooks import RunResult, addressed, replies_for
from fl_bn.flower.layerwise.exchanges import BY_PASSES
from fl_bn.flower.log import log
from fl_bn.flower.population import Client, RunFailed
from fl_bn.flower.wire.codec import arrays_of, header_for
from fl_bn.flower.wire.messaging import receive, send_and_receive
from fl_bn.flower.wire.replies import Decoded, Reading, read_replies, with_header
from fl_bn.methods import Phase

if TYPE_CHECKING:
    from fl_bn.flower.strategy import BatchNormStrategy

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class GridTransport(Transport):
    """Run the rounds of one strategy over a Flower grid.

    Args:
        strategy: makes the messages, and reads the replies.
        grid: Flower's grid.
        timeout: how many seconds to wait for the replies of a round.
        train_config: values for every train message.
        evaluate_config: values for every evaluate message.
        evaluate_fn: evaluates at the server, too: ``evaluate_fn(round, arrays)``.
        hooks: the strategy whose hooks are called. Default: ``strategy``.
    """

    def __init__(
        self,
        strategy: BatchNormStrategy,
        grid: Grid,
        timeout: float,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: EvaluateFn | None = None,
        hooks: Strategy | None = None,
    ) -> None:
        self.strategy, self.server, self.grid, self.timeout = strategy, strategy.server, grid, timeout
        self._train_config, self._evaluate_config, self._evaluate_fn = train_config, evaluate_config, evaluate_fn
        self.result, self.hooks = RunResult(), strategy if hooks is None else hooks
        self._global_model = GlobalModel(strategy)
        if (invoker := getattr(grid, "_retry_invoker", None)) is not None:  # the grid of a deployment
            repeat_cancelled(invoker)

    def round(self, number: int) -> bool:
        """Run a round by the strategy's hooks ``configure_train`` and ``aggregate_train``. Return False if the round failed."""
        strategy, shared, hooks, called = self.strategy, self.server.shared, self.hooks, self.strategy.rounds.called
        before = shared.tensors()
        returned = _made(hooks.configure_train(number, strategy.outward(before), self._train_config, self.grid))
        if self.server.record.round != number:  # an overridden hook did not call super()
            self.server.begin(number)
            strategy.cohort = strategy.clients_of(self.grid).everyone()
        drawn = strategy.cohort
        messages, strategy.cohort = addressed(returned, drawn, "configure_train", called)
        strategy.sent = messages  # messages that are sent again are appended to this list
        if drawn and not messages:
            log(logging.INFO, "round %s: configure_train returned no message, so nobody trains", number)
            shared.load(before)
            return True
        if strategy.secure is not None:
            arrays, metrics = self._secure_round(messages)
        elif Phase(self.server.record.phase) is Phase.EXCHANGE:
            replies: Iterable[Message] = strategy.exchanges.round(self.grid, strategy.cohort, messages, self.timeout)
            arrays, metrics = pair(hooks.aggregate_train(number, replies))
        else:
            replies = receive(self.grid, messages, self.timeout, strategy.rounds.retry, called=called)
            arrays, metrics = pair(hooks.aggregate_train(number, replies_for(hooks, "aggregate_train", replies)))
        if metrics is not None:
            self.result.train_metrics_clientapp[number] = metrics
        if arrays is None:
            shared.load(before)
            return False
        shared.load(strategy.inward(arrays))
        if not self.server.record.aggregated:  # an overridden hook aggregated without super()
            self.server.record = replace(self.server.record, aggregated=True)
        return True

    def train(self, instruction: Instruction) -> RoundReplies:
        """Raise NotImplementedError. Nobody calls this, since a strategy combines the replies in ``aggregate_train``."""
        raise NotImplementedError

    def measure(self, instruction: Instruction) -> RoundReplies:
        """Measure statistics at all connected clients, or only at the round's cohort if the method says so. Return the checked replies."""
        strategy, everyone = self.strategy, self._measuring(instruction)
        sent = strategy.messages(STATISTICS, instruction, everyone, {"measured": instruction.measured})
        who = [client.index for client in everyone]
        if strategy.secure is not None:
            return RoundReplies(who, *strategy.secure.measure(self.grid, sent, everyone, self.timeout))
        replies = send_and_receive(self.grid, sent, self.timeout, strategy.rounds.retry, strategy.rounds.called)
        return RoundReplies(who, *self._read(strategy.overheard(replies), instruction, everyone, sent))

    def measure_layer_by_layer(self, instruction: Instruction) -> RoundReplies | None:
        """Measure the clients' statistics layer by layer, with one message per client and one exchange per layer.

        Return None if the settings or the engine do not allow such an exchange, or if a client with data dropped out of
        the exchange.
        """
        strategy = self.strategy
        policy, exchanges = strategy.rounds, strategy.exchanges
        if strategy.secure is not None or strategy.method.adversary is not None or policy.recalibration == "passes":
            return None
        everyone = self._measuring(instruction)
        clients, steps = [client for client in everyone if client.samples > 0], 1 + len(strategy.shared.layers)
        sent = strategy.messages(STATISTICS, instruction, clients, {"measured": instruction.measured}, steps=steps)
        tries = policy.recalibration == "exchange"
        replies, carrier = exchanges.measure(self.grid, clients, sent, self.timeout, policy.memory, tries)
        if not carrier:
            return None
        parts, refused, wrong = self._read(strategy.overheard(replies, without_training=True), instruction, clients, sent)
        missing = refused | {c.index: "it sat out" for c in clients if c.index not in exchanges.session.taking_part}
        if missing:
            index, reason = next(iter(sorted(missing.items())))
            log(logging.WARNING, "%s took no part in the exchange layer by layer: %s. %s", policy.called.client(index), reason, BY_PASSES)
            return None
        empty = {client.index: "it has no samples" for client in everyone if client not in clients}
        return RoundReplies([client.index for client in everyone], parts, empty, wrong, exchanges.session, carrier)

    def store(self, instruction: Instruction, replies: RoundReplies) -> RoundReplies:
        """Store the measured statistics in the server, and return the replies. A secure sum has stored its statistics already."""
        return replies if self.strategy.secure is not None else super().store(instruction, replies)

    def evaluate(self, number: int, tensors: Named) -> dict[str, float]:
        """Evaluate at the clients by the strategy's hooks. Then call ``evaluate_fn``, if there is one.

        If clients do not evaluate in this run, the strategy's ``evaluate`` is called in their place, if there is one. All
        metrics are stored in ``result``. Those that are single numbers are returned, by name.

        Args:
            number: the round.
            tensors: name -> shared tensor.
        """
        strategy, metrics = self.strategy, dict[str, float]()
        returned = _made(self.hooks.configure_evaluate(number, strategy.outward(tensors), self._evaluate_config, self.grid))
        messages, reached = addressed(returned, strategy.told, "configure_evaluate", strategy.rounds.called)
        strategy.sent = messages
        strategy.evaluating = [client for client in strategy.evaluating if client in reached]
        if strategy.secure is not None:
            as_a_sum = strategy.evaluations.as_a_sum
            at_clients = as_a_sum(strategy.secure, self.grid, messages, strategy.evaluating, self.timeout, self._send)
        else:
            at_clients = self.hooks.aggregate_evaluate(number, self._send(messages))
            if not isinstance(at_clients, MetricRecord | None):
                raise RunFailed(f"aggregate_evaluate must return a MetricRecord or None, but returned {at_clients!r:.100}")
        if at_clients is not None:
            self.result.evaluate_metrics_clientapp[number] = at_clients
            metrics = numbers_of(at_clients)
        elif strategy.evaluate is not None and not strategy.at_clients:
            strategy.shared.load(tensors)
            metrics = strategy.evaluate(strategy.shared.model)
            self.result.evaluate_metrics_serverapp[number] = MetricRecord({**metrics})
        return metrics | {name: value for name, value in self.evaluate_here(number, tensors).items() if name not in metrics}

    def evaluate_here(self, number: int, tensors: Named) -> dict[str, float]:
        """Call ``evaluate_fn``, store its metrics in ``result``, and return those that are single numbers, by name.

        The returned dict is empty without an ``evaluate_fn`` or a global model, or if ``evaluate_fn`` returns None.
        """
        if self._evaluate_fn is None or (arrays := self._global_model.at(number, tensors)) is None:
            return {}
        if (metrics := self._evaluate_fn(number, arrays)) is None:
            return {}
        if not isinstance(metrics, MetricRecord):
            must = "evaluate_fn(round, arrays) must return a MetricRecord or None"
            raise RunFailed(f"{must}, but in round {number} it returned {metrics!r:.200}")
        self.result.evaluate_metrics_serverapp[number] = metrics
        return numbers_of(metrics)

    def _send(self, messages: Iterable[Message]) -> list[Message]:
        """Send messages, and return the replies."""
        rounds = self.strategy.rounds
        return send_and_receive(self.grid, messages, self.timeout, rounds.retry, rounds.called)

    def finish_round(self, number: int, changed: bool) -> None:
        """Average the layers that clients keep, if ``number`` is the last round of the run and ``rounds.unseen`` is set."""
        if number == self.server.rounds:
            self._average_kept(number)

    def end_early(self, number: int, tensors: Named) -> None:
        """Finish a run that stops early: let clients save their own models, and collect the average of the layers that they keep.

        Args:
            number: the last round that was run.
            tensors: name -> shared tensor, as evaluated last.
        """
        strategy = self.strategy
        strategy.shared.load(tensors)
        if strategy.save_clients and strategy.shared.personal:
            instruction = strategy.shared.instruction(number, Phase.TRAIN)
            messages = strategy.messages(SAVE, instruction, strategy.everyone(), {"save": strategy.save_clients})
            strategy.evaluations.save_models(messages, self._send)
        self._average_kept(number)

    def _average_kept(self, number: int) -> None:
        """Average the layers that clients keep, for clients that did not train, if ``rounds.unseen`` is set."""
        strategy = self.strategy
        if not (strategy.rounds.unseen and strategy.method.personal):
            return
        population, run_id = strategy.clients_of(self.grid), strategy.recovery.run_id
        who = strategy.with_models(population.everyone())
        overheard = strategy.overheard
        strategy.unseen = average_kept(population.grid, who, strategy.shared, number, strategy.rounds, run_id, overheard)

    def _secure_round(self, messages: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Train for one round by a secure sum, which hides single clients.

        Return the shared tensors and the metrics. If the sum failed, return ``(None, None)``.
        """
        strategy = self.strategy
        assert strategy.secure is not None
        changed, parts = strategy.secure.train(self.grid, messages, strategy.cohort, self.timeout)
        strategy.recovery.check(self.server.record.round, parts)
        if not changed:
            return None, None
        samples = sum(part.samples for part in parts)
        return arrays_of(self.server.shared.tensors()), MetricRecord({"loss": parts[0].loss, "samples": samples})

    def _measuring(self, instruction: Instruction) -> list[Client]:
        strategy = self.strategy
        by_cohort = strategy.method.measures_cohort(instruction.round)
        return strategy.cohort if by_cohort else strategy.clients_of(self.grid).everyone()

    def _read(
        self, replies: Iterable[Decoded], instruction: Instruction, clients: Sequence[Client], sent: Sequence[Message]
    ) -> tuple[list[Reply], dict[int, str], set[int]]:
        expected = self.server.expects(instruction.round, instruction.phase, {client.index: client.samples for client in clients})
        header = header_for(self.strategy.shared, instruction.round, instruction.phase)
        return read_replies(replies, Reading(clients, with_header(header, expected), sent))


def _made(messages: Any) -> Any:
    """Return the messages of a hook that is a generator as a list, so that the hook has run before anything else reads what it set."""
    return list(messages) if isinstance(messages, Iterator) else messages


def pair(returned: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
    """Check that ``aggregate_train`` returned a pair of arrays and metrics, and return it.

    Raises:
        RunFailed: It returned something else, such as None without a ``return``.
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        must = "aggregate_train must return a pair, arrays and metrics, as super().aggregate_train(...) does"
        raise RunFailed(f"{must}, but returned {returned!r:.100}")
    for value, kind in zip(returned, (ArrayRecord, MetricRecord), strict=True):
        if not isinstance(value, kind | None):
            raise RunFailed(f"aggregate_train must return an ArrayRecord and a MetricRecord, or None for them, but one is {value!r:.100}")
    return returned


def numbers_of(metrics: MetricRecord) -> dict[str, float]:
    """Return the metrics of a record that are single numbers, by name. Metrics that are lists are left out."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
