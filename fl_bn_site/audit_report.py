"""Read, filter and total the audit log of a site: ``fl-bn audit``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fl_bn_site.audit import lines_in
from fl_bn_site.audit_check import FORGOTTEN

SENT = "sent"
COLUMNS = ("run", "name", "message", "section", "answers", "tensors", "bytes", "smallest-samples", "first-round", "last-round")


def moment(text: str) -> datetime:
    """Read a date or a time in ISO form; without a zone it is UTC.

    Raises:
        ValueError: ``text`` is neither.
    """
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"--since and --forget take a date or a time, as 2026-11-26 or 2026-11-26T09:30, but got {text!r}") from error
    return time if time.tzinfo else time.replace(tzinfo=UTC)


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
        return Total(
            self.answers + 1,
            self.tensors + of["tensors"],
            self.nbytes + of["bytes"],
            min((n for n in (self.smallest, of.get("samples")) if n), default=None),
            min(self.first, round) if self.answers else round,
            max(self.last, round),
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

    def to_json(self) -> str:
        """Return the whole report as JSON."""
        rows = [dict(zip(COLUMNS, (*key, *astuple(total)), strict=True)) for key, total in self.totals.items()]
        whole = {"lines": self.lines, "message-bytes": self.message_bytes, "totals": rows, "refused": self.refused}
        return json.dumps(whole, indent=1, ensure_ascii=False)


def chosen(folder: Path, run: str = "", since: datetime | None = None) -> Iterator[dict[str, Any]]:
    """Yield the fields of the lines of a log. Damaged lines are left out; ``audit_check`` reports them.

    Args:
        folder: The folder of the log.
        run: Only lines of the run with this name or id; empty: of all runs.
        since: Only lines from this time on; None: all.

    Raises:
        OSError: A file cannot be read.
    """
    for line in lines_in(folder):
        if (values := line.values) is None or (run and run not in (values.get("run"), values.get("name"))):
            continue
        if since is None or moment(values["time"]) >= since:
            yield values


def report_of(entries: Iterable[Mapping[str, Any]]) -> Report:
    """Return the totals of ``entries``, which are the fields of lines of a log."""
    report = Report()
    for entry in entries:
        report.add(entry)
    return report
