"""Write the audit log of a site: one line of JSON for each answer, before the answer leaves.

Each line carries the SHA-256 of the line before, so a change in the middle shows (``audit_check.py``). A file
``head`` names the last line, so that lines cut off at the end show, too. Who may write to the folder can compute all of
it anew. Only a hash that was noted elsewhere shows that.

Each message has a process of its own, so a lock keeps them apart. A line is on the disk when ``append`` returns.

This module imports only the standard library, so that ``app_host.py`` can load it by its path.
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
START = "0" * 64  # what line 1 carries for the line before it
LARGEST = 16 << 20  # bytes of a file, after which the next one begins
BLOCK = 1 << 16


class AuditError(Exception):
    """Signal that the audit log cannot be written, so that the answer must not leave."""


@dataclass(frozen=True)
class Line:
    """Hold a line of the log.

    Attributes:
        file: The name of its file.
        place: Its place in that file, from 1.
        hash: The SHA-256 of its bytes, in hexadecimal digits.
        values: What it says; None: it is no JSON object with a number and a hash.
    """

    file: str
    place: int
    hash: str
    values: dict[str, Any] | None

    @property
    def number(self) -> int:
        """Return its number in the log, from 1; 0: it has none."""
        return 0 if self.values is None else int(self.values["line"])


def parse(data: bytes) -> dict[str, Any] | None:
    """Return what the bytes of a line say; None: they are no line of an audit log."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or type(values.get("line")) is not int or type(values.get("before")) is not str:
        return None
    return values


def digest(data: bytes) -> str:
    """Return the hash of a line's bytes, without the end of the line."""
    return hashlib.sha256(data).hexdigest()


def files_in(folder: Path) -> list[Path]:
    """Return the files of the log, the oldest first."""
    return sorted(path for path in folder.glob("audit-*.jsonl") if NAME.fullmatch(path.name))


def lines_in(folder: Path) -> Iterator[Line]:
    """Yield all whole lines of the log, the oldest first.

    Raises:
        OSError: A file cannot be read.
    """
    for path in files_in(folder):
        with path.open("rb") as file:
            for place, data in enumerate(file, 1):
                if data.endswith(b"\n"):
                    yield Line(path.name, place, digest(data[:-1]), parse(data[:-1]))


def head_in(folder: Path) -> tuple[int, str] | None:
    """Return number and hash of the last line, as the file ``head`` has them; None: there is no such file, or it is damaged.

    Raises:
        OSError: The file is there, but cannot be read.
    """
    try:
        match = HEAD_LINE.fullmatch((folder / HEAD).read_bytes())
    except FileNotFoundError:
        return None
    return (int(match[1]), match[2].decode()) if match else None


def append(folder: Path, entry: Mapping[str, Any], largest: int = LARGEST) -> str:
    """Add a line to the log. It is on the disk when this returns.

    Args:
        folder: The folder of the log.
        entry: What the line says, beside its number, the hash before it, and the time.
        largest: The bytes of a file, after which the next one begins.

    Returns:
        The hash of the line.

    Raises:
        AuditError: The line cannot be written.
    """
    try:
        import fcntl

        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _sync(folder.parent)
        with (folder / LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _append(folder, entry, largest)
    except (OSError, ImportError) as error:
        raise AuditError(
            f"this site's audit log cannot be written ({error}), so the answer does not leave: free its disk, or correct the folder's owner"
        ) from error


def _append(folder: Path, entry: Mapping[str, Any], largest: int) -> str:
    files = files_in(folder)
    path = files[-1] if files else folder / "audit-000001.jsonl"
    notes = []
    if removed := _complete(path):
        notes.append(f"half a line of {removed} bytes was removed before this one, as a process leaves that ends while it writes")
    number, before, note = _place(folder, files)
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    about = {"note": "; ".join(filter(None, [*notes, note]))} if notes or note else {}
    values = {"line": number + 1, "before": before, "time": now, **entry, **about}
    data = json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()
    if path.exists() and path.stat().st_size + len(data) >= largest:
        path = folder / f"audit-{int(path.stem.removeprefix('audit-')) + 1:06d}.jsonl"
    _write(path, data + b"\n")
    name = digest(data)
    descriptor = os.open(folder / HEAD, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, 0) if os.fstat(descriptor).st_size not in (0, 86) else None
        os.pwrite(descriptor, f"{number + 1:020d} {name}\n".encode(), 0)  # in place: a crash leaves the former head, or this one
    finally:
        os.close(descriptor)
    return name


def _place(folder: Path, files: list[Path]) -> tuple[int, str, str]:
    """Return number and hash of the line after which the next one goes, and a note where something is missing."""
    head, last = head_in(folder), _last(files)
    if last is None and head is None:
        return 0, START, ""
    if head is None:
        assert last is not None
        return *last, "the file head was missing: whether lines before this one were cut off cannot be told"
    if last is not None and last[0] > head[0]:  # a crash may leave a head that is behind
        return *last, ""
    return *head, ""  # where the last line is another one than the head names, that stays visible


def _last(files: list[Path]) -> tuple[int, str] | None:
    for path in reversed(files):
        if tail := _tail(path):
            values = parse(tail)
            return (int(values["line"]) if values else 0), digest(tail)
    return None


def _tail(path: Path) -> bytes:
    """Return the last whole line of a file, without its end; empty: it has none."""
    with path.open("rb") as file:
        end, data = file.seek(0, os.SEEK_END), b""
        while end and data.count(b"\n") < 2:
            begin = max(0, end - BLOCK)
            file.seek(begin)
            data, end = file.read(end - begin) + data, begin
    lines = data.split(b"\n")
    return lines[-2] if len(lines) > 1 else b""


def _complete(path: Path) -> int:
    """Remove half a line at the end of a file, and return its bytes."""
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        end, half = file.seek(0, os.SEEK_END), b""
        while end and b"\n" not in half:
            begin = max(0, end - BLOCK)
            file.seek(begin)
            half, end = file.read(end - begin) + half, begin
        extra = len(half) - (half.rfind(b"\n") + 1)
        if extra:
            file.truncate(file.seek(0, os.SEEK_END) - extra)
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
        _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
