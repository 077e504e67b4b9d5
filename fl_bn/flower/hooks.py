"""Say what a user's hooks, configs and metrics may be, and what an app of the user's own has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from fl_bn.bn.derived import plain_names
from fl_bn.federation.fields import number as a_number
from fl_bn.federation.fields import whole
from fl_bn.federation.policy import constant_rate
from fl_bn.federation.record import RoundRecord
from fl_bn.federation.schema import Schema
from fl_bn.federation.shared_model import SharedModel
from fl_bn.federation.values import Instruction, Named, RoundReplies, to_numpy
from fl_bn.flower.compat import log
from fl_bn.flower.population import Client, Population, RunFailed
from fl_bn.flower.wire.codec import tensors_of
from fl_bn.support.client_names import ClientNames
from fl_bn.support.names import visible
from fl_bn.support.wire import WireError, excerpt, printable

if TYPE_CHECKING:
    from fl_bn.flower.grid_transport import GridTransport

RATES = ("lr", "learning_rate", "learning-rate")
"""The names by which a ``train_config`` may give the clients' learning rate, as in Flower's examples."""
REPLIES = ("aggregate_train", "aggregate_evaluate")  # hooks that get clients' replies, which a secure sum hides
Combine = Callable[[list[RecordDict], str], MetricRecord]
"""Flower's form of a function that combines metrics: ``combine(records, weighted_by_key)``."""
ByClient = dict[int, dict[str, float]]
Records = Mapping[str, MetricRecord]
EXAMPLES = "num-examples"
LONGEST_NAME, MOST_NAMES, FINITE = 100, 1000, a_number()  # of a user's own metrics
NOT_EVALUATED = "%s's evaluation is not counted: %s"
NOT_COUNTED = "%s's own training metrics are not counted: %s"
LIST = "metric %s is a list, and lists are not averaged: to combine it, give the strategy %s_metrics_aggr_fn=..."
CHANGED = "a hook changed the arrays in a way that clients would refuse (%s): return all arrays that it got, with their names and shapes"
Pair = tuple[ArrayRecord | None, MetricRecord | None]


def outside(strategy: Strategy) -> RunFailed:
    """Return the error for a hook of ``strategy`` that somebody else than its own ``start`` called."""
    advice = "put your steps into overridden hooks, evaluate_fn or callbacks (for noise: dp-noise, docs/privacy.md)"
    return RunFailed(f"only strategy.start(grid, ...) of {type(strategy).__name__} itself calls its hooks: {advice}")


def overrides(strategy: Strategy, hook: str) -> bool:
    """Return whether user code defines ``hook``: in a class outside fl-bn, or as an instance attribute."""
    owner = next(kind for kind in type(strategy).__mro__ if hook in vars(kind))
    return hook in vars(strategy) or not owner.__module__.startswith("fl_bn.flower.")


def check_secure(strategy: Strategy) -> None:
    """Raise ``ValueError`` if a hook for clients' replies is overridden, which a secure sum never calls."""
    if called := [hook for hook in REPLIES if overrides(strategy, hook)]:
        raise ValueError(f"{type(strategy).__name__} overrides {called[0]}, but secure aggregation hides all replies: remove the hook")


def wrong(hook: str, wanted: str, returned: Any) -> RunFailed:
    """Return the error for a ``hook`` that returned something else than what is ``wanted``."""
    return RunFailed(f"{hook} must return {wanted}, as super().{hook}(...) does, but returned {returned!r:.200}")


def asked(hook: str, returned: Sequence[Message], clients: Sequence[Client], called: ClientNames) -> list[Client]:
    """Return the ``clients`` to which a hook's messages go, one to each, or raise ``RunFailed``."""
    nodes = [message.metadata.dst_node_id for message in returned]
    chosen = set(nodes)
    if len(chosen) < len(nodes) or chosen - {client.node for client in clients}:
        known = ", ".join(str(client.node) for client in clients)
        raise wrong(hook, f"at most one message for each client of this round (on nodes {known})", f"messages for nodes {nodes}")
    if missing := [client.index for client in clients if client.node not in chosen]:
        log(logging.INFO, "%s leaves out %s", hook, called.clients(missing))
    return [client for client in clients if client.node in chosen]


def messages_of(hook: str, returned: Any) -> list[Message]:
    """Return the messages of a hook, perhaps a generator, as a list, or raise ``RunFailed`` for None."""
    if returned is None:
        raise wrong(hook, "messages", None)
    return list(returned)


def arrays_and_metrics(returned: Any) -> Pair:
    """Return what ``aggregate_train`` returned, or raise ``RunFailed`` for another thing than that pair."""
    match returned:
        case (ArrayRecord() | None as arrays, MetricRecord() | None as metrics):
            return arrays, metrics
    raise wrong("aggregate_train", "a pair, an ArrayRecord and a MetricRecord, or None for them", returned)


def same(arrays: ArrayRecord, before: Mapping[str, Array] | None) -> bool:
    """Return whether ``arrays`` has the very objects of ``before``: an array cannot be changed in place."""
    return before is not None and arrays.keys() == before.keys() and all(arrays[name] is array for name, array in before.items())


def shared_in(arrays: ArrayRecord, shared: SharedModel, expected: Schema) -> dict[str, Tensor]:
    """Return the shared tensors among arrays that a hook returned, by the names of the converted network.

    The arrays may have the names of the user's network, or of the converted one. A missing, foreign or
    invalid array raises ``RunFailed``.
    """
    own, given, plain = shared.tensors(), tensors_of(arrays), plain_names(shared.model)
    if strange := sorted(given.keys() - {*plain, *plain.values()}):
        raise RunFailed(CHANGED % f"unknown array {printable(strange[0])}")
    tensors = {name: given[key] for name in own for key in (name, plain[name]) if key in given}
    tensors = {k: t.to(own[k].dtype) if t.is_floating_point() and own[k].is_floating_point() else t for k, t in tensors.items()}
    try:
        expected.check({k: to_numpy({n: tensors[n] for n in specs if n in tensors}) for k, specs in expected.sections.items()})
    except WireError as error:
        raise RunFailed(CHANGED % error) from error
    return tensors


def is_number(value: Any) -> bool:
    """Return whether ``value`` is an int or a float, such as ``numpy.float64``, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_number(value: Any) -> float | None:
    """Return a number, or that of a text such as ``"0.1"``; None for anything else."""
    with suppress(ValueError):
        return float(value) if isinstance(value, str) or is_number(value) else None
    return None


def with_share(config: Mapping[str, Any], share: float) -> dict[str, Any]:
    """Return a config of the user's with each learning rate multiplied by ``share``."""
    values = dict(config)
    for name in RATES:
        if share != 1 and (rate := as_number(values.get(name))) is not None:
            values[name] = str(rate * share) if isinstance(values[name], str) else rate * share
    return values


class NamedRates:
    """Map rounds to the learning rates that train configs name, else to that of the last such round."""

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}

    def note(self, round: int, config: Mapping[str, Any]) -> bool:
        """Store the rate that the train config of ``round`` names, if any. Return whether it changes."""
        before, rates = self(round, round), [rate for name in RATES if (rate := as_number(config.get(name))) is not None]
        self._rates |= {round: rates[0]} if rates else {}
        return self(round, round) != before

    def __call__(self, round: int, rounds: int) -> float:
        """Return the rate of the last round up to ``round`` that has one; else of the first later one."""
        if not self._rates:
            return constant_rate(round, rounds)
        return self._rates[max((number for number in self._rates if number <= round), default=min(self._rates))]


@dataclass(frozen=True)
class OwnMetrics:
    """Combine the clients' own metrics by the user's functions, or by means over those that send one.

    Against Byzantine clients, it is the median. A client is left out, and the log names it, if its weight
    is missing, a number is not finite, or a name cannot be printed. Lists are not averaged.

    Attributes:
        key: the name of the metric that is a client's weight in the means.
        train_fn: combines training metrics, as Flower's ``train_metrics_aggr_fn``.
        evaluate_fn: combines evaluations, as Flower's ``evaluate_metrics_aggr_fn``.
        alike: whether there is a defence against Byzantine clients, so that all count alike.
    """

    key: str = EXAMPLES
    train_fn: Combine | None = None
    evaluate_fn: Combine | None = None
    alike: bool = False

    def combined(
        self, run: GridTransport, own: Mapping[int, Records], samples: Mapping[int, int] | None
    ) -> tuple[MetricRecord | None, ByClient]:
        """Combine the metric records of each client. Return the result, if any, and each client's metrics.

        In training, ``samples`` is the weight of a client that sends none. None: an evaluation.
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
                raise wrong(f"{which}_metrics_aggr_fn", "a MetricRecord", given)
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
        """Check one client's metric records, and return its metrics and its weight.

        ``default`` is the weight of a client that sends none; None: it must send one, if that matters
        (``weighs``).
        """
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
    """Return the metrics of a record that are single numbers, not lists, by name."""
    return {name: float(value) for name, value in (metrics or {}).items() if isinstance(value, int | float)}


@dataclass(frozen=True)
class OwnApp:
    """Describe what a Flower app of the user's own has beside fl-bn's application."""

    metrics: OwnMetrics
    population: Population
    config_key: str


@dataclass
class Round:
    """Hold one training round: its instruction, what the hooks got and returned, and the replies."""

    before: Named
    instruction: Instruction
    given: Mapping[str, Any]
    replies: RoundReplies
    combined: Mapping[str, Any] | None = None
    returned: tuple[ArrayRecord | None, MetricRecord | None] = None, None


@dataclass(repr=False)
class RunResult(Result):
    """Hold Flower's result of a run, and every round's record.

    Attributes:
        records: in the order of the rounds. The last one has each client's own metrics and evaluation.
    """

    records: list[RoundRecord] = field(default_factory=list)
