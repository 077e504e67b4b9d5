"""Check and combine the clients' metrics: fl-bn's own, as plain numbers or as a secure sum, and those of any name in an app of your own."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fl_bn.federation.fields import number, whole
from fl_bn.federation.metrics import fits, over_clients
from fl_bn.flower.compat import log
from fl_bn.flower.population import Client, RunFailed
from fl_bn.flower.wire.fields import SAVE, add_to_config, config_of
from fl_bn.flower.wire.messaging import copy_of
from fl_bn.flower.wire.replies import CheckedReading, Decoded, Reading, read_replies
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.support.wire import WireError, excerpt, printable, reason
from fl_bn.task import Task

if TYPE_CHECKING:
    from fl_bn.flower.secagg.rounds import SecureRounds


Send = Callable[[list[Message]], list[Message]]


class LogOnce:
    """Log a warning about each refused client, once in a run for each client and reason.

    Args:
        line: the log line, with ``%s`` for the client's name and ``%s`` for the reason.
        called: the clients' names.
    """

    def __init__(self, line: str, called: ClientNames) -> None:
        self._line, self._called, self._logged = line, called, set[tuple[int, str]]()

    def __call__(self, refused: Mapping[int, str]) -> None:
        """Log a warning for each client index and reason in ``refused`` that was not logged before."""
        for index, why in sorted(refused.items()):
            if (index, why) not in self._logged:
                self._logged.add((index, why))
                log(logging.WARNING, self._line, self._called.client(index), why)


class EvaluationsAtClients:
    """Combine the clients' evaluations in one run.

    Args:
        task: the run's task, which declares the metrics.
        called: the clients' names in the log.
    """

    def __init__(self, task: Task, called: ClientNames) -> None:
        self.task, self._called, self._say = task, called, LogOnce("%s did not evaluate: %s", called)

    def in_the_clear(self, replies: Iterable[Decoded], reading: CheckedReading) -> tuple[MetricRecord | None, dict[int, dict[str, float]]]:
        """Combine the replies of an evaluation without secure aggregation.

        Args:
            replies: the clients' replies.
            reading: checks the replies.

        Returns:
            First, the metrics over all clients (``over_clients``); None if no client has a valid metric. Second, each
                client's own loss and task metric, by client index.
        """
        checked, refused, _ = read_replies(replies, reading)
        self._say(refused)
        metric = self.task.metric
        metrics = {reply.client: reply.metrics for reply in checked if fits(self.task, metric, reply.metrics[metric])}  # NaN: no label
        if not metrics:
            return None, {}
        own = {index: {k: m[k] for k in ("loss", metric)} for index, m in metrics.items()}
        return MetricRecord({**over_clients(self.task, [dict(m) for m in metrics.values()])}), own

    def save_models(self, messages: list[Message], send: Send) -> None:
        """Ask clients to save their own models.

        Args:
            messages: one message per client, of Flower's message type ``SAVE``.
            send: sends messages, and returns the replies.
        """
        for reply in send(messages):
            if reply.has_error():
                who = self._called.node(reply.metadata.src_node_id)
                log(logging.WARNING, "%s did not save its model: %s", who, reason(reply.error.reason))

    def as_a_sum(
        self, secure: SecureRounds, grid: Grid, instructions: Sequence[Message], clients: Sequence[Client], timeout: float, send: Send
    ) -> MetricRecord | None:
        """Return the mean metrics over ``clients`` from a secure sum, which hides single clients.

        If clients are to save their models, separate messages ask for this. So clients outside the sum save their
        models, too.

        Args:
            secure: makes the sum.
            grid: Flower's grid.
            instructions: the evaluate messages.
            clients: the clients that evaluate.
            timeout: how many seconds to wait for the replies.
            send: sends messages, and returns the replies.

        Returns:
            The means by name. None: there are no messages, or the secure sum failed.
        """
        if not instructions:
            return None
        if any(config_of(message.content).get("save") for message in instructions):
            self.save_models([copy_of(message, kind=SAVE) for message in instructions], send)
        nodes = {client.node for client in clients}
        messages = [copy_of(message, kind="train") for message in instructions if message.metadata.dst_node_id in nodes]
        for message in messages:
            add_to_config(message.content, {"save": ""})
        means, refused = secure.evaluate(grid, messages, clients, timeout, self.task)
        self._say(refused)
        return MetricRecord({**means}) if means else None


Ranges = Mapping[str, tuple[float, float]]
RANGES: Ranges = MappingProxyType({"accuracy": (0.0, 1.0)})
Combine = Callable[[list[RecordDict], str], MetricRecord]
"""Flower's form of a function that combines metrics: ``combine(records, weighted_by_key)``."""
EXAMPLES = "num-examples"
LONGEST_NAME, MOST_NAMES = 100, 1000
NOT_COUNTED = "%s's evaluation is not counted: %s"  # for ``LogOnce``
NOT_COUNTED_IN_TRAINING = "%s's own training metrics are not counted: %s"


def is_number(value: Any) -> bool:
    """Return whether ``value`` is an int or a float, such as a ``numpy.float64``, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


class OwnMetrics:
    """Combine the clients' own metrics in the rounds of one run.

    By default, a metric is averaged if more than half of the clients send it. ``needs`` changes this rule. A client is
    left out, and the log names it, if one of its numbers is not finite or outside the metric's range. The same holds if a
    metric's name cannot be printed, or if a needed metric is missing. No client gets a larger weight than all others
    together. Lists are not averaged.

    Args:
        key: the name of the metric that is a client's weight in the means.
        ranges: the smallest and the largest value of a metric, by name.
        train_fn: combines training metrics in place of the mean, as Flower's ``train_metrics_aggr_fn``.
        evaluate_fn: combines evaluations in place of the mean, as Flower's ``evaluate_metrics_aggr_fn``.
        alike: whether all clients have the same weight, whatever weight they report. A defence against Byzantine
            clients needs that.
        called: the clients' names in the log.
        needs: the metrics without which a client's evaluation is left out. Another metric is averaged if all clients send
            it. None: every metric that more than half of the clients send is needed.
    """

    def __init__(
        self,
        key: str = EXAMPLES,
        ranges: Ranges = RANGES,
        train_fn: Combine | None = None,
        evaluate_fn: Combine | None = None,
        alike: bool = False,
        called: ClientNames = UNNAMED,
        needs: Collection[str] | None = None,
    ) -> None:
        self._key, self._ranges, self._train_fn, self._evaluate_fn = key, ranges, train_fn, evaluate_fn
        self._alike, self._called, self._needs = alike, called, needs
        self._say, self._say_training = LogOnce(NOT_COUNTED, called), LogOnce(NOT_COUNTED_IN_TRAINING, called)
        self._lists, self._lacking = set[tuple[str, str]](), set[str]()

    @property
    def combines_training(self) -> bool:
        """Return whether a function of the user's combines the training metrics."""
        return self._train_fn is not None

    def evaluation(
        self, replies: Iterable[Decoded], clients: Sequence[Client], sent: Iterable[Message]
    ) -> tuple[MetricRecord | None, dict[int, dict[str, float]]]:
        """Combine the evaluations of ``clients``.

        Args:
            replies: the replies to ``sent``. Each client's first reply counts.
            clients: the clients to which the messages went.
            sent: the evaluate messages.

        Returns:
            The combined metrics (None if there is nothing to combine), and each client's metrics, by client index.
        """
        reading = Reading(clients, sent)
        for reply in replies:
            reading.read(reply)
        reading.end()
        own = {client: records for client, records in reading.own.items() if client not in reading.refused}
        return self._combine("evaluate_metrics_aggr_fn", self._evaluate_fn, own, reading.refused, None)

    def training(
        self, own: Mapping[int, Mapping[str, MetricRecord]], samples: Mapping[int, int]
    ) -> tuple[MetricRecord | None, dict[int, dict[str, float]]]:
        """Combine the training metrics of the clients whose replies count.

        Args:
            own: the user's metric records by name, for each client that sent some.
            samples: the number of samples of each client. If any client's metrics have no weight, these numbers are
                the weights of all clients.

        Returns:
            The combined metrics (None if there is nothing to combine), and each client's metrics, by client index.
        """
        return self._combine("train_metrics_aggr_fn", self._train_fn, own, {}, samples)

    def _combine(
        self,
        name: str,
        combine: Combine | None,
        own: Mapping[int, Mapping[str, MetricRecord]],
        refused: dict[int, str],
        samples: Mapping[int, int] | None,
    ) -> tuple[MetricRecord | None, dict[int, dict[str, float]]]:
        """Combine the metric records ``own`` by the user's function, if there is one, or by means. ``samples`` is None in an evaluation."""
        training, numbers, weights = samples is not None, dict[int, dict[str, float]](), dict[int, float]()
        for client, records in sorted(own.items()):
            try:
                metrics, weight = self._read(records, training, needed=not training and combine is None)
            except WireError as error:
                refused[client] = str(error)
                continue
            numbers[client] = metrics
            if weight is not None:
                weights[client] = weight
        counted, names = self._counted(numbers, refused, combine is None, None if training else self._needs)
        (self._say_training if training else self._say)(refused)
        if combine is not None:
            contents = [RecordDict(dict(own[client])) for client in counted]
            return (self._combined(name, combine, contents) if contents else None), counted
        if samples is not None and (lacking := [client for client in counted if client not in weights]):
            if self._key != EXAMPLES and not self._alike:
                self._say_lacking(lacking)
            weights = {client: float(samples[client]) for client in counted}
        means = self._means(counted, names, weights)
        return (MetricRecord({**means}) if means else None), counted

    def _combined(self, name: str, combine: Combine, contents: list[RecordDict]) -> MetricRecord:
        if not isinstance(combined := combine(contents, self._key), MetricRecord):
            raise RunFailed(f"{name} must return a MetricRecord, but returned a {type(combined).__name__}")
        return combined

    def _counted(
        self, numbers: Mapping[int, dict[str, float]], refused: dict[int, str], averages: bool, needs: Collection[str] | None
    ) -> tuple[dict[int, dict[str, float]], list[str]]:
        """Return the clients' metrics to average, by client index, and the names of the metrics to average.

        If a client lacks a needed metric, it is left out, and the reason is added to ``refused`` by client index. With
        ``averages=False``, only clients that are in ``refused`` already are left out, and the names of all metrics are returned.
        """
        senders = Counter(name for metrics in numbers.values() for name in metrics)
        many = [name for name, count in senders.items() if 2 * count > len(numbers)]
        needed, why = (many, "more than half of the clients send it") if needs is None else ([*needs], "it is needed")
        for client, metrics in numbers.items() if averages else ():
            if missing := [name for name in needed if name not in metrics]:
                refused[client] = f"metrics/{missing[0]}: missing, but {why}"
        counted = {client: metrics for client, metrics in numbers.items() if client not in refused}
        names = [*senders] if not averages else [name for name in many if all(name in metrics for metrics in counted.values())]
        if few := sorted(senders.keys() - set(names)):
            senders_of = "at most half of the clients" if needs is None else "not all clients"
            log(logging.WARNING, "metrics that %s send are not averaged: %s", senders_of, ", ".join(map(printable, few[:5])))
        return counted, names

    def _means(self, counted: Mapping[int, dict[str, float]], names: Sequence[str], by_client: Mapping[int, float]) -> dict[str, float]:
        weights: list[float] = [1] * len(counted) if self._alike else self._weights([*counted], by_client)
        if not (total := sum(weights)):
            if names:
                log(logging.WARNING, "no metric is averaged, because all clients' weights (%s) are 0", self._key)
            return {}
        pairs = [*zip(weights, counted.values(), strict=True)]
        return {name: sum(weight / total * metrics[name] for weight, metrics in pairs) for name in names}

    def _read(self, own: Mapping[str, MetricRecord], training: bool, needed: bool) -> tuple[dict[str, float], float | None]:
        """Check one client's metric records, which may have any names, and return its metrics and its weight.

        Args:
            own: the records by name.
            training: whether these are training metrics, not those of an evaluation.
            needed: whether a missing weight is an error. If it is not, the weight is None.

        Raises:
            WireError: a number is not finite or not in its range, a needed weight is missing, or two records have a metric
                of the same name.
        """
        metrics: dict[str, Any] = {}
        for name, record in own.items():
            if twice := sorted(metrics.keys() & record.keys() - {self._key}):
                raise WireError(name, twice[0], "two metric records have a metric of this name: give each metric a name of its own")
            metrics |= record
        if not own:
            raise WireError("metrics", "", f"missing: expected a MetricRecord with {self._key}")
        weight = self._weight(metrics.pop(self._key, None), needed)
        if len(metrics) > MOST_NAMES:
            raise WireError("metrics", "", f"expected at most {MOST_NAMES} metrics, but got {len(metrics)}")
        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            if len(name) > LONGEST_NAME or not name.isprintable():
                problem = f"expected a name of up to {LONGEST_NAME} printable characters, but got {len(name)} characters"
                raise WireError("metrics", name, problem)
            if isinstance(value, list):
                self._say_list(name, training)
                continue
            wanted = number(*self._ranges.get(name, (-math.inf, math.inf)))
            if not wanted.fits(value):
                hint = f" (for another range, give the strategy, or legacy_server_app, ranges={{{name!r}: (0, 100)}})"
                hint = hint if name in self._ranges else ""
                raise WireError("metrics", name, f"expected {wanted.wanted}, but got {excerpt(value)}{hint}")
            numbers[name] = float(value)
        return numbers, weight

    def _weight(self, value: Any, needed: bool) -> float | None:
        wanted = whole() if self._key == EXAMPLES else number(0)
        if wanted.fits(value):
            number_of: float = value
            return number_of
        if value is None and not needed:
            return None
        got = "but it is missing" if value is None else f"but got {excerpt(value)}"
        raise WireError("metrics", self._key, f"expected {wanted.wanted}, {got}")

    def _say_lacking(self, clients: list[int]) -> None:
        if self._key not in self._lacking:
            self._lacking.add(self._key)
            log(
                logging.WARNING,
                "weighted_by_key=%r: the training metrics of %s lack it, so the numbers of samples are the weights of all clients' "
                "training metrics: give round.message(..., metrics) this metric in every client, or correct the name",
                self._key,
                self._called.clients(clients),
            )

    def _say_list(self, name: str, training: bool) -> None:
        which, given = ("train", self._train_fn) if training else ("evaluate", self._evaluate_fn)
        if (name, which) not in self._lists and given is None:
            self._lists.add((name, which))
            log(
                logging.INFO,
                "metric %s is a list, and lists are not averaged: to combine it, give the strategy %s_metrics_aggr_fn=...",
                name,
                which,
            )

    def _weights(self, clients: Sequence[int], given: Mapping[int, float]) -> list[float]:
        """Return each client's weight. No weight is larger than the sum of the weights of all other clients."""
        total, weights = sum(given[client] for client in clients), [given[client] for client in clients]
        for i, client in enumerate(clients):
            if given[client] > (others := total - given[client]) > 0:  # if nobody else has a weight, nobody is outweighed
                weights[i] = others
                what = "examples" if self._key == EXAMPLES else f"as its {self._key}"
                more = "%s reports %s %s, more than all others together (%s): its weight in the means of metrics is lowered to their sum"
                log(logging.WARNING, more, self._called.client(client), given[client], what, others)
        return weights
