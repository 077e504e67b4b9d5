"""Start waiting runs in the order in which they were submitted.

Several processes serve the same queue: ``fl-bn start`` of the server, and every ``fl-bn submit`` that waits. Each
of them starts any run that may start. They change the queue under one lock, and write each change to the disk
before the next step. So no run is lost, or started twice, when one of them is killed.
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
from fl_bn_site.project import build
from fl_bn_site.queue_store import DROPPED, REFUSED, STARTED, STARTING, WAITING, QueuedRun, QueueError, QueueStore, run_name
from fl_bn_site.registered import Submitted
from fl_bn_site.submitters import Package

FINISHED_ENTRIES = 50  # entries of started, refused or dropped runs that are kept; older ones are deleted
FREE_MEMORY = 1024  # MiB of memory that must be free before a run starts beside another
FREE_DISK = 32  # MiB that must be free on the disks of the state and of temporary files before a run starts
CHECKPOINT_EVERY = 5  # rounds between checkpoints, from which fl-bn resume goes on, unless the run config has the key


class NameTaken(ValueError):
    """Signal that another run has this name, or that the run to resume is in the queue already."""


class Queue:
    """Queue runs for one server, and start them when their turn comes.

    Args:
        server: The server's folder.
    """

    def __init__(self, server: ServerFolder) -> None:
        self.server, self.store = server, QueueStore(server.state / "queue")

    def waiting(self) -> list[QueuedRun]:
        """Return the runs that have not been started, the next one first.

        Raises:
            QueueError: The queue cannot be read.
        """
        return self.store.entries(WAITING, STARTING)

    def add(self, config: Mapping[str, Scalar], parallel: int = 0, rename: bool = True, package: Package | None = None) -> QueuedRun:
        """Add a run at the end of the queue.

        Args:
            config: The keys of the run config. ``name`` is the name of a new run, ``resume`` that of a run to resume.
            parallel: How many runs may be active while this run is active, itself included; 0: the number in
                server.toml.
            rename: What to do where another run has the name. True: append a number to the name. False: raise NameTaken.
            package: The package of the run, with the key that signs it. The entry gets the package's hash and the signature,
                and the queue keeps the package until the run starts. None: the project is packed when the run starts.

        Returns:
            The new entry, with its number and the name of the run's folder.

        Raises:
            NameTaken: Another run has the name, or the run to resume waits in the queue already.
            NoQueue: This user may not write to the folder of the queue.
            QueueError: The queue cannot be written, for example because the disk is full. The run was not added.
        """
        with self.store.locked():
            entries = self.store.entries()
            resumes, name = str(config.get("resume") or ""), str(config.get("name") or "")
            if resumes and resumes in {entry.name for entry in entries if entry.state in (WAITING, STARTING)}:
                raise NameTaken(f"{resumes} is in the queue already, so it cannot be resumed again: see `fl-bn runs {self.server.path}`")
            if not resumes:
                free = self._free_name(name, {entry.name for entry in entries if entry.state not in (REFUSED, DROPPED)})
                if free != name and not rename:
                    raise NameTaken(
                        f"another run here is called {name}: give another name, or resume that run: fl-bn resume {self.server.path} {name}"
                    )
                name = free
            values = dict(config) | ({} if resumes else {"name": name})
            if package:
                values |= package.signed(self.complete_config(values))
                self.store.keep_package(package.code, package.content)
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            code = package.code if package else ""
            return self.store.add(QueuedRun(0, resumes or name, values, parallel, now, submitter=whoami(), code=code))

    def remove(self, entry: QueuedRun) -> bool:
        """Take a waiting run out of the queue. Its entry stays, and says who took the run out, and when.

        Args:
            entry: The run.

        Returns:
            Whether the run was taken out; False where it was started or taken out before.

        Raises:
            QueueError: The queue cannot be written.
        """
        with self.store.locked():
            if (current := self.store.find(entry.number)) is None or current.state != WAITING:
                return False
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            self.store.update(replace(current, state=DROPPED, why=f"taken out of the queue by {whoami()} at {now}"))
            return True

    def dispatch(self, control: Control) -> dict[int, str]:
        """Start every waiting run that may start now.

        server.toml is read again each time, since sites may have been added or removed.

        Args:
            control: The SuperLink that starts the runs.

        Returns:
            Number -> reason, for each run that still waits, and for each run that was refused now.

        Raises:
            ControlError: The SuperLink does not answer.
            FolderError: server.toml cannot be read.
            QueueError: The queue cannot be written. The runs go on waiting.
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
        """Return ``given`` and the run-config keys that follow from the server's folder, such as ``clients`` and ``output``.

        Where ``given`` has such a key, the value in ``given`` stays.
        """
        server = self.server
        of_folder: dict[str, Scalar] = {
            "clients": len(server.sites),
            "output": str(server.results),
            "checkpoint-every": CHECKPOINT_EVERY,
            "exchange-host": server.exchange_host,
            "exchange-port": server.exchange_port,
            "exchange-join-timeout": 120.0,  # a slow site may start half a minute after the others
            "exchange-certificate": str(server.certificate),
            "exchange-key": str(server.key),
            "exchange-authority": str(server.authority),
        }
        return of_folder | dict(given)

    def sites(self, config: Mapping[str, Scalar]) -> list[str]:
        """Return the names of the sites that take part in a run, in the order of the clients.

        Args:
            config: The whole run config.

        Returns:
            The names at ``client-names``. Without such names, those of server.toml; empty where ``clients`` is not the number
            of sites.
        """
        if names := [name for name in str(config.get("client-names") or "").split(",") if name]:
            return names
        return list(self.server.sites) if config["clients"] == len(self.server.sites) else []

    def submit(self, given: Mapping[str, Scalar], control: Control, package: Package | None = None) -> str:
        """Submit a run to the SuperLink at once, without the queue.

        Args:
            given: The keys of the run config.
            control: The SuperLink.
            package: As for ``add``.

        Returns:
            Flower's id of the run.

        Raises:
            ControlError: The SuperLink does not answer, or refuses the run.
            FolderError: A file of the project cannot be read, or a site of the run is not in server.toml any more.
        """
        values = dict(given) | (package.signed(self.complete_config(given)) if package else {})
        return self._send(self._add_sites(values, control), control, package.content if package else None)

    def _add_sites(self, given: Mapping[str, Scalar], control: Control) -> dict[str, Scalar]:
        """Return the whole run config for the keys in ``given``.

        The sites are the clients of the run. ``client-nodes`` gets the id of each site's Flower node, found by the public key.

        Raises:
            FolderError: A client of the run is not a site in server.toml any more.
        """
        server, config = self.server, self.complete_config(given)
        names = self.sites(config)
        if missing := [name for name in names if name not in server.sites]:
            run = config.get("resume") or config.get("name")
            raise FolderError(
                f"clients of the run {run} are not sites in {server.path / server.file} any more: {', '.join(missing)}. "
                "Add them again (`fl-bn kit add-site`), or submit a new run"
            )
        if names and not config.get("client-nodes"):
            config["client-nodes"] = ",".join(map(str, control.nodes([server.public_key(name) for name in names])))
            config["client-names"] = ",".join(names)
        return config

    def _send(self, config: Mapping[str, Scalar], control: Control, package: bytes | None, lock: int | None = None) -> str:
        sent = Package(build(self.server) if package is None else package)
        with tempfile.NamedTemporaryFile(prefix="fl-bn-", suffix=".fab") as file:
            file.write(sent.content)
            file.flush()
            return control.start_run(Path(file.name), flower_config(sent.known(config)), lock)

    def _start(self, entry: QueuedRun, active: list[Submitted], control: Control, lock: int) -> str:
        """Start the run of ``entry``, and add it to ``active``.

        Args:
            entry: A waiting run.
            active: The runs that have started and not ended.
            control: The SuperLink.
            lock: The descriptor of the queue's lock, which stays held until the run is submitted.

        Returns:
            Why the run was refused, or has to wait; empty: the run was started.

        Raises:
            ControlError: The SuperLink does not answer.
            QueueError: The queue cannot be written.
        """
        given = dict(entry.config)
        if "exchange-port" not in given:
            given["exchange-port"] = self._free_port(active)
        earlier, starting = tuple(run.id for run in control.runs()), entry
        try:
            config = self._add_sites(given, control)
            starting = replace(entry, state=STARTING, earlier_runs=earlier)
            self.store.update(starting)
            run = self._send(config, control, self.store.package(entry.code) if entry.code else None, lock)
        except NotRegistered as error:  # the run waits, since `fl-bn register` may not have finished yet
            return str(error)
        except (ControlError, FolderError, OSError, ValueError) as error:
            known = control.runs()  # raises where the SuperLink does not answer at all: then the run waits
            if full := self._disk_is_full():  # errors of a full disk do not name it as their cause
                return full
            if (settled := self._settle(starting, control)).state == STARTED:
                active.extend(run for run in known if str(run.id) == settled.run)
                return ""
            self.store.update(replace(entry, state=REFUSED, why=str(error)))
            return str(error)
        with suppress(QueueError):  # the next dispatch finds the run by its name
            self.store.update(replace(entry, state=STARTED, run=run))
            with suppress(ControlError):  # the SuperLink says which code it has received
                code = next((one.code for one in control.runs() if str(one.id) == run), "")
                self.store.update(replace(entry, state=STARTED, run=run, code=code))
        active.append(Submitted(int(run), "pending", given, None, None))
        return ""

    def _settle(self, entry: QueuedRun, control: Control) -> QueuedRun:
        """Find out whether the run of an entry in the state ``starting`` was started, and correct the state.

        A process that is killed while it starts a run leaves an entry in this state.

        Returns:
            The entry: ``started`` where the SuperLink has the run, else ``waiting`` again. Entries in any other
            state are returned unchanged.
        """
        if entry.state != STARTING:
            return entry
        mine = [run for run in control.runs() if entry.started_as(run)]
        settled = replace(entry, state=WAITING, earlier_runs=())
        if mine:
            settled = replace(entry, state=STARTED, run=str(mine[-1].id), code=mine[-1].code)
        self.store.update(settled)
        return settled

    def _obstacle(self, entry: QueuedRun, active: Sequence[Submitted]) -> str:
        """Return why the run of ``entry`` cannot start while the ``active`` runs are running; empty: it may start."""
        most, others = entry.parallel or self.server.parallel, ", ".join(run_name(run) or str(run.id) for run in active)
        if len(active) >= most:
            return f"{others} {'is' if len(active) == 1 else 'are'} going on, and at most {most} may run at a time"
        if entry.name in {run_name(run) for run in active}:
            return f"{entry.name} cannot be resumed yet, since the run to resume is still going on"
        if active and (free := free_memory()) is not None and free < FREE_MEMORY:
            return f"{free} MiB of memory are free, but {FREE_MEMORY} must be free to start a run beside {others}"
        if full := self._disk_is_full():
            return full
        if "exchange-port" not in entry.config and not self._free_port(active):
            first, last = self.server.exchange_port, self.server.last_exchange_port
            return f"all ports of the exchange, {first} to {last}, are in use: end the programs that listen there, or raise exchange-ports"
        return ""

    def _disk_is_full(self) -> str:
        """Return a sentence about the disk that has too little room to start a run; empty: both disks have room.

        The disk of ``state`` holds the queue and the SuperLink's database. The disk of temporary files holds the
        copy of the app that is sent.
        """
        for folder in (self.server.state, Path(tempfile.gettempdir())):
            if (free := shutil.disk_usage(folder).free // 2**20) < FREE_DISK:
                return f"{free} MiB are free on the disk of {folder}, but {FREE_DISK} must be free to start a run: make room there"
        return ""

    def _free_port(self, active: Sequence[Submitted]) -> int:
        """Return the first port for the layer-wise exchange that no active run and no other program uses; 0: all are in use."""
        used = {int(run.config.get("exchange-port", 0)) for run in active}
        ports = range(self.server.exchange_port, self.server.last_exchange_port + 1)
        return next((port for port in ports if port not in used and is_free(port)), 0)

    def _free_name(self, name: str, taken: set[str]) -> str:
        """Return ``name``, or ``NAME-2``, ``NAME-3``, ... if it is in ``taken`` or a folder in ``results`` has it."""
        free, number = name, 1
        while free in taken or (self.server.results / free).exists():
            number += 1
            free = f"{name}-{number}"
        return free

    def _forget(self, entries: Sequence[QueuedRun]) -> None:
        """Delete the entries of started, refused and dropped runs, except the last ``FINISHED_ENTRIES`` of them.

        Also delete the packages, except those of runs that wait or are being started.
        """
        self.store.forget_packages({entry.code for entry in entries if entry.state in (WAITING, STARTING)})
        if old := [entry.number for entry in entries if entry.state in (STARTED, REFUSED, DROPPED)][:-FINISHED_ENTRIES]:
            self.store.remove(old)


def whoami() -> str:
    """Return the user who runs this command, as USER@HOST."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in a container
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def free_memory() -> int | None:
    """Return how many MiB of memory are available to programs; None where the system does not tell (not Linux)."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    return next((int(line.split()[1]) // 1024 for line in text.splitlines() if line.startswith("MemAvailable:")), None)


def is_free(port: int) -> bool:
    """Return whether a program of this machine could listen on TCP ``port`` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
