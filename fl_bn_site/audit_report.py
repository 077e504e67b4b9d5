"""Read, filter and total the audit log of a site: ``fl-bn audit``."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from heapq import merge
from pathlib import Path
from typing import Any

from fl_bn_site.audit import lines_in
from fl_bn_site.audit_check import FORGOTTEN

SENT = "sent"
COLUMNS = ("run", "name", "message", "section", "answers", "tensors", "bytes", "smallest-samples", "first-round", "last-round")


@dataclass(frozen=True)
class Filter:
    """Choose those lines of the log that satisfy all attributes.

    Attributes:
        run: The id or the name of a run; empty: all runs.
        rounds: The first and the last round; None: all rounds.
        message: Flower's type of a message, such as ``train``; empty: all types.
        since: The earliest time; None: any time.
    """

    run: str = ""
    rounds: tuple[int, int] | None = None
    message: str = ""
    since: datetime | None = None

    @classmethod
    def of(cls, run: str = "", rounds: str = "", message: str = "", since: str = "") -> Filter:
        """Read a filter from the options of ``fl-bn audit``; an empty text allows all lines.

        Args:
            run: The id or the name of a run.
            rounds: One round, or two joined by a hyphen: ``3`` or ``3-7``.
            message: The type of the message.
            since: A date or a time in ISO form; without a zone it is UTC.

        Raises:
            ValueError: ``rounds`` or ``since`` cannot be read.
        """
        both = None
        if rounds:
            match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", rounds)
            if match is None:
                raise ValueError(f"--rounds must be one round, or two rounds joined by a hyphen, such as 3 or 3-7, but got {rounds!r}")
            both = int(match[1]), int(match[2] or match[1])
        try:
            time = datetime.fromisoformat(since) if since else None
        except ValueError as error:
            raise ValueError(f"--since and --forget take a date or a time, as 2026-11-26 or 2026-11-26T09:30, but got {since!r}") from error
        return cls(run, both, message, time.replace(tzinfo=UTC) if time is not None and time.tzinfo is None else time)

    def keeps(self, entry: Mapping[str, Any]) -> bool:
        """Return whether the filter chooses a line."""
        if self.run and self.run not in (entry.get("run"), entry.get("name")):
            return False
        if self.rounds is not None and not self.rounds[0] <= (entry.get("round") or 0) <= self.rounds[1]:
            return False
        if self.message and entry.get("message") != self.message:
            return False
        return self.since is None or datetime.fromisoformat(str(entry["time"])) >= self.since


@dataclass(frozen=True)
class Total:
    """Hold the totals of one section, over a run's answers to messages of one type.

    Attributes:
        answers: The number of answers with the section.
        tensors: The number of tensors in the section, over these answers.
        nbytes: The bytes of the section, over these answers.
        smallest: The smallest number of samples behind a statistic of the section; None: no answer tells it.
        first: The first round of these answers.
        last: The last round of these answers.
    """

    answers: int = 0
    tensors: int = 0
    nbytes: int = 0
    smallest: int | None = None
    first: int = 0
    last: int = 0

    def and_also(self, of: Mapping[str, int], round: int) -> Total:
        """Return new totals, which include one more answer.

        Args:
            of: The fields ``tensors``, ``bytes`` and, where known, ``samples`` of the section in that answer.
            round: The round of the answer; 0: before the first round.
        """
        smallest = min((n for n in (self.smallest, of.get("samples")) if n), default=None)
        first = min(self.first, round) if self.answers else round
        return replace(
            self,
            answers=self.answers + 1,
            tensors=self.tensors + of["tensors"],
            nbytes=self.nbytes + of["bytes"],
            smallest=smallest,
            first=first,
            last=max(self.last, round),
        )


Key = tuple[str, str, str, str]  # run, its name, type of the message, section


@dataclass
class Report:
    """Hold the totals of some lines of a log.

    Attributes:
        lines: The number of lines.
        totals: (run, name of the run, type of the message, section) -> the totals of the section.
        message_bytes: The bytes of all messages that left, errors included, as Flower serialises them.
        refused: The answers that did not leave: time, run, type of the message, decision and reason of each.
    """

    lines: int = 0
    totals: dict[Key, Total] = field(default_factory=dict)
    message_bytes: int = 0
    refused: list[dict[str, Any]] = field(default_factory=list)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add a line of the log to the totals."""
        self.lines += 1
        run, name, message = str(entry.get("run")), str(entry.get("name") or ""), str(entry.get("message"))
        self.message_bytes += int(entry.get("message-bytes", 0))
        if entry.get("decision") == FORGOTTEN:
            return
        if entry.get("decision") != SENT:
            self.refused.append({key: entry.get(key) for key in ("time", "run", "name", "message", "round", "decision", "reason")})
            return
        sections = entry.get("sections") or {"nothing": {"tensors": 0, "bytes": 0}}
        for section, of in sections.items():
            key = run, name, message, section
            self.totals[key] = self.totals.get(key, Total()).and_also(of, int(entry.get("round") or 0))

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield one row for each entry of ``totals``, in the order of the log. ``COLUMNS`` names the items of a row."""
        for key, total in self.totals.items():
            yield (*key, total.answers, total.tensors, total.nbytes, total.smallest, total.first, total.last)

    def to_json(self) -> str:
        """Return the whole report as JSON."""
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in self.rows()]
        whole = {"lines": self.lines, "message-bytes": self.message_bytes, "totals": rows, "refused": self.refused}
        return json.dumps(whole, indent=1, ensure_ascii=False)

    def to_csv(self) -> str:
        """Return the totals as CSV."""
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(["" if cell is None else cell for cell in row] for row in self.rows())
        return text.getvalue()


def chosen(folder: Path, which: Filter) -> Iterator[dict[str, Any]]:
    """Yield the fields of the lines that ``which`` chooses.

    Damaged lines are left out; ``audit_check`` reports them.

    Raises:
        OSError: A file cannot be read.
    """
    for line in lines_in(folder):
        if line.values is not None and which.keeps(line.values):
            yield line.values


def in_time(folders: Sequence[Path], which: Filter) -> Iterator[dict[str, Any]]:
    """Yield the fields of the lines of several logs that ``which`` chooses, in the order of their times.

    Raises:
        OSError: A file cannot be read.
    """
    return merge(*(chosen(folder, which) for folder in folders), key=lambda entry: str(entry["time"]))


def report_of(entries: Iterable[Mapping[str, Any]]) -> Report:
    """Return the totals of ``entries``, which are the fields of lines of a log."""
    report = Report()
    for entry in entries:
        report.add(entry)
    return report
