"""Report which data left each client in a run, as disclosure.csv and as a table in summary.md."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl_bn.federation.record import Disclosure, RoundRecord, size
from fl_bn.flower.disclosure import EVALUATION, FEW, warning
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.support.durable import as_csv

FILE = "disclosure.csv"
COLUMNS = (
    "client", "section", "what", "tensors", "messages", "rounds", "bytes", "smallest-samples", "smallest-values", "smallest-round",
    "warning",
)  # fmt: skip
SHOWN = 10  # the most warnings in summary.md
BATCHES = re.compile(r"(?<=after )\d+(?= batches)")  # in the description of a disclosure


@dataclass
class Kind:
    """Hold the totals of one kind of *disclosure*: content, such as weights, that one client sent.

    Attributes:
        tensors: The largest number of tensors in one message.
        messages: The number of messages.
        rounds: The number of rounds with such a message.
        nbytes: The bytes of all messages.
        least: The disclosure whose statistics summarise the fewest samples, if any,
            in ``least_round``.
        last_round: The last round with such a message.
    """

    tensors: int = 0
    messages: int = 0
    rounds: int = 0
    nbytes: int = 0
    least: Disclosure | None = None
    least_round: int = 0
    last_round: int = -1

    @property
    def fewest(self) -> float:
        """Return the fewest samples behind a statistic; infinite: there is none."""
        return math.inf if self.least is None else self.least.samples

    @property
    def traceable(self) -> bool:
        """Return whether a statistic summarises fewer than ``FEW`` samples, perhaps a person's."""
        return self.fewest < FEW


class DisclosureTotals:
    """Add up the disclosures of a run, by client, section of the message and description.

    Memory grows with the number of clients, not of rounds.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, str, str], Kind] = {}

    def add(self, record: RoundRecord) -> None:
        """Add the disclosures of a round, in round 1 also those of ``calibrate`` before it."""
        for one in record.disclosures:
            key = one.client, one.section, one.what
            kind = self._kinds.setdefault(key, Kind())
            kind.tensors = max(kind.tensors, one.tensors)
            kind.messages += 1
            kind.rounds += kind.last_round != record.round
            kind.last_round = record.round
            kind.nbytes += one.nbytes
            if one.samples and (kind.least is None or one.samples < kind.least.samples):
                kind.least, kind.least_round = one, record.round

    def kinds(self, label_counts: Mapping[int, Sequence[int]]) -> dict[tuple[int, str, str], Kind]:
        """Return what each client disclosed: (client, section, description) -> totals, sorted.

        ``label_counts`` has the samples per class of the clients that sent them in
        their introduction.
        """
        sizes = {client: len(json.dumps(list(counts))) for client, counts in label_counts.items() if counts}
        introductions = {(client, "introduction", "samples per class"): Kind(1, 1, 1, nbytes) for client, nbytes in sizes.items()}
        return dict(sorted({**self._kinds, **introductions}.items()))


def disclosure_csv(found: Mapping[tuple[int, str, str], Kind], called: ClientNames = UNNAMED) -> str:
    """Return the totals as CSV, with a column ``site`` if the clients have names."""
    rows: list[list[object]] = [[COLUMNS[0], *(["site"] if called.names else []), *COLUMNS[1:]]]
    for (client, section, what), kind in found.items():
        least = (kind.least.samples, kind.least.values or "", kind.least_round) if kind.least else ("", "", "")
        remark = f"fewer than {FEW} samples" if kind.traceable else ""
        site = [called.site(client)] if called.names else []
        rows.append([client, *site, section, what, kind.tensors, kind.messages, kind.rounds, kind.nbytes, *least, remark])
    return as_csv(rows)


def disclosure_table(found: Mapping[tuple[int, str, str], Kind], called: ClientNames = UNNAMED) -> list[str]:
    """Return lines of Markdown: a table with one row per kind, over all clients, and warnings.

    Kinds that differ only in their number of batches share a row. A warning names a
    client and its traceable statistic, once per client and at most ``SHOWN`` times.
    Evaluations cause no warnings.
    """
    if not found:
        return []
    lines = [
        "## What left each client",
        "",
        "| section | what | clients | tensors | bytes per client, at most | rounds, at most | fewest samples behind a statistic |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], dict[int, list[Kind]]] = {}
    batches: dict[tuple[str, str], set[int]] = {}
    for (client, section, what), kind in found.items():
        group = section, BATCHES.sub("N", what)
        groups.setdefault(group, {}).setdefault(client, []).append(kind)
        batches.setdefault(group, set()).update(map(int, BATCHES.findall(what)))
    for (section, alike), by_client in groups.items():
        spanned = " to ".join(map(str, sorted({min(of), max(of)}))) if (of := batches[section, alike]) else ""
        what = alike.replace("after N batches", f"after {spanned} batches")
        every = [kind for kinds in by_client.values() for kind in kinds]
        nbytes = max(sum(kind.nbytes for kind in kinds) for kinds in by_client.values())
        rounds = max(sum(kind.rounds for kind in kinds) for kinds in by_client.values())
        least = min(((k.least.samples, k.least.client, k.least_round) for k in every if k.least), default=None)
        fewest = "" if least is None else f"{least[0]} ({called.client(least[1])}, round {least[2]})"
        cells = (section, what, len(by_client), max(k.tensors for k in every), size(nbytes), rounds, fewest)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    worst: dict[int, Kind] = {}
    for (client, section, _), kind in found.items():
        before = worst.get(client)
        if section != EVALUATION and kind.traceable and (before is None or kind.fewest < before.fewest):
            worst[client] = kind
    lines += ["", *(f"- **warning**: {warning(k.least, k.least_round, called)}" for k in list(worst.values())[:SHOWN] if k.least)]
    if len(worst) > SHOWN:
        lines.append(f"- and {len(worst) - SHOWN} more clients: see {FILE}")
    return [*lines, ""] if worst else lines
