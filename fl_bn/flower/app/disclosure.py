"""Report what leaves each client, counted as it arrives at the server, before any check or average.

These count, used or not: every reply of a training round or a statistics-only exchange, all vectors of a
layer-wise exchange, and the numbers of every evaluation. These do not: a reply that cannot be read or names no
phase, an exchanged vector whose round ended before its average was made, and Flower's framing.

A statistic summarises samples, and a statistic of few samples gives these away. ``samples`` of a ``Disclosure``
is the number of different samples behind it: a mean and a variance per channel hide a person among so many.
``values`` are activations per channel. There are more of them where an image has many pixels, but they are of
the same persons.

The running statistics of one batch summarise that batch, since its own can be computed from them: ``(new - (1 -
b) old) / b`` with momentum b. The running statistics of several batches yield only a weighted mix. Weights
after one step yield that batch's gradient, since the server knows the learning rate. Weights after several
steps yield no single batch's gradient.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import Message
from torch import nn

from fl_bn.exchange.session import Session
from fl_bn.federation.payload import nbytes
from fl_bn.federation.record import Disclosure, RoundRecord
from fl_bn.federation.values import Reply
from fl_bn.flower.log import log
from fl_bn.flower.population import Client
from fl_bn.flower.wire.replies import Decoded, decode
from fl_bn.methods import NORMALISERS, Method, Phase, Refresh, StatisticsReport
from fl_bn.methods.fedtan import CohortBatchNorm
from fl_bn.roles import batch_norms
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.support.wire import printable

FEW = 8
"""The log warns of a statistic of fewer samples than this.

One sample's mean is the sample. Two samples' mean and variance give both. From three on, values are mixed channel by channel. The rule is
that of small cells in published tables, whose least counts are 5 to 11 from one statistical office to another. It is no proof of safety:
the means of thousands of channels may show whether a known sample is among far more than eight (Homer et al., Resolving Individuals
Contributing Trace Amounts of DNA to Highly Complex Mixtures, PLoS Genetics 2008).
"""
NAMED = 10  # clients that a round's warnings name
DRIFT = ("drift", "drift-layer", "growth", "min-var")  # told where share-drift is on; min-var is an element of a local statistic
MOST_SECTIONS = 20  # of one reply, in the report: the others are counted together
SUMMARIES = ("statistics", "moments", "exchange")
EVALUATION = "evaluation"
LAYER_BY_LAYER = "moments of a pass without training, layer by layer"
OTHERS = {
    "weights": "the model's weights",
    "gradients": "gradients",
    "control": "control variates",
    "momentum": "the optimiser's momentum",
    "second-moment": "the optimiser's second moments",
    "kept": "scale, shift and statistics that stay at home otherwise, for unseen clients",
}


class DisclosureReport:
    """Record the disclosures of one run.

    ``note``, ``evaluations`` and ``masked`` record them. ``enter`` puts all that are new into a round's record.

    Args:
        model: the converted network.
        method: the method.
        called: the clients' names in the log.
    """

    def __init__(self, model: nn.Module, method: Method, called: ClientNames = UNNAMED) -> None:
        self._method, self._new, self._warned, self._called = method, list[Disclosure](), set[int](), called
        self._last_counts = any(getattr(layer, "momentum", None) == 1 for layer in batch_norms(model).values())
        gradients = any(module.share_gradients for module in model.modules() if isinstance(module, CohortBatchNorm))
        self._exchanged = f"means and variances{' and their gradients' if gradients else ''} of one batch, in FedTAN's exchange"
        self._session: Session | None = None

    def note(
        self, replies: Iterable[Message], clients: Iterable[Client], session: Session, round: int, without_training: bool = False
    ) -> Iterator[Decoded]:
        """Decode the ``replies`` one by one, and record their disclosures once all have passed.

        Args:
            replies: the replies to train messages, or those of a statistics-only exchange.
            clients: all clients that may have replied.
            session: the last layer-wise exchange, if any.
            round: the round's number, for the log.
            without_training: whether that exchange was of statistics alone.
        """
        if session is not self._session:
            self._session = session
            behind, what = (session.samples, LAYER_BY_LAYER) if without_training else (session.batches, self._exchanged)
            for index, traffic in sorted(session.traffic.items()):
                self._add([Disclosure(index, "exchange", what, traffic.exchanges, traffic.up, behind.get(index, 0))])
        by_node = {client.node: client for client in clients}
        disclosures: list[Disclosure] = []
        for message in replies:
            reply = decode(message)
            if (client := by_node.get(reply.node)) is not None:
                disclosures += self._of_reply(reply, client)
            del message
            yield reply
            del reply  # while the next one is waited for
        for disclosure in sorted(disclosures, key=lambda d: d.client):
            self._add([disclosure])
        few = [d for d in self._new if 0 < d.samples < FEW and d.section != EVALUATION]  # accuracies are in the report alone
        self._warn([d for d in few if d.client not in self._warned], round)

    def _warn(self, disclosures: Sequence[Disclosure], round: int) -> None:
        """Warn of each client once in a run, and name at most ``NAMED`` in a round: a population may have thousands."""
        first: dict[int, Disclosure] = {}
        for disclosure in sorted(disclosures, key=lambda d: (d.samples, d.section not in SUMMARIES)):
            first.setdefault(disclosure.client, disclosure)
        self._warned |= first.keys()
        for disclosure in list(first.values())[:NAMED]:
            log(logging.WARNING, "%s", warning(disclosure, round, self._called))
        if (others := len(first) - NAMED) > 0:
            what = f"summaries of fewer than {FEW} samples left {others} other clients, too, {when_of(round)}"
            log(logging.WARNING, "%s: the disclosure report names all of them", what)

    def evaluations(self, replies: Iterable[Message], clients: Iterable[Client]) -> Iterator[Decoded]:
        """Decode the ``replies`` to evaluate messages one by one, and record their disclosures once all have passed."""
        by_node = {client.node: client.index for client in clients}
        disclosures: list[Disclosure] = []
        for reply in map(decode, replies):
            if (index := by_node.get(reply.node)) is not None:
                disclosures += _of_evaluation(reply, index)
            yield reply
        self._add(sorted(disclosures, key=lambda d: d.client))

    def masked(self, parts: Iterable[Reply], evaluates: bool = False) -> None:
        """Record the masked replies of a secure sum, of which nobody can read a single one.

        Args:
            parts: the clients' replies.
            evaluates: whether they are evaluations.
        """
        what = "a masked evaluation: the mean of all can be read" if evaluates else "a masked vector: of all of them the sum can be read"
        for part in parts:
            self._add([Disclosure(part.client, "masked", what, 1, nbytes(part.sections))])

    def enter(self, record: RoundRecord) -> RoundRecord:
        """Return ``record`` with all disclosures since the last call."""
        new, self._new = self._new, []
        return replace(record, disclosures=[*record.disclosures, *new])

    def _add(self, disclosures: Iterable[Disclosure]) -> None:
        self._new += [d for d in disclosures if d.tensors or d.nbytes]

    def _of_reply(self, reply: Decoded, client: Client) -> Iterable[Disclosure]:
        if (header := reply.header) is None:
            return
        phase, metrics, sections = Phase(header.phase), reply.metrics or {}, reply.payload
        samples, steps = (_whole(metrics.get(name)) for name in ("samples", "steps"))
        for section, arrays in list(sections.items())[:MOST_SECTIONS]:
            values = _least_count(arrays) if section == "moments" else 0
            if section == "moments":
                what, behind = self._describe_moments(phase, header.round, client, metrics)
            else:
                what, behind = self._describe_section(section, phase, samples, steps)
            behind = min(behind, values) if values else behind
            yield Disclosure(client.index, printable(section), what, *_size(reply, [section]), behind, values)
        if len(sections) > MOST_SECTIONS:
            rest = list(sections)[MOST_SECTIONS:]
            yield Disclosure(client.index, "others", f"{len(rest)} sections that nobody asked for", *_size(reply, rest))
        drifts = [name for name in DRIFT if name in metrics]
        if drifts:
            yield Disclosure(client.index, "drift", f"of statistics that stay at home: {', '.join(drifts)}", 0, 8 * len(drifts))
        numbers = sorted(name for name, value in metrics.items() if isinstance(value, int | float) and name not in DRIFT)
        for own in reply.own.values() if sections else ():
            names = ", ".join(map(printable, list(own)[:MOST_SECTIONS])) + (" ..." if len(own) > MOST_SECTIONS else "")
            yield Disclosure(client.index, "own metrics", f"numbers of your own: {names}", 0, 8 * len(own))
        if numbers and sections:
            names = ", ".join(map(printable, numbers[:MOST_SECTIONS])) + (" ..." if len(numbers) > MOST_SECTIONS else "")
            yield Disclosure(client.index, "metrics", f"numbers: {names}", 0, 8 * len(numbers))

    def _describe_moments(self, phase: Phase, round: int, client: Client, metrics: Mapping[str, Any]) -> tuple[str, int]:
        """Return what the moments in a reply of ``round`` are, in words, and the number of samples behind them."""
        samples, steps, batch = (_whole(metrics.get(name)) for name in ("samples", "steps", "batch"))
        report = self._method.reports(phase)
        if report is StatisticsReport.FIRST:
            return "moments of the first batch", batch
        if report is StatisticsReport.BATCHES:
            return f"moments of {_batches(steps)}, pooled", samples
        if report is StatisticsReport.MOVING:
            words = f"moving averages over {_batches(steps)}"
            if not self._last_counts:
                return words, samples
            return f"{words}, of which the last alone counts", math.ceil(samples / max(steps, 1))
        subset = min(self._method.statistics_pass.samples or client.samples, client.samples)
        if phase is not Phase.MEASURE:
            normalisers = self._method.statistics_pass.measured == NORMALISERS
            return (
                "moments that training normalises with, of a pass before it" if normalisers else "moments of a pass before training",
                subset,
            )
        if round > 0 and self._method.refresh is Refresh.HYBRID:
            return "moments that training normalises with", subset
        return "moments of a pass without training", client.samples

    def _describe_section(self, section: str, phase: Phase, samples: int, steps: int) -> tuple[str, int]:
        """Return what a section is, in words, and the number of samples behind one of its statistics; 0 if it is none."""
        batches = _batches(steps)
        if section == "statistics" and phase is Phase.EXCHANGE and steps == 1:
            return "running means and variances of the whole cohort's batch", 0
        if section == "statistics":
            words = f"running means and variances after {batches}"
            if steps == 1:
                return f"{words}, whose own can be computed back", samples
            if not self._last_counts:
                return words, samples
            return f"{words}, of which the last alone counts", math.ceil(samples / max(steps, 1))
        if section == "steps":
            return "the optimiser's step counts", 0
        name = OTHERS.get(section, f"section {printable(section)}")
        if steps == 1:
            return (name if section == "gradients" else f"{name} after 1 batch, whose gradient can be computed back"), samples
        return f"{name} after {batches}" if steps else name, 0


def _of_evaluation(reply: Decoded, client: int) -> Iterable[Disclosure]:
    """Yield the numbers of one evaluation, with the fewest samples behind one of them as far as the client says."""
    metrics = {name: value for record in (*reply.own.values(), reply.metrics or {}) for name, value in record.items()}
    numbers = [name for name, value in metrics.items() if isinstance(value, float)]
    if numbers:
        series = sorted({f"{stem}*" if (stem := name.rstrip("0123456789")) != name else name for name in numbers})
        names = ", ".join(map(printable, series[:MOST_SECTIONS])) + (" ..." if len(series) > MOST_SECTIONS else "")
        samples = _whole(metrics.get("fewest")) or _whole(metrics.get("samples")) or _whole(metrics.get("num-examples"))
        yield Disclosure(client, EVALUATION, f"numbers on test data: {names}", 0, 8 * len(numbers), samples)


def warning(disclosure: Disclosure, round: int, called: ClientNames = UNNAMED) -> str:
    """Return a warning of one ``disclosure``: a sentence that ends with advice.

    Args:
        disclosure: of few samples.
        round: the round's number; 0: before the first.
        called: the clients' names.
    """
    if disclosure.what == LAYER_BY_LAYER or (disclosure.section == "moments" and "batch" not in disclosure.what):
        advice = "raise hbn-stat-samples, or leave out clients with so few samples"
    else:
        advice = "raise batch-size, or leave out clients with so few samples"
    summary = "statistics" if disclosure.section in SUMMARIES else "the gradient"
    when = when_of(round)
    few = f"{summary} of {disclosure.samples} sample{'s' * (disclosure.samples > 1)}"
    who = called.client(disclosure.client)
    return f"{who}: {few} left it {when} ({disclosure.what}): values so few can be traced to a person; {advice}"


def when_of(round: int) -> str:
    """Return the time of ``round`` in words."""
    return f"in round {round}" if round else "before round 1"


def _batches(steps: int) -> str:
    return f"{steps} {'batch' if steps == 1 else 'batches'}"


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _size(reply: Decoded, sections: Iterable[str]) -> tuple[int, int]:
    """Return the number of arrays in these sections, and their bytes without NumPy's heads.

    An array that cannot be read counts with all its bytes.
    """
    read = [array.nbytes for section in sections for array in reply.payload[section].values()]
    others = [size for section in sections for size in reply.unreadable.get(section, {}).values()]
    return len(read) + len(others), sum(read) + sum(others)


def _least_count(arrays: Mapping[str, np.ndarray]) -> int:
    """Return the fewest activations per channel of a layer that ran; 0 if unknown."""
    counts = [array for name, array in arrays.items() if name.rpartition(".")[2] == "count"]
    activations = [int(count[0]) for count in counts if count.shape == (1,) and count.dtype == np.int64]
    return min((count for count in activations if count > 0), default=0)
