"""Read the learning rates and the metrics of a Flower app of the user's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from flwr.app import MetricRecord, RecordDict

from fl_bn.federation.fields import number as a_number
from fl_bn.federation.fields import whole
from fl_bn.federation.policy import constant_rate
from fl_bn.flower.population import Population, RunFailed
from fl_bn.support.names import visible
from fl_bn.support.wire import WireError, excerpt

if TYPE_CHECKING:
    from fl_bn.flower.grid_transport import GridTransport

RATES = ("lr", "learning_rate", "learning-rate")
"""The names for the learning rate in a ``train_config``, as in Flower's examples."""
Combine = Callable[[list[RecordDict], str], MetricRecord]
"""Flower's function that combines metrics: ``combine(records, weighted_by_key)``."""
ByClient = dict[int, dict[str, float]]
Records = Mapping[str, MetricRecord]
EXAMPLES = "num-examples"
LONGEST_NAME, MOST_NAMES, FINITE = 100, 1000, a_number()  # of a user's own metrics
NOT_EVALUATED = "%s's evaluation is not counted: %s"
NOT_COUNTED = "%s's own training metrics are not counted: %s"
LIST = "metric %s is a list, and lists are not averaged: to combine it, give the strategy %s_metrics_aggr_fn=..."


def is_number(value: Any) -> bool:
    """Return whether ``value`` is an int or a float, such as ``numpy.float64``, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_number(value: Any) -> float | None:
    """Return a number, or that of a text such as ``"0.1"``; None for anything else."""
    with suppress(ValueError):
        return float(value) if isinstance(value, str) or is_number(value) else None
    return None


def with_share(config: Mapping[str, Any], share: float) -> dict[str, Any]:
    """Return a user's config with each learning rate multiplied by ``share``."""
    values = dict(config)
    for name in RATES:
        if share != 1 and (rate := as_number(values.get(name))) is not None:
            values[name] = str(rate * share) if isinstance(values[name], str) else rate * share
    return values


class NamedRates:
    """Map rounds to the learning rates that train configs name."""

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}

    def note(self, round: int, config: Mapping[str, Any]) -> bool:
        """Store the rate that a train config names, if any. Return whether it changes."""
        before, rates = self(round, round), [rate for name in RATES if (rate := as_number(config.get(name))) is not None]
        self._rates |= {round: rates[0]} if rates else {}
        return self(round, round) != before

    def __call__(self, round: int, rounds: int) -> float:
        """Return the rate of the last round up to ``round``, else of the first later one."""
        if not self._rates:
            return constant_rate(round, rounds)
        return self._rates[max((number for number in self._rates if number <= round), default=min(self._rates))]


@dataclass(frozen=True)
class OwnMetrics:
    """Combine the clients' own metrics by the user's functions, or by means over those that send one.

    Where ``alike`` is true, against Byzantine clients, it is the median. A client
    is left out, and logged, if its weight ``key`` is missing, a number is not
    finite, or a name cannot be printed. Lists are not averaged.
    """

    key: str = EXAMPLES
    train_fn: Combine | None = None
    evaluate_fn: Combine | None = None
    alike: bool = False

    def combined(
        self, run: GridTransport, own: Mapping[int, Records], samples: Mapping[int, int] | None
    ) -> tuple[MetricRecord | None, ByClient]:
        """Combine the metric records of each client. Return the result, if any, and each client's metrics.

        In training, ``samples`` is the weight of a client that sends none. None: an
        evaluation.
        """
        which, combine = ("evaluate", self.evaluate_fn) if samples is None else ("train", self.train_fn)
        numbers, weights, refused, lists = ByClient(), dict[int, float](), dict[int, str](), set[str]()
        for client, records in sorted(own.items()):
            try:
                metrics, weight = self._read(records, (samples or {}).get(client) if self.key == EXAMPLES else None, combine is None)
            except WireError as error:
                refused[client] = str(error)
                continue
            lists |= {name for name, value in metrics.items() if isinstance(value, list)}
            numbers[client] = {name: float(value) for name, value in metrics.items() if not isinstance(value, list)}
            weights[client] = 1.0 if self.alike else weight
        run.evaluations.say_refused(NOT_EVALUATED if samples is None else NOT_COUNTED, refused)
        if combine is not None:
            contents = [RecordDict(dict(own[client])) for client in numbers]
            if not isinstance(given := combine(contents, self.key) if contents else None, MetricRecord | None):
                raise RunFailed(f"{which}_metrics_aggr_fn must return a MetricRecord, but returned {given!r:.200}")
            return given, numbers
        for name in lists:
            run.evaluations.once(logging.INFO, LIST, name, which)
        means = dict[str, float]()
        for name in dict.fromkeys(name for metrics in numbers.values() for name in metrics):
            having = [client for client, metrics in numbers.items() if name in metrics]
            if self.alike:
                means[name] = median(numbers[client][name] for client in having)
            elif total := sum(weights[client] for client in having):
                means[name] = sum(weights[client] / total * numbers[client][name] for client in having)
        return (MetricRecord({**means}) if means else None), numbers

    def _read(self, records: Records, default: float | None, weighs: bool) -> tuple[dict[str, Any], float]:
        """Return one client's metrics and its weight, which without a ``default`` it must send."""
        metrics: dict[str, Any] = {}
        for record in records.values():
            metrics |= record
        weight, wanted = metrics.pop(self.key, default), whole() if self.key == EXAMPLES else a_number(0)
        if weighs and not wanted.fits(weight):
            raise WireError("metrics", self.key, f"expected {wanted.wanted}, but got {'nothing' if weight is None else excerpt(weight)}")
        if len(metrics) > MOST_NAMES:
            raise WireError("metrics", "", f"expected at most {MOST_NAMES} metrics, but got {len(metrics)}")
        for name, value in metrics.items():
            if len(name) > LONGEST_NAME or not visible(name) or not (isinstance(value, list) or FINITE.fits(value)):
                problem = f"expected {FINITE.wanted} by a name of up to {LONGEST_NAME} printable characters, but got {excerpt(value)}"
                raise WireError("metrics", name, problem)
        return metrics, float(weight or 0)


def numbers_of(metrics: MetricRecord | None) -> dict[str, float]:
    """Return a record's metrics that are single numbers, not lists."""
    return {name: float(value) for name, value in (metrics or {}).items() if isinstance(value, int | float)}


@dataclass(frozen=True)
class OwnApp:
    """Describe what a user's own app has beside fl-bn's application."""

    metrics: OwnMetrics
    population: Population
    config_key: str
