"""Find lines of a site's audit log that were changed, removed, swapped or cut off, and describe each in a sentence.

Two changes cannot be noticed from the log alone: somebody computed the whole log anew, with its file ``head``, or
removed all of it. Only a hash that the site's officer has noted elsewhere shows them (``fl-bn audit`` prints one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fl_bn_site.audit import HEAD, START, Line, append, files_in, head_in, lines_in

FORGOTTEN = "forgotten"  # ``message`` and ``decision`` of a line that says that older lines were removed


@dataclass(frozen=True)
class Findings:
    """Hold the result of checking a log.

    Attributes:
        lines: The number of lines.
        head: The hash of the last line; empty: the log has no lines.
        faults: A sentence for each line that was changed, removed, swapped or cut off. Empty: the log is whole.
        forgotten: How many lines ``forget`` has removed from the beginning. A later line of the log says so.
        noted: Whether a line has the hash that the caller asked for; None: the caller asked for no hash.
    """

    lines: int
    head: str
    faults: tuple[str, ...]
    forgotten: int = 0
    noted: bool | None = None


def is_log(folder: Path) -> bool:
    """Return whether ``folder`` is the folder of an audit log."""
    return (folder / HEAD).is_file() or bool(files_in(folder))


def check(folder: Path, noted: str = "") -> Findings:
    """Check the log in ``folder``.

    Args:
        folder: The folder of the log.
        noted: A hash that ``fl-bn audit`` printed earlier, or its first digits: a line must have it; empty: look for none.

    Raises:
        OSError: A file cannot be read.
    """
    head, lines = head_in(folder), list(lines_in(folder))  # in this order, as lines may be added meanwhile
    forgotten = _forgotten(lines)
    faults = [*_faults(lines, forgotten), *_end(folder, lines, head)]
    return Findings(
        len(lines),
        lines[-1].hash if lines else "",
        tuple(faults),
        forgotten,
        any(line.hash.startswith(noted) for line in lines) if noted else None,
    )


def forget(folder: Path, until: datetime) -> tuple[int, int]:
    """Remove the files of the log whose lines are all older than ``until``, but never the last file.

    Before that, a new line at the end of the log says which lines are removed.

    Args:
        folder: The folder of the log.
        until: The time, with a time zone.

    Returns:
        The number of removed files, and the number of the last removed line; (0, 0): no file was old enough.

    Raises:
        AuditError: The line cannot be written; nothing was removed.
        OSError: A file cannot be read or removed.
    """
    last: dict[str, Line] = {line.file: line for line in lines_in(folder)}
    old: list[Path] = []
    for path in files_in(folder)[:-1]:
        line = last.get(path.name)
        if line is None or not _is_older(line, until):
            break
        old.append(path)
    if not old:
        return 0, 0
    through = last[old[-1].name]
    append(folder, {"message": FORGOTTEN, "through": through.number, "hash": through.hash, "decision": FORGOTTEN, "sections": {}})
    for path in old:
        path.unlink()
    return len(old), through.number


def _is_older(line: Line, than: datetime) -> bool:
    """Return whether ``line`` was written before ``than``. False where its time cannot be read: ``forget`` then keeps the file."""
    try:
        return datetime.fromisoformat((line.values or {})["time"]) < than
    except (KeyError, TypeError, ValueError):
        return False


def _forgotten(lines: Sequence[Line]) -> int:
    """Return how many lines ``forget`` has removed from the beginning, as it noted in a later line; 0: there is no such note."""
    if not lines or lines[0].values is None:
        return 0
    wanted = FORGOTTEN, lines[0].number - 1, lines[0].values["before"]
    said = ((v.get("message"), v.get("through"), v.get("hash")) for line in lines[1:] if (v := line.values) is not None)
    return lines[0].number - 1 if wanted in said else 0


def _faults(lines: Sequence[Line], forgotten: int) -> list[str]:
    """Return a sentence for each line that does not follow the line before it, by number and hash.

    ``forget`` has removed ``forgotten`` lines before the first line of ``lines``. Their absence is not a fault.
    """
    found: list[str] = []
    number, before = forgotten, str(lines[0].values["before"]) if forgotten and lines[0].values else START
    for line in lines:
        expected, where = number + 1, f"({line.file}, line {line.place} of the file)"
        if line.values is None:
            found.append(f"line {expected} was changed: it is no line of this log {where}")
            number, before = expected, line.hash
            continue
        if line.number > expected:
            found.append(f"lines {expected} to {line.number - 1} were removed or moved {where}")
        elif line.number < expected:
            found.append(f"line {line.number} was inserted or moved: it stands after line {number} {where}")
        elif line.values["before"] != before:
            found.append(f"line {number} or line {expected} was changed: the hashes differ {where}")
        elif f"file {HEAD} was missing" in (note := str(line.values.get("note", ""))):
            found.append(f"before line {line.number}, {note}")
        number, before = line.number, line.hash
    return found


def _end(folder: Path, lines: Sequence[Line], head: tuple[int, str] | None) -> list[str]:
    """Return a list with one sentence if the last line is not the one in the file ``head``; else an empty list."""
    last = max((line.number for line in lines), default=0)
    if head is None:
        return [f"the file {HEAD} is missing or damaged: it is unknown whether lines were cut off at the end"] if files_in(folder) else []
    if head[0] > last:
        return [f"lines {last + 1} to {head[0]} were cut off at the end: the file {HEAD} names line {head[0]} as the last"]
    if all(line.number != head[0] or line.hash != head[1] for line in lines):
        follower = any(line.number == head[0] + 1 for line in lines)
        return [] if follower else [f"line {head[0]} was changed: the file {HEAD} has another hash of it"]
    return []
