"""Keep the queue on the disk, as an SQLite database in the server's ``state/queue``.

Every change is one transaction, which is on the disk before the next step begins. So nothing is lost when a
process is killed.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from fl_bn.support.durable import write
from fl_bn.support.locks import hold
from fl_bn_site.control import ANSWER
from fl_bn_site.registered import Submitted

WAITING, STARTING, STARTED, REFUSED, DROPPED = "waiting", "starting", "started", "refused", "dropped"
DATABASE, LOCK = "queue.db", ".lock"
PACKAGE = ".fab"  # suffix of a package's file, which is named after its hash
VERSION = 2  # the version of the table in queue.sql
SINCE_2 = ("submitter", "code")  # columns that a table of version 1 lacks
LAST = "last"  # a file of earlier versions with the highest number that an entry has ever had
LOCK_TIMEOUT = ANSWER + 60  # seconds to wait for the lock, longer than any process needs it to start a run
BUSY_TIMEOUT = 30.0  # seconds that SQLite waits while another process reads or writes, which takes milliseconds
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class QueueError(RuntimeError):
    """Signal that the queue cannot be read or written. The message names the file and says what to do."""


class NoQueue(QueueError):
    """Signal that this user may not write to the folder of the queue, so runs cannot be queued."""


@dataclass(frozen=True)
class QueuedRun:
    """Describe one run in the queue.

    Attributes:
        number: The place in the queue. Runs start in the order of their numbers.
        name: The name of the run's folder. A resumed run keeps its name.
        config: The keys of the run config that the user gave, and ``name``.
        parallel: How many runs may be active while this run is active, itself included; 0: the number in
            server.toml.
        submitted: The time at which the run was submitted, in ISO 8601.
        state: ``waiting``, ``starting``, ``started``, ``refused`` or ``dropped``.
        earlier_runs: Flower's ids of all runs that existed before the attempt to start this one. Used only in the state
            ``starting``.
        run: Flower's id of this run; empty: the run is not started.
        why: Why the run was refused, or who took it out of the queue, and when; empty: neither happened.
        submitter: Who submitted the run: USER@HOST, from the machine on which the command was typed.
        code: The SHA-256 of the package that the sites receive; empty: the package is not made yet.
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
        """Return whether an attempt to start this entry has made ``run``. False if the entry is in another state than ``starting``."""
        return self.state == STARTING and run.id not in self.earlier_runs and run_name(run) == self.name


def run_name(run: Submitted) -> str:
    """Return the name of a run's folder; empty where fl-bn did not submit the run."""
    return str(run.config.get("resume") or run.config.get("name") or "")


class QueueStore:
    """Read and change the entries of a queue. Changes need the lock (``locked``); reading does not.

    Args:
        folder: The folder of the queue. ``locked`` makes it where it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / DATABASE

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Lock the queue against changes by other processes, inside the ``with`` block.

        Yields:
            The descriptor of the lock file. The queue also stays locked while a child process that has inherited
            the descriptor runs.

        Raises:
            NoQueue: This user may not write to the folder.
            QueueError: The queue cannot be written, or another process holds the lock for too long.
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
                            f"another fl-bn has locked {self.folder} for {LOCK_TIMEOUT:.0f} s: find the process that hangs, and end it"
                        ) from error
                    time.sleep(0.05)
            self._prepare()
            yield lock.fileno()

    def entries(self, *states: str) -> list[QueuedRun]:
        """Return the entries in one of ``states``, in the order of their numbers. Without ``states``, return all entries.

        Raises:
            QueueError: The database cannot be read.
        """
        chosen = f"WHERE state IN ({', '.join('?' * len(states))})" if states else ""
        return self._select(f"{chosen} ORDER BY number", states)

    def find(self, number: int) -> QueuedRun | None:
        """Return the entry with this ``number``; None where no entry has it.

        Raises:
            QueueError: The database cannot be read.
        """
        return next(iter(self._select("WHERE number = ?", (number,))), None)

    def add(self, entry: QueuedRun) -> QueuedRun:
        """Add ``entry`` at the end of the queue, and return it with its number. Numbers are never used again.

        Raises:
            QueueError: The queue cannot be written, for example because the disk is full. The queue has not changed.
        """
        with self._transaction() as connection:
            return replace(entry, number=_insert(connection, entry, None))

    def update(self, entry: QueuedRun) -> None:
        """Replace the entry that has the number of ``entry``.

        Raises:
            QueueError: The queue cannot be written, and has not changed.
        """
        with self._transaction() as connection:
            columns = ", ".join(f"{name} = :{name}" for name in _names())
            connection.execute(f"UPDATE runs SET {columns} WHERE number = :number", _row(entry))

    def keep_package(self, code: str, content: bytes) -> None:
        """Store the package (FAB archive) of a run that waits.

        Args:
            code: The SHA-256 of the package, in hexadecimal digits.
            content: The bytes of the package.

        Raises:
            QueueError: The package cannot be written, for example because the disk is full.
        """
        with self._errors():
            write(self._package(code), content)

    def package(self, code: str) -> bytes:
        """Return the package with the SHA-256 ``code``, which ``keep_package`` has stored.

        Raises:
            OSError: There is no such package.
        """
        return self._package(code).read_bytes()

    def forget_packages(self, needed: Collection[str]) -> None:
        """Delete all packages except those whose SHA-256 is in ``needed``."""
        for path in self.folder.glob(f"*{PACKAGE}"):
            if path.name.removesuffix(PACKAGE) not in needed:
                path.unlink(missing_ok=True)

    def _package(self, code: str) -> Path:
        return self.folder / f"{code}{PACKAGE}"

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove the entries with these ``numbers``.

        Raises:
            QueueError: The queue cannot be written, and has not changed.
        """
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
            if self._version(connection) == 0:  # the file is empty, since a process was killed before it made the table
                return []
            try:
                return [_queued_run(row) for row in connection.execute(f"SELECT * FROM runs {which}", values)]
            except (ValueError, TypeError) as error:
                raise QueueError(f"a run in {self.path} cannot be read ({error}): move the file away, and submit the runs again") from error

    def _connect(self) -> sqlite3.Connection:
        where = f"{self.path.absolute().as_uri()}?mode=rw"  # rw: raise where the file does not exist
        connection = sqlite3.connect(where, uri=True, timeout=BUSY_TIMEOUT, isolation_level=None)
        connection.execute("PRAGMA synchronous = EXTRA")  # a committed change survives a power cut
        return connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._errors(), closing(self._connect()) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")  # where the block raises, this is not reached, and closing rolls the change back

    def _prepare(self) -> None:
        """Make the table, or add the columns that version 1 lacks. Move runs from the files of an even older version into the table."""
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
        """Return the version of the table; 0: there is no table yet.

        Raises:
            QueueError: A newer fl-bn made the table.
        """
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        if version > VERSION:
            raise QueueError(
                f"{self.path} was written by a newer fl-bn (table version {version}, but this fl-bn reads {VERSION}): install the newer "
                "fl-bn again, or move the file away and submit the runs again"
            )
        return version

    def _old_files(self) -> list[Path]:
        """Return the files of an earlier version's queue: a JSON file per run, and a file with the last number."""
        return [*sorted(self.folder.glob("[0-9]*.json")), *self.folder.glob(LAST)]

    def _take_over(self, old: Sequence[Path]) -> None:
        """Enter the runs from the ``old`` files into the table.

        After an interruption this can be called again: a run that was entered before is left out.
        """
        with self._transaction() as connection:
            for path in old:
                try:
                    text = path.read_text(encoding="utf-8")
                    entry = None if path.name == LAST else _old_queued_run(text)
                    last = int(text) if entry is None else entry.number
                except (OSError, ValueError, TypeError) as error:
                    again = "" if path.name == LAST else ", and submit again the run that it held"
                    raise QueueError(f"{path} cannot be read ({error}): move it away{again}") from error
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
        """Raise errors of the disk and of SQLite in the ``with`` block as a QueueError that says what to do."""
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
                raise QueueError(
                    f"{self.path} cannot be read ({error}): move it away, and submit again the runs that waited in it"
                ) from error
            raise self._unwritten(error, name.startswith("SQLITE_READONLY")) from error
        except OSError as error:
            raise self._unwritten(error.strerror or error, error.errno in READ_ONLY) from error

    def _unwritten(self, reason: object, read_only: bool) -> QueueError:
        advice = "use the user who runs `fl-bn start` of the server" if read_only else "make room on that disk"
        return (NoQueue if read_only else QueueError)(
            f"the queue in {self.folder} cannot be written ({reason}): {advice}. "
            "The waiting runs are still in the queue, and no other run was added"
        )


def _names() -> tuple[str, ...]:
    """Return the names of all columns of the table except ``number``."""
    return tuple(spec.name for spec in fields(QueuedRun) if spec.name != "number")


def _insert(connection: sqlite3.Connection, entry: QueuedRun, number: int | None) -> int:
    """Insert ``entry`` into the table with this ``number`` (None: the next free number), and return the number."""
    columns = ("number", *_names())
    values = f"({', '.join(columns)}) VALUES ({', '.join(f':{name}' for name in columns)})"
    return connection.execute(f"INSERT INTO runs {values}", {**_row(entry), "number": number}).lastrowid or 0


def _row(entry: QueuedRun) -> dict[str, Any]:
    return {**asdict(entry), "config": json.dumps(entry.config), "earlier_runs": json.dumps(entry.earlier_runs)}


def _queued_run(row: sqlite3.Row) -> QueuedRun:
    values = dict(row)
    return QueuedRun(**{**values, "config": json.loads(values["config"]), "earlier_runs": tuple(json.loads(values["earlier_runs"]))})


def _old_queued_run(text: str) -> QueuedRun:
    """Return the entry that an earlier version wrote as ``text`` in JSON.

    Raises:
        ValueError: The text is not JSON, or has no key ``before``.
        TypeError: Another key is missing or unknown.
    """
    values = json.loads(text)
    if "before" not in values:
        raise ValueError("it has no key 'before'")
    return QueuedRun(**{name: value for name, value in values.items() if name != "before"}, earlier_runs=tuple(values["before"]))
