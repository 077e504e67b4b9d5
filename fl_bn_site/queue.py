"""Runs that wait for their turn: a file each below the server's ``state/queue``, started in the order in which they came.

Every change is made under one lock and is on the disk before the next step. Whoever looks (``fl-bn start`` of the server, every ``fl-bn
submit`` that waits) starts what may start; nothing is lost or started twice when one of them is killed in between.
"""

from __future__ import annotations

import errno
import json
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fl_bn.support import durable
from fl_bn.support.flower_config import Scalar, flower_config
from fl_bn.support.locks import hold
from fl_bn_site.control import ANSWER, Control, ControlError, NotRegistered
from fl_bn_site.folders import FolderError, ServerFolder
from fl_bn_site.project import project_of, staged
from fl_bn_site.registered import Submitted

WAITING, STARTING, STARTED, REFUSED = "waiting", "starting", "started", "refused"
KEPT = 50  # files of runs that have been started
LAST = "last"  # the file with the last number that was given
ROOM = 1024  # MiB of this machine's memory that are free before a run starts beside another
DISK = 32  # MiB of the state's disk that are free before a run starts
PATIENCE = ANSWER + 60  # seconds that the lock is waited for: longer than one takes who starts a run
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
CHECKPOINT_EVERY = 5  # rounds, unless told otherwise: from there fl-bn resume goes on


class QueueError(RuntimeError):
    """The queue's files cannot be read or written; the message says where, and what to do."""


class NoQueue(QueueError):
    """This folder may not be written to: there is no queue here."""


class NameTaken(ValueError):
    """Another run has this name."""


@dataclass(frozen=True)
class Entry:
    """A run in the queue. ``config``: the keys that the user gave, and its name; ``parallel``: runs at a time that it may be one of, 0: as
    server.toml says; ``state``: waiting, starting, started, refused; ``before``: the runs that there were when it was being started;
    ``run``: Flower's id; ``why`` it was refused."""

    number: int
    name: str
    config: dict[str, Any]
    parallel: int = 0
    submitted: str = ""
    state: str = WAITING
    before: tuple[int, ...] = ()
    run: str = ""
    why: str = ""

    def started_as(self, run: Submitted) -> bool:
        """Whether ``run`` is what became of this one since it was being started."""
        return self.state == STARTING and run.id not in self.before and run_name(run) == self.name


class Queue:
    """The queue of ``server``."""

    def __init__(self, server: ServerFolder) -> None:
        self.server, self.folder = server, server.state / "queue"

    def entries(self) -> list[Entry]:
        """All that have a file, in the order in which they came. Raises QueueError."""
        found = []
        for path in sorted(self.folder.glob("[0-9]*.json")):
            try:
                values = json.loads(path.read_text(encoding="utf-8"))
                found.append(Entry(**{**values, "before": tuple(values["before"])}))
            except FileNotFoundError:  # taken out since it was listed
                continue
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise QueueError(f"{path} cannot be read ({error}): move it away, and submit that run again") from error
        return found

    def waiting(self) -> list[Entry]:
        return [entry for entry in self.entries() if entry.state in (WAITING, STARTING)]

    def find(self, number: int) -> Entry | None:
        return next((entry for entry in self.entries() if entry.number == number), None)

    def add(self, config: Mapping[str, Scalar], parallel: int = 0, rename: bool = True) -> Entry:
        """Put a run at the end. ``config`` has a ``name``, to which a number is added where it is taken, if ``rename``, or ``resume``.

        Raises:
            NameTaken: another run has the name, or the run that is to go on waits already.
            NoQueue: the folder may not be written to.
            QueueError: the disk is full, say; nothing of it is left then.
        """
        with self._locked():
            entries = self.entries()
            resumes, name = str(config.get("resume") or ""), str(config.get("name") or "")
            taken = {entry.name for entry in entries if entry.state != REFUSED}
            if resumes and resumes in {entry.name for entry in entries if entry.state in (WAITING, STARTING)}:
                raise NameTaken(f"{resumes} waits in the queue already: `fl-bn runs {self.server.path}` shows it")
            if not resumes:
                free = self._free(name, taken)
                if free != name and not rename:
                    raise NameTaken(
                        f"another run here is called {name}: give another name, or go on with it: fl-bn resume {self.server.path} {name}"
                    )
                name = free
            number = self._next(entries)
            values = dict(config) | ({} if resumes else {"name": name})
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            entry = Entry(number, resumes or name, values, parallel, now)
            self._write(entry)
            return entry

    def remove(self, entry: Entry) -> bool:
        """Take a run out that waits; False: it does no more. Raises QueueError."""
        with self._locked():
            if (now := self.find(entry.number)) is None or now.state != WAITING:
                return False
            self._path(entry).unlink()
            return True

    def dispatch(self, control: Control) -> dict[int, str]:
        """Start what may start, as server.toml says now: sites come and go. Returns, by number, why the others wait.

        Raises:
            ControlError: the SuperLink does not answer.
            FolderError: server.toml cannot be read.
            QueueError: the queue's files cannot be written; what was to start waits.
        """
        with self._locked() as lock:
            self.server = ServerFolder.read(self.server.path)
            entries = [self._settled(entry, control) for entry in self.entries()]
            self._forget(entries)
            why: dict[int, str] = {}
            active = [run for run in control.runs() if not run.status.startswith("finished")]
            for entry in entries:
                if entry.state == WAITING and (reason := self._obstacle(entry, active) or self._start(entry, active, control, lock)):
                    why[entry.number] = reason
            return why

    def completed(self, given: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """The run config of a run that ``given`` was submitted with: all keys that follow from the folder, and ``given``, which wins."""
        server = self.server
        of_folder: dict[str, Scalar] = {
            "clients": len(server.sites),
            "output": str(server.results),
            "checkpoint-every": CHECKPOINT_EVERY,
            "exchange-host": server.exchange_host,
            "exchange-port": server.exchange_port,
            "exchange-join-timeout": 120.0,  # at Flower's pace a slow machine starts half a minute after the others
            "exchange-certificate": str(server.certificate),
            "exchange-key": str(server.key),
            "exchange-authority": str(server.authority),
        }
        return of_folder | dict(given)

    def sites(self, config: Mapping[str, Scalar]) -> list[str]:
        """The sites of a run, by client index; none where its clients are others than the sites of server.toml."""
        if names := [name for name in str(config.get("client-names") or "").split(",") if name]:
            return names
        return list(self.server.sites) if config["clients"] == len(self.server.sites) else []

    def submit(self, given: Mapping[str, Scalar], control: Control) -> str:
        """Submit a run to the SuperLink now, without a queue; Flower's id of it.

        Raises:
            ControlError, FolderError: it could not be submitted.
        """
        return self._sent(self._addressed(given, control), control)

    def _addressed(self, given: Mapping[str, Scalar], control: Control) -> dict[str, Scalar]:
        """The run config of ``given``: its clients are the sites, each with the node that has its key."""
        server, config = self.server, self.completed(given)
        names = self.sites(config)
        if gone := [name for name in names if name not in server.sites]:
            raise FolderError(f"{', '.join(gone)} took part in {config.get('resume') or config.get('name')}, and is no more a site here")
        if names and not config.get("client-nodes"):
            config["client-nodes"] = ",".join(map(str, control.nodes([server.public_key(name) for name in names])))
            config["client-names"] = ",".join(names)
        return config

    def _sent(self, config: Mapping[str, Scalar], control: Control, lock: int | None = None) -> str:
        with staged(project_of(self.server)) as app:
            return control.start_run(app, flower_config(config), lock)

    def _start(self, entry: Entry, active: list[Submitted], control: Control, lock: int) -> str:
        """Start ``entry``, which is one of ``active`` then. Why it is refused or has to wait; empty: it is started."""
        given = dict(entry.config)
        if "exchange-port" not in given:
            given["exchange-port"] = self._port(active)
        before, starting = tuple(run.id for run in control.runs()), entry
        try:
            config = self._addressed(given, control)
            starting = replace(entry, state=STARTING, before=before)
            self._write(starting)
            run = self._sent(config, control, lock)
        except NotRegistered as error:  # `fl-bn register` is on its way, say
            return str(error)
        except (ControlError, FolderError, OSError, ValueError) as error:
            known = control.runs()  # else it is the SuperLink that is gone, and the run waits
            if full := self._full():  # of which the SuperLink does not tell
                return full
            if (settled := self._settled(starting, control)).state == STARTED:
                active.extend(run for run in known if str(run.id) == settled.run)
                return ""
            self._write(replace(entry, state=REFUSED, why=str(error)))
            return str(error)
        with suppress(QueueError):  # then it is found by its name, the next time
            self._write(replace(entry, state=STARTED, run=run))
        active.append(Submitted(int(run), "pending", given, None, None))
        return ""

    def _settled(self, entry: Entry, control: Control) -> Entry:
        """What became of a run that was being started when whoever did it was stopped: it is started, or waits."""
        if entry.state != STARTING:
            return entry
        mine = [run for run in control.runs() if entry.started_as(run)]
        settled = replace(entry, state=STARTED, run=str(mine[-1].id)) if mine else replace(entry, state=WAITING, before=())
        self._write(settled)
        return settled

    def _obstacle(self, entry: Entry, active: Sequence[Submitted]) -> str:
        """Why ``entry`` has to wait; empty: it need not."""
        most, others = entry.parallel or self.server.parallel, ", ".join(run_name(run) or str(run.id) for run in active)
        if len(active) >= most:
            return f"{others} {'is' if len(active) == 1 else 'are'} going on, and {most} may at a time"
        if entry.name in {run_name(run) for run in active}:
            return f"{entry.name} itself is going on still"
        if active and (room := available()) is not None and room < ROOM:
            return f"{room} MiB of memory are free, and a run beside {others} takes {ROOM}"
        if full := self._full():
            return full
        if "exchange-port" not in entry.config and not self._port(active):
            first, last = self.server.exchange_port, self.server.last_exchange_port
            return f"all ports of the exchange, {first} to {last}, are in use: close what listens there, or raise exchange-ports"
        return ""

    def _full(self) -> str:
        """What is missing on the disk of the queue and the SuperLink, or of the copy that is sent; empty: nothing."""
        for folder in (self.server.state, Path(tempfile.gettempdir())):
            if (free := shutil.disk_usage(folder).free // 2**20) < DISK:
                return f"{free} MiB are free on the disk of {folder}, and a run takes {DISK}: make room there"
        return ""

    def _port(self, active: Sequence[Submitted]) -> int:
        """The first port of the exchange's range that no run has, and that nobody listens on here; 0: none."""
        held = {int(run.config.get("exchange-port", 0)) for run in active}
        ports = range(self.server.exchange_port, self.server.last_exchange_port + 1)
        return next((port for port in ports if port not in held and is_free(port)), 0)

    def _free(self, name: str, taken: set[str]) -> str:
        """``name``, with a number where a run has it, or has had it."""
        free, number = name, 1
        while free in taken or (self.server.results / free).exists():
            number += 1
            free = f"{name}-{number}"
        return free

    def _next(self, entries: Sequence[Entry]) -> int:
        """A number that no run has had, also none that was taken out: somebody may wait for that one still."""
        path = self.folder / LAST
        try:
            last = int(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            last = 0
        except (OSError, ValueError) as error:
            raise QueueError(f"{path} cannot be read ({error}): move it away") from error
        number = 1 + max([last, *(entry.number for entry in entries)])
        with self._as_queue_error():
            durable.write(path, f"{number}\n".encode())
        return number

    def _forget(self, entries: Sequence[Entry]) -> None:
        done = [entry for entry in entries if entry.state in (STARTED, REFUSED)]
        for entry in done[:-KEPT]:
            self._path(entry).unlink(missing_ok=True)

    def _path(self, entry: Entry) -> Path:
        return self.folder / f"{entry.number:06}.json"

    def _write(self, entry: Entry) -> None:
        with self._as_queue_error():
            durable.write(self._path(entry), (json.dumps(asdict(entry), indent=1) + "\n").encode())

    @contextmanager
    def _as_queue_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kind = NoQueue if error.errno in READ_ONLY else QueueError
            raise kind(
                f"the queue in {self.folder} cannot be written ({error.strerror or error}): make room on that disk. No run was "
                "lost: those that wait are there as before, and no other came in"
            ) from error

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the queue; the descriptor of its lock, which a child that has it holds, too, for as long as it lives."""
        with self._as_queue_error():
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = (self.folder / ".lock").open("a")
        with lock:
            end = time.monotonic() + PATIENCE
            while True:
                try:
                    hold(lock)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > end:
                        raise QueueError(f"{self.folder} is held by another fl-bn for {PATIENCE:.0f} s: see what hangs there") from error
                    time.sleep(0.05)
            yield lock.fileno()


def run_name(run: Submitted) -> str:
    """The name of the run's folder; empty where it was not submitted by fl-bn."""
    return str(run.config.get("resume") or run.config.get("name") or "")


def available() -> int | None:
    """MiB of memory that programs could have; None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    return next((int(line.split()[1]) // 1024 for line in text.splitlines() if line.startswith("MemAvailable:")), None)


def is_free(port: int) -> bool:
    """Whether nobody listens on ``port`` of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
