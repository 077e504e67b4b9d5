"""Report which data leave each client, as they arrive at the server, before any check or average.

The report counts every reply of a training round or of an exchange that only
measures statistics, all vectors of a layer-wise exchange, and the numbers of every
evaluation, even if unused. It does not count unreadable replies, Flower's headers,
and vectors of a round that ended before they were averaged.

A statistic of few samples reveals them. ``samples`` of a ``Disclosure`` is the
number of different samples behind a statistic. ``values`` is the number of
activations per channel.

The running statistics after one batch reveal those of the batch: ``(new - (1 - b)
old) / b`` with momentum b. The weights after one step reveal its gradient, since
the server knows the learning rate. Several batches or steps reveal only weighted
means.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import Message
from torch import nn

from fl_bn.exchange.session import Session
from fl_bn.federation.record import Disclosure, RoundRecord
from fl_bn.federation.schema import Locality
from fl_bn.federation.values import Reply, nbytes
from fl_bn.flower.compat import log
from fl_bn.flower.population import Client
from fl_bn.flower.wire.messaging import Decoded, decode
from fl_bn.methods import NORMALISERS, Phase, Refresh, StatisticsReport
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.support.wire import printable

FEW = 8
"""The log warns of a statistic of fewer samples than this.

Mean and variance of two samples give both; from three on, values are mixed.
Published tables have the same kind of rule, with smallest counts of 5 to 11. This
does not prove safety: the means of thousands of channels may show whether a known
sample is among far more than eight (Homer et al., Resolving Individuals
Contributing Trace Amounts of DNA to Highly Complex Mixtures, PLoS Genetics 2008).
"""
NAMED = 10  # the most clients that the warnings of a round name
MOST_SECTIONS = 20  # the most sections of a reply that the report lists one by one; the others are added up
SUMMARIES = ("statistics", "moments", "exchange")
EVALUATION = "evaluation"
LAYER_BY_LAYER = "moments of a pass without training, layer by layer"
EXCHANGED = "means and variances, or their gradients, of one batch, in FedTAN's exchange"
OTHERS = {
    "weights": "the model's weights",
    "gradients": "gradients",
    "control": "control variates",
    "momentum": "the optimiser's momentum",
    "second-moment": "the optimiser's second moments",
    "kept": "scale, shift and statistics that stay at home otherwise, for unseen clients",
}


Sizes = Mapping[str, tuple[int, int, int]]
"""A reply's tensors, bytes and smallest count of activations, by section."""
Describe = Callable[[Client, Decoded, Sizes], Iterable[Disclosure]]
"""Describes what a reply, whose payload is empty by now, revealed."""


class DisclosureReport:
    """Record the kinds of data that left each client in one run."""

    def __init__(self, model: nn.Module, locality: Locality, called: ClientNames = UNNAMED) -> None:
        self._method, self._warned, self._called = locality.method, set[int](), called
        self._came: list[tuple[int, Callable[[], Iterable[Disclosure]]]] = []  # round, and what describes it; -1: no warning
        self._last_counts = any(model.get_submodule(name).momentum == 1 for name in locality.shared_statistics)
        self._session: Session | None = None

    def note(
        self, replies: Iterable[Message], clients: Iterable[Client], session: Session, round: int, without_training: bool = False
    ) -> Iterator[Decoded]:
        """Decode replies to train or measure messages one by one, and record what they reveal.

        Vectors of a new layer-wise exchange ``session`` are recorded, too.
        ``round`` 0: before the first.
        """
        if session is not self._session:
            self._session = session
            what = LAYER_BY_LAYER if without_training else EXCHANGED
            vectors = [
                Disclosure(index, "exchange", what, traffic.exchanges, traffic.up, session.batches.get(index, 0))
                for index, traffic in sorted(session.traffic.items())
            ]
            self._came.append((-1, lambda: vectors))
        return self._heard(replies, clients, self._of_reply, round)

    def evaluations(self, replies: Iterable[Message], clients: Iterable[Client]) -> Iterator[Decoded]:
        """Decode replies to evaluate messages one by one, and record what they reveal."""
        return self._heard(replies, clients, _of_evaluation, -1)

    def _heard(self, replies: Iterable[Message], clients: Iterable[Client], describe: Describe, round: int) -> Iterator[Decoded]:
        by_node, heard = {client.node: client for client in clients}, list[tuple[Client, Decoded, Sizes]]()
        for message in replies:
            reply = decode(message)
            if (client := by_node.get(reply.node)) is not None:
                sizes = {section: (len(part), nbytes({section: part}), _least_count(part)) for section, part in reply.payload.items()}
                heard.append((client, replace(reply, payload={}), sizes))
            del message
            yield reply
            del reply  # frees its memory before the next one arrives
        heard.sort(key=lambda one: one[0].index)
        self._came.append((round, lambda: [disclosure for one in heard for disclosure in describe(*one)]))

    def masked(self, parts: Iterable[Reply], evaluates: bool = False) -> None:
        """Record the masked replies of a secure sum, whose sum alone can be read."""
        what = (
            "a masked evaluation: only the mean of all can be read"
            if evaluates
            else "a masked vector: only the sum of all can be read; counts beside it are in the clear"
        )
        sums = [Disclosure(part.client, "masked", what, 1, nbytes(part.sections)) for part in parts]
        self._came.append((-1, lambda: sums))

    def enter(self, record: RoundRecord) -> RoundRecord:
        """Return ``record`` with the disclosures since the last call, and warn of few samples."""
        came, self._came, new = self._came, [], list[Disclosure]()
        for round, describe in came:
            new += [disclosure for disclosure in describe() if disclosure.tensors or disclosure.nbytes]
            if round >= 0:
                self._warn(new, round)
        return replace(record, disclosures=[*record.disclosures, *new])

    def _warn(self, new: Iterable[Disclosure], round: int) -> None:
        """Warn of each client once in a run, and of at most ``NAMED`` in a round."""
        few = [d for d in new if 0 < d.samples < FEW and d.section != EVALUATION and d.client not in self._warned]
        first = {d.client: d for d in sorted(few, key=lambda d: (d.samples, d.section not in SUMMARIES), reverse=True)}
        self._warned |= first.keys()
        for disclosure in sorted(first.values(), key=lambda d: (d.samples, d.section not in SUMMARIES))[:NAMED]:
            log(logging.WARNING, "%s", warning(disclosure, round, self._called))
        if (others := len(first) - NAMED) > 0:
            what = f"{others} other clients, too, revealed summaries of fewer than {FEW} samples {when_of(round)}"
            log(logging.WARNING, "%s: the disclosure report names all of them", what)

    def _of_reply(self, client: Client, reply: Decoded, sizes: Sizes) -> Iterable[Disclosure]:
        header, metrics = reply.header, reply.metrics or {}
        if header is None or not sizes:
            return
        phase = Phase(header.phase)
        samples, steps = (_whole(metrics.get(name)) for name in ("samples", "steps"))
        for section, (tensors, size, values) in list(sizes.items())[:MOST_SECTIONS]:
            if section == "moments":
                what, behind = self._describe_moments(phase, header.round, client, metrics)
                yield Disclosure(client.index, section, what, tensors, size, min(behind, values) if values else behind, values)
            else:
                what, behind = self._describe_section(section, phase, samples, steps)
                yield Disclosure(client.index, printable(section), what, tensors, size, behind)
        if rest := list(sizes.values())[MOST_SECTIONS:]:
            tensors, size, _ = map(sum, zip(*rest, strict=True))
            yield Disclosure(client.index, "others", f"{len(rest)} sections that nobody asked for", tensors, size)
        for own in reply.own.values():
            yield Disclosure(client.index, "own metrics", f"numbers of your own: {_some(own)}", 0, 8 * len(own))
        if numbers := sorted(name for name, value in metrics.items() if isinstance(value, int | float)):
            yield Disclosure(client.index, "metrics", f"numbers: {_some(numbers)}", 0, 8 * len(numbers))

    def _describe_moments(self, phase: Phase, round: int, client: Client, metrics: Mapping[str, Any]) -> tuple[str, int]:
        """Describe the moments in a reply, and the number of samples behind them."""
        samples, steps, batch = (_whole(metrics.get(name)) for name in ("samples", "steps", "batch"))
        report = self._method.reports(phase)
        if report is StatisticsReport.FIRST:
            return "moments of the first batch", batch
        if report is StatisticsReport.BATCHES:
            return f"moments of {_batches(steps)}, pooled", samples
        if report is StatisticsReport.MOVING:
            return self._moving(f"moving averages over {_batches(steps)}", samples, steps)
        most = max(self._method.statistics_pass.samples, 0) or client.samples
        subset = min(_whole(metrics.get("measured")) or most, most, client.samples)
        if phase is not Phase.MEASURE:
            if self._method.statistics_pass.measured == NORMALISERS:
                return "moments that training normalises with, of a pass before it", subset
            return "moments of a pass before training", subset
        if round > 0 and self._method.refresh is Refresh.HYBRID:
            return "moments that training normalises with", subset
        return "moments of a pass without training", client.samples

    def _moving(self, words: str, samples: int, steps: int) -> tuple[str, int]:
        """Describe statistics that move with each batch: at momentum 1, only the last one's."""
        return (f"{words}, of which the last alone counts", math.ceil(samples / max(steps, 1))) if self._last_counts else (words, samples)

    def _describe_section(self, section: str, phase: Phase, samples: int, steps: int) -> tuple[str, int]:
        """Describe a reply's section, and the number of samples behind it."""
        batches = _batches(steps)
        if section == "statistics" and phase is Phase.EXCHANGE and steps == 1:
            return "running means and variances of the whole cohort's batch", 0
        if section == "statistics":
            words = f"running means and variances after {batches}"
            return (f"{words}, from which the batch's own can be computed", samples) if steps == 1 else self._moving(words, samples, steps)
        if section == "steps":
            return "the optimiser's step counts", 0
        name = OTHERS.get(section, f"section {printable(section)}")
        if steps == 1:
            return (name if section == "gradients" else f"{name} after 1 batch, from which its gradient can be computed"), samples
        return f"{name} after {batches}" if steps else name, 0


def _of_evaluation(client: Client, reply: Decoded, sizes: Sizes) -> Iterable[Disclosure]:
    """Yield the disclosure of one evaluation, with the fewest samples behind a metric."""
    metrics = {name: value for record in (*reply.own.values(), reply.metrics or {}) for name, value in record.items()}
    numbers = [name for name, value in metrics.items() if isinstance(value, float)]
    if numbers:
        series = sorted({f"{stem}*" if (stem := name.rstrip("0123456789")) != name else name for name in numbers})
        samples = _whole(metrics.get("fewest")) or _whole(metrics.get("samples")) or _whole(metrics.get("num-examples"))
        yield Disclosure(client.index, EVALUATION, f"numbers on test data: {_some(series)}", 0, 8 * len(numbers), samples)


def _some(names: Iterable[str]) -> str:
    known = list(names)
    return ", ".join(map(printable, known[:MOST_SECTIONS])) + (" ..." if len(known) > MOST_SECTIONS else "")


def warning(disclosure: Disclosure, round: int, called: ClientNames = UNNAMED) -> str:
    """Return a sentence that warns of a disclosure of few samples, and advises."""
    measured = disclosure.what == LAYER_BY_LAYER or (disclosure.section == "moments" and "batch" not in disclosure.what)
    advice = f"raise {'hbn-stat-samples' if measured else 'batch-size'}, or leave out clients with so few samples"
    summary = "statistics" if disclosure.section in SUMMARIES else "the gradient"
    few = f"{summary} of {disclosure.samples} sample{'s' * (disclosure.samples > 1)} {when_of(round)}"
    who = called.client(disclosure.client)
    return f"{who} revealed {few} ({disclosure.what}): values of so few samples can be traced to a person; {advice}"


def when_of(round: int) -> str:
    """Return ``in round N``, or ``before round 1`` for 0."""
    return f"in round {round}" if round else "before round 1"


def _batches(steps: int) -> str:
    return f"{steps} {'batch' if steps == 1 else 'batches'}"


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _least_count(arrays: Mapping[str, np.ndarray]) -> int:
    """Return the smallest count of activations per channel of the layers that ran, or 0."""
    counts = [array for name, array in arrays.items() if name.rpartition(".")[2] == "count"]
    activations = [int(count[0]) for count in counts if count.shape == (1,) and count.dtype == np.int64]
    return min((count for count in activations if count > 0), default=0)
