"""Write the audit log of a site: one line of JSON for each answer, before the answer leaves.

Each line carries the SHA-256 of the line before, so ``audit_check.py`` notices a change in the middle. The file ``head``
has the number and the hash of the last line, so lines that were cut off at the end are noticed, too. Whoever may write
to the folder can replace the whole log by another one with matching hashes. Only a hash that was noted elsewhere shows
that.

Each message is answered by a process of its own, and a lock lets one process write at a time. A line is on the disk
when ``append`` returns.

This module imports only the standard library.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

NAME = re.compile(r"audit-([0-9]{6})\.jsonl")
HEAD, LOCK = "head", "lock"
HEAD_LINE = re.compile(rb"([0-9]{20}) ([0-9a-f]{64})\n")
START = "0" * 64  # the hash in line 1, which has no line before it
LARGEST = 16 << 20  # size of a file, in bytes, from which a new file is begun
LARGEST_NUMBER = 10**18  # larger numbers are none that a site writes
BLOCK = 1 << 16  # bytes that are read at once, from the end of a file


class AuditError(Exception):
    """Signal that the audit log cannot be written, so that the answer must not leave."""


@dataclass(frozen=True)
class Line:
    """Hold a line of the log.

    Attributes:
        file: The name of the file that has the line.
        place: The place of the line in that file, from 1.
        hash: The SHA-256 of the line's bytes, in hexadecimal digits.
        values: The fields of the line; None: the line is not a JSON object with the fields ``line`` (its number) and
            ``before`` (the hash of the line before).
    """

    file: str
    place: int
    hash: str
    values: dict[str, Any] | None

    @property
    def number(self) -> int:
        """Return the number of the line in the log, from 1; 0: the line has no number."""
        return 0 if self.values is None else int(self.values["line"])


def parse(data: bytes) -> dict[str, Any] | None:
    """Return the fields of a line; None: ``data`` is not a line of an audit log, as ``append`` and ``leaving`` write them."""
    try:
        values = json.loads(data)
        numbers = [values["line"], values.get("round") or 0, values.get("message-bytes", 0)]
        for of in (values.get("sections") or {}).values():
            numbers += [of["tensors"], of["bytes"], of.get("samples", 0)]
        json.dumps(values, ensure_ascii=False).encode()  # no half of a surrogate pair
        datetime.fromisoformat(values["time"])
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return None
    sound = type(values["before"]) is str and all(type(number) is int and 0 <= number < LARGEST_NUMBER for number in numbers)
    return values if sound else None


def digest(data: bytes) -> str:
    """Return the SHA-256 of a line, in hexadecimal digits. ``data`` is the line without its line break."""
    return hashlib.sha256(data).hexdigest()


def files_in(folder: Path) -> list[Path]:
    """Return the files of the log, the oldest first."""
    return sorted(path for path in folder.glob("audit-*.jsonl") if NAME.fullmatch(path.name))


def lines_in(folder: Path) -> Iterator[Line]:
    """Yield all complete lines of the log, the oldest first. A line without a line break at its end is not complete.

    Raises:
        OSError: A file cannot be read.
    """
    for path in files_in(folder):
        with path.open("rb") as file:
            for place, data in enumerate(file, 1):
                if data.endswith(b"\n"):
                    yield Line(path.name, place, digest(data[:-1]), parse(data[:-1]))


def head_in(folder: Path) -> tuple[int, str] | None:
    """Return the number and the hash of the last line, from the file ``head``; None: the file is missing or damaged.

    Raises:
        OSError: The file is there, but cannot be read.
    """
    try:
        match = HEAD_LINE.fullmatch((folder / HEAD).read_bytes())
    except FileNotFoundError:
        return None
    return (int(match[1]), match[2].decode()) if match else None


def append(folder: Path, entry: Mapping[str, Any], largest: int = LARGEST) -> str:
    """Add a line to the log. The line is on the disk when this function returns.

    Args:
        folder: The folder of the log.
        entry: The fields of the line. Its number, the hash of the line before, and the time are added.
        largest: The size of a file, in bytes, from which a new file is begun.

    Returns:
        The hash of the line.

    Raises:
        AuditError: The line cannot be written.
    """
    try:
        import fcntl

        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            sync(folder.parent)
        with (folder / LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _append(folder, entry, largest)
    except (OSError, ImportError) as error:
        raise AuditError(
            f"this site's audit log cannot be written ({error}), so the answer does not leave: make space on its disk, or correct the "
            "folder's owner"
        ) from error


def _append(folder: Path, entry: Mapping[str, Any], largest: int) -> str:
    files = files_in(folder)
    path = files[-1] if files else folder / "audit-000001.jsonl"
    notes = []
    if removed := _complete(path):
        notes.append(f"half a line of {removed} bytes was removed before this one: the process that wrote it ended too early")
    number, before, note = _place(folder, files)
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    about = {"note": "; ".join(filter(None, [*notes, note]))} if notes or note else {}
    values = {"line": number + 1, "before": before, "time": now, **entry, **about}
    data = json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()
    if parse(data) is None:
        raise AuditError(f"this site's audit log cannot say such numbers, so the answer does not leave: {str(entry)[:300]}")
    if path.exists() and path.stat().st_size + len(data) >= largest:
        path = folder / f"audit-{int(path.stem.removeprefix('audit-')) + 1:06d}.jsonl"
    _write(path, data + b"\n")
    name = digest(data)
    descriptor = os.open(folder / HEAD, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, 0) if os.fstat(descriptor).st_size not in (0, 86) else None
        os.pwrite(descriptor, f"{number + 1:020d} {name}\n".encode(), 0)  # in place, so a crash leaves either the old content or the new
    finally:
        os.close(descriptor)
    return name


def _place(folder: Path, files: list[Path]) -> tuple[int, str, str]:
    """Return the number and the hash of the last line, and a note to write into the next line.

    The note says that the file ``head`` is missing or damaged. It is empty where ``head`` is sound, or the log has no lines.
    """
    head, last = head_in(folder), _last(files)
    if last is None and head is None:
        return 0, START, ""
    if head is None:
        assert last is not None
        return *last, "the file head was missing: it is unknown whether lines before this one were cut off"
    if last is not None and last[0] > head[0]:  # a crash may leave a ``head`` that names an earlier line
        return *last, ""
    return *head, ""  # if the last line is not the one in ``head``, ``audit_check`` still notices that


def _last(files: list[Path]) -> tuple[int, str] | None:
    for path in reversed(files):
        if len(lines := _end_of(path, 2).split(b"\n")) > 1:
            values = parse(lines[-2])
            return (int(values["line"]) if values else 0), digest(lines[-2])
    return None


def _end_of(path: Path, breaks: int) -> bytes:
    """Return the end of a file, with so many line breaks at least, or the whole file."""
    with path.open("rb") as file:
        end, data = file.seek(0, os.SEEK_END), b""
        while end and data.count(b"\n") < breaks:
            begin = max(0, end - BLOCK)
            file.seek(begin)
            data, end = file.read(end - begin) + data, begin
    return data


def _complete(path: Path) -> int:
    """Remove an incomplete line at the end of a file, and return the number of removed bytes."""
    extra = len(_end_of(path, 1).rpartition(b"\n")[2]) if path.exists() else 0
    if extra:
        os.truncate(path, path.stat().st_size - extra)
    return extra


def _write(path: Path, data: bytes) -> None:
    fresh = not path.exists()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        before = os.fstat(descriptor).st_size
        if os.write(descriptor, data) < len(data):
            os.ftruncate(descriptor, before)
            raise OSError(28, "only a part of the line could be written")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if fresh:
        sync(path.parent)


def sync(folder: Path) -> None:
    """Flush a folder to the disk, so that the names of its new files survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
