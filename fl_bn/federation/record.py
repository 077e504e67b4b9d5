"""Record the facts of one round, and summarise clients' metrics, for all outputs.

By them the log recognises diverging training, and its cause.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from fl_bn.exchange.session import Traffic
from fl_bn.federation.aggregation import Drift
from fl_bn.federation.schema import DIVERGED
from fl_bn.federation.values import count_tensors, section_bytes
from fl_bn.methods import Phase
from fl_bn.options import LARGEST
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.task import Task, weighted_mean

if TYPE_CHECKING:
    from fl_bn.federation.values import Reply, RoundReplies

LOGGER = logging.getLogger("flwr")
RUNAWAY_LOSS = 10.0
"""Training diverged if its loss is above this multiple of round 1's, or of 1 if larger."""
FAR = 3.0
"""A client is far from the robust update if its distance is above this multiple of the median one."""
NOT_FINITE = "values are not finite"
LOWER = "lower the learning rate"
SHOWN = 4  # the most metrics of the user's own that a log line shows, of training and of evaluation each


@dataclass(frozen=True, slots=True)  # slots: a run keeps the records of all rounds
class ClientRecord:
    """Record a client's part in a round. Bytes are those of arrays alone.

    Attributes:
        samples: Its reply's (``Reply.samples``); 0 if not used.
        exchanges: The number of its layer-wise exchanges (FedTAN).
        waited: Seconds in exchanges, including the time to send.
        distance: The distance (L2) of its update to a robust rule's result; NaN
            without.
        refused: The reason why its reply was not used, if so.
    """

    client: int
    samples: int = 0
    steps: int = 0
    loss: float = float("nan")
    bytes_down: int = 0
    bytes_up: int = 0
    exchanges: int = 0
    waited: float = 0.0
    distance: float = float("nan")
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Disclosure:
    """Record a section that left a client, or a round's messages of FedTAN's exchange.

    Attributes:
        what: The content in words.
        samples: The different samples behind each statistic; 0 without statistics.
        values: The fewest activations per channel behind a statistic; 0 if unknown.
    """

    client: int
    section: str
    what: str
    tensors: int
    nbytes: int
    samples: int = 0
    values: int = 0


@dataclass(frozen=True)
class RoundRecord:
    """Record one training round.

    Attributes:
        round: The round, from 1; 0 before the first.
        phase: The name of the round's phase.
        learning_rate: The clients' learning rate.
        clients: The cohort's records, in client order.
        drift: How far the shared statistics moved, if known.
        tensors_down: The number of tensors that a client received.
        tensors_up: The number of tensors that a client sent.
        bytes_down: Section -> bytes of arrays that a client received.
        bytes_up: Section -> bytes of arrays that a client sent.
        exchanges: The number of layer-wise exchanges.
        carrier: Their transport, if any, see ``exchange.settings``.
        aggregated: Whether the round changed the model.
        seconds: The duration of the round.
        evaluation: Metrics by name. A callback's ``on_evaluation`` may add others.
        client_evaluation: Client -> its own metrics by name.
        own_metrics: Name -> mean of the training metrics of your own Flower app or
            loop.
        client_metrics: Client -> its own training metrics by name.
        disclosures: The contents that left the clients, also in statistics-only
            exchanges.
    """

    round: int
    phase: str
    learning_rate: float
    clients: Sequence[ClientRecord] = field(default_factory=list)
    drift: Drift | None = None
    tensors_down: int = 0
    tensors_up: int = 0
    bytes_down: Mapping[str, int] = field(default_factory=dict)
    bytes_up: Mapping[str, int] = field(default_factory=dict)
    exchanges: int = 0
    carrier: str = ""
    aggregated: bool = False
    seconds: float = 0.0
    evaluation: dict[str, float] = field(default_factory=dict)
    client_evaluation: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    disclosures: Sequence[Disclosure] = field(default_factory=list)
    own_metrics: Mapping[str, float] = field(default_factory=dict)
    client_metrics: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    @property
    def accepted(self) -> list[ClientRecord]:
        """Return the records of clients whose reply was used."""
        return [c for c in self.clients if not c.refused]

    @property
    def far(self) -> list[int]:
        """Return clients farther than ``FAR`` times the median from the robust update."""
        known = [c for c in self.accepted if not math.isnan(c.distance)]
        limit = FAR * median([c.distance for c in known]) if known else 0.0
        return [c.client for c in known if c.distance > limit]

    @property
    def loss(self) -> float:
        """Return the mean training loss, weighted by samples; NaN if no reply was used.

        Under a robust rule, it is the clients' median: a false loss moves it
        little.
        """
        if any(not math.isnan(c.distance) for c in self.accepted):
            return median([c.loss for c in self.accepted if math.isfinite(c.loss)] or [math.nan])
        total = sum(c.samples for c in self.accepted)
        return sum(c.samples * c.loss for c in self.accepted) / total if total else float("nan")


def with_clients(
    record: RoundRecord,
    replies: RoundReplies,
    parts: Sequence[Reply],
    refused: Mapping[int, str],
    called: ClientNames = UNNAMED,
    distances: Sequence[float] = (),
    warning: str = "round {round}: {client}'s reply is not used: {reason}",
) -> RoundRecord:
    """Return ``record`` with the cohort's records and bytes. Warn of each refused reply.

    ``parts`` are the used replies, at ``distances`` from the robust update.
    ``warning`` has the fields ``round``, ``client``, ``reason``.
    """
    exchange, down = replies.exchange, record.bytes_down
    traffic = {} if exchange is None else exchange.traffic
    if exchange is not None:
        down = {section: count * replies.messages for section, count in down.items()}
    usable, known = {part.client: part for part in parts}, dict(zip((part.client for part in parts), distances, strict=False))
    clients, up, tensors_up = [], dict[str, int](), 0
    for client in replies.cohort:
        layers = traffic.get(client, Traffic())
        sent = sum(down.values()) + layers.down
        if (part := usable.get(client)) is None:
            LOGGER.warning("%s", warning.format(round=record.round, client=called.client(client), reason=refused[client]))
            clients.append(ClientRecord(client, bytes_down=sent, exchanges=layers.exchanges, refused=refused[client]))
            continue
        up, tensors_up = section_bytes(part.sections), count_tensors(part.sections)
        back, waited = sum(up.values()) + layers.up, part.metrics.get("waited", 0.0)
        distance = known.get(client, math.nan)
        clients.append(ClientRecord(client, part.samples, part.steps, part.loss, sent, back, layers.exchanges, waited, distance))
    if traffic:
        down = {**down, "exchange": max(t.down for t in traffic.values())}
        up = {**up, "exchange": max(t.up for t in traffic.values())}
    return replace(
        record,
        clients=clients,
        bytes_down=down,
        bytes_up=up,
        tensors_up=tensors_up,
        exchanges=0 if exchange is None else exchange.exchanges,
        carrier="" if exchange is None else replies.carrier,
    )


def batches_trained(records: Iterable[RoundRecord]) -> int:
    """Count an average client's training batches, in rounds that changed the model.

    Each round's mean is rounded, to at least 1.
    """
    steps = [[client.steps for client in record.accepted] for record in records if record.aggregated and record.phase != "measure"]
    return sum(max(1, round(sum(own) / len(own))) for own in steps if own)


def why_failed(record: RoundRecord) -> str:
    """Return why a failed round's first refused reply was not used, with advice."""
    first = next((client for client in record.clients if client.refused), None)
    if first is None:
        return "The log above says why"
    advice = ""
    if NOT_FINITE in first.refused and not first.refused.startswith("error:"):
        advice = f". Its data have NaN or Inf, or training diverged: clean the data, or {LOWER}"
    elif DIVERGED in first.refused and not first.refused.startswith("error:"):  # numbers are finite, but huge
        advice = f": {LOWER}"
    return f"The first reason: client {first.client}: {first.refused}{advice}"


def first_loss(records: Iterable[RoundRecord]) -> float:
    """Return the first known training loss of a run's ``records``; NaN: there is none."""
    return next((record.loss for record in records if not math.isnan(record.loss)), math.nan)


def watch(record: RoundRecord, first_loss: float = math.nan, last: bool = False, failed: int = 0) -> Iterator[str]:
    """Yield warnings if a round's training loss shows divergence, or if a run ends so.

    It is then not finite, or far above ``first_loss``, that of round 1 (NaN:
    unknown). ``failed`` counts failed rounds in a row.
    """
    if record.phase == Phase.MEASURE.value:
        return
    if last and failed:
        rounds = "the last round" if failed == 1 else f"the last {failed} rounds"
        yield f"the run ends, and {rounds} did not change the model. {why_failed(record)}"
    far = ", ".join(f"client {c.client} says a loss of {c.loss:.4g}" for c in record.accepted if abs(c.loss) > LARGEST)
    known = record.round == 1 or not math.isnan(first_loss)  # a loss that nobody tells is said once
    diverged = not math.isfinite(record.loss) and known or record.loss > RUNAWAY_LOSS * max(first_loss, 1.0)
    if record.aggregated and diverged and "masked" not in record.bytes_up:  # with masks nothing is known of a client that diverges
        without = next((f"client {client.client} told none" for client in record.accepted if math.isnan(client.loss)), "")
        untold = without and f"{without} ('loss' in fit's metrics, round.reply(samples, loss)), or "
        ends = "the run ends with a model that diverged: do not use it. " if last and not untold else ""
        before = f", and was {first_loss:.4g} in the first round" if math.isfinite(record.loss) else ""
        whose = f" ({far})" if far else ""
        yield f"{ends}round {record.round}: the training loss is {record.loss:.4g}{before}{whose}: {untold}training diverged; {LOWER}"
    elif far:
        yield f"round {record.round}: {far}: training diverged there, or the number is false"


def in_words(record: RoundRecord, rounds: int, task: Task, called: ClientNames = UNNAMED) -> str:
    """Return a round's log line: ``[round 3/20] 3/3 clients  loss 2.2450  accuracy 15.8%  1.2 s``.

    A loss that no client told is left out.
    """
    evaluation, metric, worst = record.evaluation, task.metric, f"{task.metric}-{task.worst()}"
    measures, clients = record.phase == Phase.MEASURE.value, f"{len(record.accepted)}/{len(record.clients)} clients"
    before = "the statistics before any pass" if measures and not record.clients else clients
    parts = [f"[pass {record.round}] {before}" if measures else f"[round {record.round}/{rounds}] {clients}"]
    if not measures and not (record.aggregated and math.isnan(record.loss)):  # NaN: by secure aggregation, or by a loop of the user's
        parts.append(f"loss {record.loss:.4f}")
    parts += [f"{metric} {task.format_metric(evaluation[metric])}"] if metric in evaluation else []
    trained = [(name, value) for name, value in record.own_metrics.items() if name != "loss"][:SHOWN]
    tested = [] if metric in evaluation else list(evaluation.items())[:SHOWN]
    others = {"loss", *(name for name, _ in trained)}  # names of numbers of training
    parts += [f"{name} {value:.4g}" for name, value in trained]
    parts += [f"{'test-' if name in others else ''}{name} {value:.4g}" for name, value in tested]
    parts += [f"{task.worst()} {task.format_metric(evaluation[worst])}"] if worst in evaluation else []
    parts += ["nothing changed"] if record.clients and not record.aggregated else []
    parts += [f"far from the others: {called.clients(record.far)}"] if record.far else []
    return "  ".join([*parts, f"{record.seconds:.1f} s"])


def size(nbytes: float) -> str:
    """Format a number of bytes in B, kB (1024 B) or MB (1024 kB)."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    return f"{nbytes / 1024:.1f} kB" if nbytes < 1024**2 else f"{nbytes / 1024**2:.2f} MB"


def series(metrics: Mapping[str, float], stem: str) -> list[float]:
    """Return the metrics ``stem`` + "0", "1", ..., up to the first missing name."""
    names = (f"{stem}{index}" for index in count())
    return [metrics[name] for name in takewhile(metrics.__contains__, names)]


def named_series(stem: str, values: Sequence[float]) -> dict[str, float]:
    """Return ``stem`` + "0", "1", ... -> value: the inverse of ``series``."""
    return {f"{stem}{index}": value for index, value in enumerate(values)}


def fits(task: Task, name: str, value: float) -> bool:
    """Tell whether ``value`` is finite and in the range of the task's metric ``name``."""
    low, high = task.declared()[name]
    return math.isfinite(value) and low <= value <= high


def over_clients(task: Task, measured: Sequence[Mapping[str, float]], robust: bool = False) -> dict[str, float]:
    """Summarise the metrics of several clients, each client counted once.

    Of the task's own metric: mean, standard deviation and worst value
    (``accuracy``, ``accuracy-std``, ``accuracy-min``). Of ``loss``: mean, or median
    if ``robust``, since it has no range. Of others: the mean of the values in the
    metric's range; NaN without any.
    """
    own = np.array([metrics[task.metric] for metrics in measured])
    worst = own.min() if task.higher_is_better else own.max()
    spread = {task.metric: own.mean(), f"{task.metric}-std": own.std(), f"{task.metric}-{task.worst()}": worst}
    losses = [metrics["loss"] for metrics in measured]
    summary = {name: float(value) for name, value in spread.items()} | {"loss": float(np.median(losses) if robust else np.mean(losses))}
    for stem in task.declared():
        if stem != task.metric:
            for name in _names(stem, measured):
                values = [metrics[name] for metrics in measured if name in metrics and fits(task, stem, metrics[name])]
                summary[name] = sum(values) / len(values) if values else math.nan
    return summary


def over_samples(measured: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Return each metric's mean over the clients that have it, weighted by test samples."""
    names = dict.fromkeys(name for _, metrics in measured for name in metrics)
    known = {name: [(count, metrics[name]) for count, metrics in measured if name in metrics] for name in names}
    return {name: weighted_mean(of) for name, of in known.items()}


def _names(stem: str, measured: Sequence[Mapping[str, float]]) -> list[str]:
    names = (f"{stem}{index}" for index in count()) if stem.endswith("-") else iter([stem])
    return list(takewhile(lambda name: any(name in metrics for metrics in measured), names))
