"""Evaluate a run's models: by hooks, at the server, and by the user's ``evaluate_fn``."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, Message, MetricRecord
from torch import Tensor, nn

from fl_bn.bn.roles import Role, batch_norms
from fl_bn.federation.aggregation import TooFew, average
from fl_bn.federation.record import batches_trained, fits, over_clients
from fl_bn.federation.replies import REPLIED, Expected
from fl_bn.federation.schema import KEPT, Schema, kept_layers
from fl_bn.federation.values import Instruction, Named
from fl_bn.flower.compat import log
from fl_bn.flower.own_metrics import NOT_EVALUATED, ByClient, OwnMetrics, numbers_of
from fl_bn.flower.population import Client, RunFailed, sample_cohort
from fl_bn.flower.wire.codec import arrays_of, header_for
from fl_bn.flower.wire.messages import SAVE, evaluated
from fl_bn.flower.wire.messaging import Decoded, Reading, copy_of
from fl_bn.methods import Phase
from fl_bn.support.wire import reason

if TYPE_CHECKING:
    from fl_bn.flower.grid_transport import GridTransport
    from fl_bn.flower.secagg.rounds import SecureRounds

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
NO_MODEL = "evaluate_fn is not called without the clients' BatchNorm, which they keep under %s. %s. tells=True in client_app.py sends it"
AVERAGED = "evaluate_fn gets a model with the average of the clients' BatchNorm, since every client keeps its own under %s"
NOTHING_SHARED = "evaluate_fn is not called: under %s clients share no weights, so there is no global model"
CONVERTED = "evaluate_fn gets the arrays of the converted network, since %s replaces BatchNorm: load them into fl_bn.convert(Net(), method)"


class Evaluations:
    """Evaluate the models of one run. The metrics of ``clients`` count.

    ``at_server`` maps the global model to metrics, where clients do not evaluate.
    ``own`` combines the metrics of a user's app.
    """

    def __init__(self, run: GridTransport, at_server: Callable[[nn.Module], dict[str, float]] | None, own: OwnMetrics | None) -> None:
        self._run, self.at_server, self._own = run, at_server, own
        self.at_clients = run.policy.evaluate_share > 0 and (run.policy.at_clients or run.shared.personal)
        self.clients = list[Client]()
        self.evaluate_fn: EvaluateFn | None = None
        self.unseen = dict[str, Tensor]()  # the average of the layers that clients keep
        self.once = cache(log)  # logs a line with its values once in this run

    def say_refused(self, line: str, refused: Mapping[int, str]) -> None:
        """Warn of each refused client once in a run for each reason."""
        for index, why in sorted(refused.items()):
            self.once(logging.WARNING, line, self._run.policy.called.client(index), why)

    def after(self, number: int, tensors: Named, messages: list[Message]) -> dict[str, float]:
        """Evaluate by ``messages`` or at the server, then by ``evaluate_fn``. Return the single numbers."""
        run, metrics = self._run, dict[str, float]()
        assert run.strategy is not None, "an evaluation belongs to a start"
        secure, strategy = run.secure, run.strategy
        at_clients = self._as_a_sum(secure, messages) if secure else strategy._evaluated(number, run.receive(messages))
        if at_clients is not None:
            run.result.evaluate_metrics_clientapp[number] = at_clients
            metrics = numbers_of(at_clients)
        elif self.at_server is not None and not self.at_clients:
            run.shared.load(tensors)
            metrics = self.at_server(run.shared.model)
            run.result.evaluate_metrics_serverapp[number] = MetricRecord({**metrics})
        at_server = self.here(number, tensors)
        if number == run.server.rounds:
            self.finish(number, tensors)
        return {**at_server, **metrics}

    def ask(self, number: int, arrays: ArrayRecord, config: Mapping[str, Any]) -> list[Message]:
        """Make one evaluate message per client that evaluates: the code of ``configure_evaluate``.

        There are none if clients have neither models nor test data of their own.
        """
        run = self._run
        if not self.at_clients:
            return []
        run.shared.load(run.inward(arrays))
        everyone = run.everyone()
        if len(have_models := self.with_models(everyone)) < len(everyone):
            line = "round %s: %d of %d clients have trained so far, and evaluate models of their own"
            log(logging.INFO, line, number, len(have_models), len(everyone))
        policy, self.clients = run.policy, have_models
        if (size := policy.evaluators(len(everyone))) < len(have_models):
            drawn = sample_cohort([client.index for client in have_models], size, random.Random(f"{policy.seed}/evaluate/{number}"))
            self.clients = [client for client in have_models if client.index in drawn]
        messages = run.messages("evaluate", run.shared.instruction(number, Phase.TRAIN), self.clients, {}, config)
        run.kept.add(messages, self.clients)
        return messages

    def with_models(self, clients: list[Client]) -> list[Client]:
        """Return the clients that have stored tensors of their own, or all if none has."""
        return [client for client in clients if self._run.method.personal and client.index in self._run.kept.rounds] or clients

    def combine(self, number: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Combine the metrics of each client's first reply: the code of ``aggregate_evaluate``."""
        if not self.at_clients:
            return None
        run = self._run
        decoded = run.disclosures.evaluations(replies, run.everyone())
        if self._own is None:
            metrics, by_client = self._of_task(number, decoded)
        else:
            reading = Reading(self.clients)
            reading.all(decoded)
            self.say_refused(NOT_EVALUATED, reading.refused)
            given = {client: records for client, records in reading.own.items() if client not in reading.refused}
            metrics, by_client = self._own.combined(run, given, None)
        run.server.record = replace(run.record, client_evaluation=by_client)
        return metrics

    def _of_task(self, number: int, replies: Iterable[Decoded]) -> tuple[MetricRecord | None, ByClient]:
        """Return the combined metrics that the task declares, and each client's own."""
        run, metric = self._run, self._run.task.metric
        header = header_for(run.shared, number, Phase.TRAIN)
        expected = Expected(header.round, header.signature, Schema({}), evaluated(run.task))
        checked, refused, _ = Reading(self.clients, header, expected).all(replies)
        self.say_refused("%s did not evaluate: %s", refused)
        metrics = {reply.client: reply.metrics for reply in checked if fits(run.task, metric, reply.metrics[metric])}  # NaN: no label
        if not metrics:
            return None, {}
        own = {index: {k: m[k] for k in ("loss", metric)} for index, m in metrics.items()}
        return MetricRecord({**over_clients(run.task, [dict(m) for m in metrics.values()], run.server.defence.active)}), own

    def _as_a_sum(self, secure: SecureRounds, messages: list[Message]) -> MetricRecord | None:
        """Return the clients' mean metrics from a secure sum, if it succeeds."""
        run, sent = self._run, [copy_of(message, kind="train") for message in messages]
        means, refused = secure.evaluate(run.grid, sent, self.clients, run.timeout, run.task) if sent else ({}, {})
        self.say_refused("%s did not evaluate: %s", refused)
        return MetricRecord({**means}) if means else None

    def finish(self, number: int, tensors: Named) -> None:
        """Let clients save their models, and average the layers that they keep."""
        run = self._run
        run.shared.load(tensors)
        if run.save_clients and run.shared.personal:
            clients, instruction = run.everyone(), run.shared.instruction(number, Phase.TRAIN)
            messages = run.messages(SAVE, instruction, clients, {"save": run.save_clients})
            run.kept.add(messages, clients)
            for reply in run.receive(messages):
                if reply.has_error():
                    who = run.policy.called.node(reply.metadata.src_node_id)
                    log(logging.WARNING, "%s did not save its model: %s", who, reason(reply.error.reason))
        if run.policy.unseen and run.method.personal:
            self.unseen, refused = kept_average(run, number)
            self.say_refused("%s's layers are not in the average for unseen clients: %s", refused)

    # At the server

    def here(self, number: int, tensors: Named) -> dict[str, float]:
        """Call ``evaluate_fn``, store its metrics, and return the single numbers."""
        if self.evaluate_fn is None or (arrays := self._global_model(number, tensors)) is None:
            return {}
        if not isinstance(metrics := self.evaluate_fn(number, arrays), MetricRecord | None):
            raise RunFailed(f"evaluate_fn must return a MetricRecord or None, but in round {number} returned {metrics!r:.200}")
        if metrics is not None:
            self._run.result.evaluate_metrics_serverapp[number] = metrics
        return numbers_of(metrics)

    def _global_model(self, number: int, tensors: Named) -> ArrayRecord | None:
        """Return arrays that load into the user's network, or None with a reason in the log."""
        run = self._run
        shared, method, locality, state = run.shared, run.method, run.shared.locality, run.shared.model.state_dict()
        others = {name: state[name] for name in locality.home if locality.role[name] is not Role.MIXING}
        if batch_norms(run.server.source) and not locality.norm_layers:
            self.once(logging.INFO, CONVERTED, method.name)
        if number and method.keeps(Role.WEIGHT):
            self.once(logging.INFO, NOTHING_SHARED, method.name)
            return None
        if number and method.personal and others:
            mean, refused = kept_average(run, number) if run.secure is None else ({}, {})
            if not mean:
                reasons = [f"{run.policy.called.client(client)}: {why}" for client, why in sorted(refused.items())]
                why = "Secure aggregation hides each client's layers" if run.secure else [*reasons, "No client is online"][0]
                self.once(logging.WARNING, NO_MODEL, method.name, why)
                return None
            self.once(logging.INFO, AVERAGED, method.name)
            others |= mean
        batches = run.batches_trained + (batches_trained([run.record]) if number else 0)
        return arrays_of(shared.whole({**tensors, **others}, batches, others))


def kept_average(run: GridTransport, number: int) -> tuple[dict[str, Tensor], dict[int, str]]:
    """Ask the clients for the tensors that they keep. Return their average, and why clients are not in it.

    Clients that took no part in the training may start from it. All have the same
    weight. (Li et al.: FedBN: Federated Learning on Non-IID Features via Local
    Batch Normalization, ICLR 2021, appendix G.)
    """
    shared, clients = run.shared, run.evaluations.with_models(run.everyone())
    header, samples = header_for(shared, number, Phase.MEASURE), {client.index: client.samples for client in clients}
    expected = Expected(number, shared.signature, kept_layers(shared.model, shared.locality), REPLIED, samples)
    sent = run.messages(f"query.{KEPT}", Instruction(number, Phase.MEASURE, {}), clients, {})
    parts, refused, _ = Reading(clients, header, expected).all(run.overheard(run.receive(sent)))
    tensors = [part.sections[KEPT] for part in parts]
    try:
        defence = run.server.defence.among(len(tensors), len(refused))
    except TooFew as error:
        log(logging.WARNING, "the layers for unseen clients are those that every client began with: %s", error)
        return {}, refused
    means: dict[str, Tensor] = {}
    if tensors and defence.active:
        means, _ = defence.update(tensors, None)
    elif tensors:
        means = average(tensors, [1.0] * len(tensors))
    return {name: mean.to(tensors[0][name].dtype) for name, mean in means.items()}, refused
