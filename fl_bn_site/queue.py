"""Start the runs that wait for their turn, in the order in which they were submitted.

Every change is made under one lock and is on the disk before the next step. Each process that looks after the queue (``fl-bn start`` of
the server, every ``fl-bn submit`` that waits) starts what may start. Where one of them is killed, no run is lost or started twice.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from fl_bn.support.flower_config import Scalar, flower_config
from fl_bn_site.control import Control, ControlError, NotRegistered
from fl_bn_site.folders import FolderError, ServerFolder
from fl_bn_site.project import project_of, stage
from fl_bn_site.queue_store import DROPPED, REFUSED, STARTED, STARTING, WAITING, QueuedRun, QueueError, QueueStore, run_name
from fl_bn_site.registered import Submitted

FINISHED_ENTRIES = 50  # that are kept, of runs that were started, refused or dropped
FREE_MEMORY = 1024  # MiB of this machine's memory that are free before a run starts beside another
FREE_DISK = 32  # MiB of the state's disk that are free before a run starts
CHECKPOINT_EVERY = 5  # rounds, unless the run config says otherwise: from there fl-bn resume goes on


class NameTaken(ValueError):
    """Another run has this name."""


class Queue:
    """The queue of one server.

    Args:
        server: The server's folder.
    """

    def __init__(self, server: ServerFolder) -> None:
        self.server, self.store = server, QueueStore(server.state / "queue")

    def waiting(self) -> list[QueuedRun]:
        """Return the runs that have not been started, in their order. Raises QueueError where the queue cannot be read."""
        return self.store.entries(WAITING, STARTING)

    def add(self, config: Mapping[str, Scalar], parallel: int = 0, rename: bool = True) -> QueuedRun:
        """Put a run at the end.

        Args:
            config: Keys of the run config, with a ``name`` or with ``resume``.
            parallel: The number of runs at a time that it may be one of; 0: as server.toml says.
            rename: Add a number to a name that is taken.

        Raises:
            NameTaken: Another run has the name, or the run to resume waits already.
            NoQueue: The folder may not be written to.
            QueueError: The disk is full, say. The run is then not in the queue.
        """
        with self.store.locked():
            entries = self.store.entries()
            resumes, name = str(config.get("resume") or ""), str(config.get("name") or "")
            if resumes and resumes in {entry.name for entry in entries if entry.state in (WAITING, STARTING)}:
                raise NameTaken(f"{resumes} waits in the queue already: `fl-bn runs {self.server.path}` shows it")
            if not resumes:
                free = self._free_name(name, {entry.name for entry in entries if entry.state not in (REFUSED, DROPPED)})
                if free != name and not rename:
                    raise NameTaken(
                        f"another run here is called {name}: give another name, or go on with it: fl-bn resume {self.server.path} {name}"
                    )
                name = free
            values = dict(config) | ({} if resumes else {"name": name})
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            return self.store.add(QueuedRun(0, resumes or name, values, parallel, now, submitter=whoami()))

    def remove(self, entry: QueuedRun) -> bool:
        """Take out a run that waits; its entry stays and says so. Return False where it no longer waits.

        Raises QueueError where the queue cannot be written.
        """
        with self.store.locked():
            if (current := self.store.find(entry.number)) is None or current.state != WAITING:
                return False
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            self.store.update(replace(current, state=DROPPED, why=f"taken out of the queue by {whoami()} at {now}"))
            return True

    def dispatch(self, control: Control) -> dict[int, str]:
        """Start what may start. server.toml is read anew each time, since sites come and go.

        Returns:
            By number, why each of the other runs waits.

        Raises:
            ControlError: The SuperLink does not answer.
            FolderError: server.toml cannot be read.
            QueueError: The queue cannot be written. The runs that could have started wait.
        """
        with self.store.locked() as lock:
            self.server = ServerFolder.read(self.server.path)
            entries = [self._settle(entry, control) for entry in self.store.entries()]
            self._forget(entries)
            why: dict[int, str] = {}
            active = [run for run in control.runs() if not run.status.startswith("finished")]
            for entry in entries:
                if entry.state == WAITING and (reason := self._obstacle(entry, active) or self._start(entry, active, control, lock)):
                    why[entry.number] = reason
            return why

    def complete_config(self, given: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Return the keys that follow from the server's folder, and those of ``given``, which win."""
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
        """Return the sites of a run by client index; none where its clients are not the sites of server.toml."""
        if names := [name for name in str(config.get("client-names") or "").split(",") if name]:
            return names
        return list(self.server.sites) if config["clients"] == len(self.server.sites) else []

    def submit(self, given: Mapping[str, Scalar], control: Control) -> str:
        """Submit a run to the SuperLink now, without a queue.

        Returns:
            Flower's id of the run.

        Raises:
            ControlError: The SuperLink does not answer, or refuses the run.
            FolderError: A file of the project cannot be read, or a site of the run is no longer in server.toml.
        """
        return self._send(self._add_sites(given, control), control)

    def _add_sites(self, given: Mapping[str, Scalar], control: Control) -> dict[str, Scalar]:
        """Return the whole run config of ``given``. Its clients are the sites, each with the node that has the site's key."""
        server, config = self.server, self.complete_config(given)
        names = self.sites(config)
        if missing := [name for name in names if name not in server.sites]:
            run = config.get("resume") or config.get("name")
            raise FolderError(f"{', '.join(missing)} took part in {run}, but is no longer a site in {server.path / server.file}")
        if names and not config.get("client-nodes"):
            config["client-nodes"] = ",".join(map(str, control.nodes([server.public_key(name) for name in names])))
            config["client-names"] = ",".join(names)
        return config

    def _send(self, config: Mapping[str, Scalar], control: Control, lock: int | None = None) -> str:
        with stage(project_of(self.server)) as app:
            return control.start_run(app, flower_config(config), lock)

    def _start(self, entry: QueuedRun, active: list[Submitted], control: Control, lock: int) -> str:
        """Start ``entry``, and add it to ``active``. Return why it is refused or has to wait; empty: it is started."""
        given = dict(entry.config)
        if "exchange-port" not in given:
            given["exchange-port"] = self._free_port(active)
        earlier, starting = tuple(run.id for run in control.runs()), entry
        try:
            config = self._add_sites(given, control)
            starting = replace(entry, state=STARTING, earlier_runs=earlier)
            self.store.update(starting)
            run = self._send(config, control, lock)
        except NotRegistered as error:  # `fl-bn register` may still be at work
            return str(error)
        except (ControlError, FolderError, OSError, ValueError) as error:
            known = control.runs()  # raises where the SuperLink itself is gone: then the run waits
            if full := self._disk_is_full():  # the SuperLink does not say so
                return full
            if (settled := self._settle(starting, control)).state == STARTED:
                active.extend(run for run in known if str(run.id) == settled.run)
                return ""
            self.store.update(replace(entry, state=REFUSED, why=str(error)))
            return str(error)
        with suppress(QueueError):  # the next look finds the run by its name
            self.store.update(replace(entry, state=STARTED, run=run))
            with suppress(ControlError):  # it says which code it has taken
                code = next((one.code for one in control.runs() if str(one.id) == run), "")
                self.store.update(replace(entry, state=STARTED, run=run, code=code))
        active.append(Submitted(int(run), "pending", given, None, None))
        return ""

    def _settle(self, entry: QueuedRun, control: Control) -> QueuedRun:
        """Find out whether a run was started by a process that was stopped meanwhile. Return its entry: started, or waiting again."""
        if entry.state != STARTING:
            return entry
        mine = [run for run in control.runs() if entry.started_as(run)]
        settled = replace(entry, state=WAITING, earlier_runs=())
        if mine:
            settled = replace(entry, state=STARTED, run=str(mine[-1].id), code=mine[-1].code)
        self.store.update(settled)
        return settled

    def _obstacle(self, entry: QueuedRun, active: Sequence[Submitted]) -> str:
        """Return why ``entry`` has to wait; empty: it may start."""
        most, others = entry.parallel or self.server.parallel, ", ".join(run_name(run) or str(run.id) for run in active)
        if len(active) >= most:
            return f"{others} {'is' if len(active) == 1 else 'are'} going on, and at most {most} may run at a time"
        if entry.name in {run_name(run) for run in active}:
            return f"the former run of {entry.name} is still going on"
        if active and (free := free_memory()) is not None and free < FREE_MEMORY:
            return f"{free} MiB of memory are free, and a run beside {others} takes {FREE_MEMORY}"
        if full := self._disk_is_full():
            return full
        if "exchange-port" not in entry.config and not self._free_port(active):
            first, last = self.server.exchange_port, self.server.last_exchange_port
            return f"all ports of the exchange, {first} to {last}, are in use: close what listens there, or raise exchange-ports"
        return ""

    def _disk_is_full(self) -> str:
        """Return which disk has too little room for a run: of the queue and the SuperLink, or of the copy that is sent; empty: none."""
        for folder in (self.server.state, Path(tempfile.gettempdir())):
            if (free := shutil.disk_usage(folder).free // 2**20) < FREE_DISK:
                return f"{free} MiB are free on the disk of {folder}, and a run takes {FREE_DISK}: make room there"
        return ""

    def _free_port(self, active: Sequence[Submitted]) -> int:
        """Return the first port of the exchange that neither a run nor another program of this machine uses; 0: there is none."""
        used = {int(run.config.get("exchange-port", 0)) for run in active}
        ports = range(self.server.exchange_port, self.server.last_exchange_port + 1)
        return next((port for port in ports if port not in used and is_free(port)), 0)

    def _free_name(self, name: str, taken: set[str]) -> str:
        """Return ``name``, with a number where it is one of ``taken``, or where a run's folder has it."""
        free, number = name, 1
        while free in taken or (self.server.results / free).exists():
            number += 1
            free = f"{name}-{number}"
        return free

    def _forget(self, entries: Sequence[QueuedRun]) -> None:
        """Remove the oldest runs that were started, refused or dropped."""
        if old := [entry.number for entry in entries if entry.state in (STARTED, REFUSED, DROPPED)][:-FINISHED_ENTRIES]:
            self.store.remove(old)


def whoami() -> str:
    """Return who types this command: USER@HOST, as this machine says."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in a container
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def free_memory() -> int | None:
    """Return the MiB of memory that programs could have; None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    return next((int(line.split()[1]) // 1024 for line in text.splitlines() if line.startswith("MemAvailable:")), None)


def is_free(port: int) -> bool:
    """Return whether no program listens on ``port`` of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
