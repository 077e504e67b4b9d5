"""The queue on the disk: an SQLite database in the server's ``state/queue``.

Every change is one transaction, which is on the disk before the next step begins. A process that is killed in between loses nothing.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from fl_bn.support.locks import hold
from fl_bn_site.control import ANSWER
from fl_bn_site.registered import Submitted

WAITING, STARTING, STARTED, REFUSED, DROPPED = "waiting", "starting", "started", "refused", "dropped"
DATABASE, LOCK = "queue.db", ".lock"
VERSION = 2  # of the table in queue.sql
SINCE_2 = ("submitter", "code")  # columns that a table of version 1 lacks
LAST = "last"  # a file of earlier versions: the last number that was given
LOCK_TIMEOUT = ANSWER + 60  # seconds: a process that starts a run holds the lock for less
BUSY_TIMEOUT = 30.0  # seconds that SQLite waits for another process, which reads or writes for milliseconds
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class QueueError(RuntimeError):
    """The queue cannot be read or written. The message says which file, and what to do."""


class NoQueue(QueueError):
    """This folder may not be written to, so it has no queue."""


@dataclass(frozen=True)
class QueuedRun:
    """One run in the queue.

    Attributes:
        number: Its place: runs start in the order of their numbers.
        name: The name of the run's folder; of a resumed run the name that it had before.
        config: The keys of the run config that the user gave, and the name.
        parallel: The number of runs at a time that it may be one of; 0: as server.toml says.
        submitted: When it was submitted, in ISO 8601.
        state: waiting, starting, started, refused or dropped.
        earlier_runs: Flower's ids of the runs that existed before this one was being started.
        run: Flower's id of it, once it is started.
        why: The reason for which it was refused, or who took it out of the queue, and when.
        submitter: Who submitted it, USER@HOST, as the machine says on which the command was typed.
        code: The SHA-256 of the app that was sent to the sites, once it is started.
    """

    number: int
    name: str
    config: dict[str, Any]
    parallel: int = 0
    submitted: str = ""
    state: str = WAITING
    earlier_runs: tuple[int, ...] = ()
    run: str = ""
    why: str = ""
    submitter: str = ""
    code: str = ""

    def started_as(self, run: Submitted) -> bool:
        """Return whether ``run`` is this entry, and was submitted since the entry was being started."""
        return self.state == STARTING and run.id not in self.earlier_runs and run_name(run) == self.name


def run_name(run: Submitted) -> str:
    """Return the name of the run's folder; empty where fl-bn did not submit the run."""
    return str(run.config.get("resume") or run.config.get("name") or "")


class QueueStore:
    """The entries of a queue in ``folder``. Whoever changes them holds ``locked``; reading needs no lock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / DATABASE

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the queue against other processes.

        Yields:
            The descriptor of the lock. A child process that inherits it holds the queue, too, for as long as it lives.

        Raises:
            NoQueue: The folder may not be written to.
            QueueError: The queue cannot be written, or another process holds it for too long.
        """
        with self._errors():
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = (self.folder / LOCK).open("a")
        with lock:
            end = time.monotonic() + LOCK_TIMEOUT
            while True:
                try:
                    hold(lock)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > end:
                        raise QueueError(
                            f"another fl-bn has held {self.folder} for {LOCK_TIMEOUT:.0f} s: look which process hangs, and end it"
                        ) from error
                    time.sleep(0.05)
            self._prepare()
            yield lock.fileno()

    def entries(self, *states: str) -> list[QueuedRun]:
        """Return the entries in the order of their numbers: those in one of the ``states``, or all.

        Raises:
            QueueError: The database cannot be read.
        """
        chosen = f"WHERE state IN ({', '.join('?' * len(states))})" if states else ""
        return self._select(f"{chosen} ORDER BY number", states)

    def find(self, number: int) -> QueuedRun | None:
        """Return the entry with this ``number``; None where there is none. Raises QueueError as ``entries`` does."""
        return next(iter(self._select("WHERE number = ?", (number,))), None)

    def add(self, entry: QueuedRun) -> QueuedRun:
        """Add ``entry`` at the end. Return it with its number, which no entry before it had.

        Raises:
            QueueError: The disk is full, say. The queue is as it was before.
        """
        with self._transaction() as connection:
            return replace(entry, number=_insert(connection, entry, None))

    def update(self, entry: QueuedRun) -> None:
        """Replace the entry that has the number of ``entry``. Raises QueueError as ``add`` does."""
        with self._transaction() as connection:
            columns = ", ".join(f"{name} = :{name}" for name in _names())
            connection.execute(f"UPDATE runs SET {columns} WHERE number = :number", _row(entry))

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove the entries with these ``numbers``. Raises QueueError as ``add`` does."""
        with self._transaction() as connection:
            connection.executemany("DELETE FROM runs WHERE number = ?", [(number,) for number in numbers])

    def _select(self, which: str, values: Sequence[object]) -> list[QueuedRun]:
        if self._old_files():
            with self.locked():
                pass
        if not os.path.exists(self.path):
            return []
        with self._errors(), closing(self._connect()) as connection:
            connection.row_factory = sqlite3.Row
            if self._version(connection) == 0:  # a process was killed before it made the table
                return []
            try:
                return [_queued_run(row) for row in connection.execute(f"SELECT * FROM runs {which}", values)]
            except (ValueError, TypeError) as error:
                raise QueueError(
                    f"a run in {self.path} cannot be read ({error}): move the file away, and submit the runs again"
                ) from error

    def _connect(self) -> sqlite3.Connection:
        where = f"{self.path.absolute().as_uri()}?mode=rw"  # never makes the file
        connection = sqlite3.connect(where, uri=True, timeout=BUSY_TIMEOUT, isolation_level=None)
        connection.execute("PRAGMA synchronous = EXTRA")  # a change that was made is still there after a power cut
        return connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._errors(), closing(self._connect()) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")  # else closing the connection takes all of it back

    def _prepare(self) -> None:
        """Make the table where there is none, and take over what an earlier version has left."""
        with self._errors():
            if not self.path.exists():
                self.path.touch(mode=0o600)
            with closing(self._connect()) as connection:
                version = self._version(connection)
                if version == 0:
                    connection.executescript(files("fl_bn_site").joinpath("queue.sql").read_text(encoding="utf-8"))
                elif version < VERSION:
                    added = "".join(f"ALTER TABLE runs ADD COLUMN {name} TEXT NOT NULL DEFAULT ''; " for name in SINCE_2)
                    connection.executescript(f"BEGIN IMMEDIATE; {added}PRAGMA user_version = {VERSION}; COMMIT;")
        if old := self._old_files():
            self._take_over(old)
            with self._errors():
                for path in old:
                    path.unlink()

    def _version(self, connection: sqlite3.Connection) -> int:
        """Return the version of the table; 0: there is no table yet."""
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        if version > VERSION:
            raise QueueError(
                f"{self.path} was written by a newer fl-bn (version {version}; this one reads {VERSION}): install that version again, "
                "or move the file away and submit the runs again"
            )
        return version

    def _old_files(self) -> list[Path]:
        """Return the files of earlier versions, which kept one JSON file per run, and the last number."""
        return [*sorted(self.folder.glob("[0-9]*.json")), *self.folder.glob(LAST)]

    def _take_over(self, old: Sequence[Path]) -> None:
        """Enter the runs of the ``old`` files, each once, however often this is begun and interrupted."""
        with self._transaction() as connection:
            for path in old:
                try:
                    text = path.read_text(encoding="utf-8")
                    entry = None if path.name == LAST else _old_queued_run(text)
                    last = int(text) if entry is None else entry.number
                except (OSError, ValueError, KeyError, TypeError) as error:
                    raise QueueError(f"{path} cannot be read ({error}): move it away, and submit that run again") from error
                if (
                    entry
                    and not connection.execute(
                        "SELECT 1 FROM runs WHERE name = ? AND submitted = ?", (entry.name, entry.submitted)
                    ).fetchone()
                ):
                    taken = connection.execute("SELECT 1 FROM runs WHERE number = ?", (entry.number,)).fetchone()
                    _insert(connection, entry, None if taken else entry.number)
                highest = connection.execute("SELECT max(seq) FROM sqlite_sequence").fetchone()[0] or 0
                connection.execute("DELETE FROM sqlite_sequence")
                connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('runs', ?)", (max(last, highest),))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of the disk and of SQLite into a QueueError that says what to do."""
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
                raise QueueError(f"{self.path} cannot be read ({error}): move it away, and submit the runs that waited again") from error
            raise self._unwritten(error, name.startswith("SQLITE_READONLY")) from error
        except OSError as error:
            raise self._unwritten(error.strerror or error, error.errno in READ_ONLY) from error

    def _unwritten(self, reason: object, read_only: bool) -> QueueError:
        return (NoQueue if read_only else QueueError)(
            f"the queue in {self.folder} cannot be written ({reason}): make room on that disk. No run was lost: "
            "the runs that wait are still there, and no other was added"
        )


def _names() -> tuple[str, ...]:
    """Return the columns that an entry has beside its number."""
    return tuple(spec.name for spec in fields(QueuedRun) if spec.name != "number")


def _insert(connection: sqlite3.Connection, entry: QueuedRun, number: int | None) -> int:
    """Insert ``entry`` with this ``number``, or with the next one. Return the number."""
    columns = ("number", *_names())
    values = f"({', '.join(columns)}) VALUES ({', '.join(f':{name}' for name in columns)})"
    return connection.execute(f"INSERT INTO runs {values}", {**_row(entry), "number": number}).lastrowid or 0


def _row(entry: QueuedRun) -> dict[str, Any]:
    return {**asdict(entry), "config": json.dumps(entry.config), "earlier_runs": json.dumps(entry.earlier_runs)}


def _queued_run(row: sqlite3.Row) -> QueuedRun:
    values = dict(row)
    return QueuedRun(**{**values, "config": json.loads(values["config"]), "earlier_runs": tuple(json.loads(values["earlier_runs"]))})


def _old_queued_run(text: str) -> QueuedRun:
    """Return the entry in a JSON file of an earlier version."""
    values = json.loads(text)
    return QueuedRun(**{name: value for name, value in values.items() if name != "before"}, earlier_runs=tuple(values["before"]))
