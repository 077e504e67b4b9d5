"""The queue loses nothing and starts nothing twice, whoever is killed and whatever disk is full."""

from __future__ import annotations

import errno
import json
import multiprocessing
import shutil
import sqlite3
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_bn.cli.main import app
from fl_bn_site import queue as module
from fl_bn_site.certificates import read_public
from fl_bn_site.control import Control, ControlError
from fl_bn_site.folders import ServerFolder
from fl_bn_site.queue import NameTaken, Queue
from fl_bn_site.queue_store import REFUSED, STARTED, STARTING, WAITING, QueueError
from fl_bn_site.registered import Submitted
from tests.deployment.superlink import THEN, SuperLink, full_disk, named, stand_in, states


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_is_not_lost_nor_started_twice_where_whoever_starts_it_is_killed(when: str, server: ServerFolder, superlink: Any) -> None:
    queue = Queue(server)
    queue.add(named("one"))
    superlink.killed_at = when
    with pytest.raises(KeyboardInterrupt):
        queue.dispatch(superlink)
    assert states(queue) == {"one": STARTING}
    superlink.killed_at = ""
    queue.dispatch(superlink)
    queue.dispatch(superlink)
    assert [run.config["name"] for run in superlink.known] == ["one"]
    assert states(queue) == {"one": STARTED}


def test_a_run_that_goes_on_is_told_from_the_one_before(server: ServerFolder, superlink: Any) -> None:
    superlink.known = [Submitted(1, "finished:failed", {"name": "one"}, THEN, THEN)]
    queue = Queue(server)
    queue.add({"resume": "one", "rounds": 9})
    with pytest.raises(NameTaken, match="one is in the queue already"):
        queue.add({"resume": "one", "rounds": 9})
    superlink.killed_at = "before"
    with pytest.raises(KeyboardInterrupt):
        queue.dispatch(superlink)
    superlink.killed_at = ""
    assert queue.dispatch(superlink) == {}  # the failed one is not taken for it
    assert [run.config.get("resume") for run in superlink.known] == [None, "one"]


def test_a_superlink_that_is_away_loses_nothing_and_one_that_refuses_is_believed(server: ServerFolder, superlink: Any) -> None:
    queue = Queue(server)
    queue.add(named("one"))
    superlink.away = True
    with pytest.raises(ControlError, match="away"):
        queue.dispatch(superlink)
    assert states(queue) == {"one": WAITING}
    superlink.away, superlink.refuses = False, "no such federation"
    assert queue.dispatch(superlink) == {1: "no such federation"}
    assert states(queue) == {"one": REFUSED}
    superlink.refuses = ""
    assert queue.dispatch(superlink) == {}
    assert superlink.known == []


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), ValueError("no curve"), shutil.Error([("a.py", "b", "gone")])])
def test_what_cannot_be_started_is_refused_and_holds_up_no_other(
    server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    queue = Queue(server)
    queue.add(named("one"))

    def broken(server: ServerFolder) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module, "build", broken)
        assert queue.dispatch(superlink) == {1: str(error)}
    queue.add(named("two"))
    assert queue.dispatch(superlink) == {}
    assert states(queue) == {"one": REFUSED, "two": STARTED}


def test_a_key_that_cannot_be_read_refuses_the_run_and_submit_names_it(server: ServerFolder, superlink: Any) -> None:
    server.public_key("b").write_text("garbled")
    shown = CliRunner().invoke(app, ["submit", str(server.path), "--run-config", "rounds=1 name='one'"])
    assert (shown.exit_code, f"{server.public_key('b')}: " in shown.output) == (1, True), shown.output
    assert isinstance(shown.exception, SystemExit)
    assert states(Queue(server)) == {"one": REFUSED}


def test_a_run_waits_for_a_site_that_is_not_registered_yet(server: ServerFolder, superlink: Any) -> None:
    queue = Queue(server)
    queue.add(named("one"))
    superlink.unknown = {read_public(server.public_key("b"))}
    assert queue.dispatch(superlink) == {1: f"does not know the key {server.public_key('b')}"}
    assert states(queue) == {"one": WAITING}
    superlink.unknown = set()
    assert queue.dispatch(superlink) == {}
    assert states(queue) == {"one": STARTED}


class Storing(SuperLink):
    """A SuperLink whose runs are lines of the file ``store``, submitted by the real ``Control`` through a ``flwr`` that takes its time."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.store = folder, folder / "store"

    def runs(self) -> list[Submitted]:
        names = self.store.read_text().split() if self.store.exists() else []
        return [Submitted(1 + place, "running", {"name": name}, THEN, None) for place, name in enumerate(names)]

    def start_run(self, package: Path, config: str, lock: int | None = None) -> str:
        return Control("h:1", self.folder, self.folder).start_run(package, config, lock)


def test_a_run_is_not_started_twice_where_its_sender_outlives_whoever_started_it(
    server: ServerFolder, superlink: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of ``fl-bn submit`` leaves its ``flwr run`` alone, which still packs and sends."""
    slow = f"""cd "{tmp_path}"; touch begun; sleep 2; echo one >> store; echo '{{"success": true, "run-id": 1}}'"""
    stand_in(tmp_path, monkeypatch, slow)
    queue, storing = Queue(server), Storing(tmp_path)
    queue.add(named("one"))
    starts = multiprocessing.get_context("fork").Process(target=queue.dispatch, args=(storing,))
    starts.start()
    while not (tmp_path / "begun").exists():
        assert starts.is_alive()
        time.sleep(0.01)
    starts.kill()
    starts.join()
    assert not storing.store.exists()
    assert queue.dispatch(storing) == {}
    assert storing.store.read_text() == "one\n"
    assert [(entry.state, entry.run) for entry in queue.store.entries()] == [(STARTED, "1")]


def test_a_run_that_started_although_its_sender_failed_is_not_refused(
    server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, start = Queue(server), superlink.start_run
    for name in ("one", "two"):
        queue.add(named(name))

    def hangs(app: Path, config: str, lock: int | None = None) -> str:
        start(app, config)
        raise ControlError("`flwr run` ended with -9 and said nothing")

    monkeypatch.setattr(superlink, "start_run", hangs)
    assert queue.dispatch(superlink) == {2: "one is going on, and at most 1 may run at a time"}
    assert states(queue) == {"one": STARTED, "two": WAITING}


def test_a_full_disk_is_said_and_loses_no_run(server: ServerFolder, superlink: Any) -> None:
    queue = Queue(server)
    queue.add(named("one"))
    with full_disk():
        with pytest.raises(QueueError, match=r"queue cannot be written \(disk I/O error\): make room on that disk"):
            queue.add(named("two"))
        with pytest.raises(QueueError, match="The waiting runs are still in the queue"):
            queue.dispatch(superlink)
        assert superlink.known == []  # not started, since it could not be written that it is
        shown = CliRunner().invoke(app, ["submit", str(server.path), "--run-config", "rounds=1"])
        assert (shown.exit_code, "make room on that disk" in shown.output) == (1, True)
    assert states(queue) == {"one": WAITING}
    assert queue.dispatch(superlink) == {}
    assert superlink.going() == ["one"]


def test_a_run_waits_for_room_on_the_disk_and_is_not_refused_for_it(
    server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SuperLink whose disk is full says only that it could not start the run."""
    queue, free = Queue(server), [module.FREE_DISK << 20]
    queue.add(named("one"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[0]))
    superlink.refuses = "could not start"

    def fills_up(app: Path, config: str, lock: int | None = None) -> str:
        free[0] = 5 << 20
        raise ControlError("could not start")

    with monkeypatch.context() as patch:
        patch.setattr(superlink, "start_run", fills_up)
        for _ in range(2):  # noticed only when it failed, and before
            assert queue.dispatch(superlink) == {
                1: f"5 MiB are free on the disk of {server.state}, but 32 must be free to start a run: make room there"
            }
        assert states(queue) == {"one": WAITING}
    free[0], superlink.refuses = module.FREE_DISK << 20, ""
    assert queue.dispatch(superlink) == {}
    assert states(queue) == {"one": STARTED}


def test_a_started_run_that_could_not_be_written_is_found_again(
    server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, start = Queue(server), superlink.start_run
    queue.add(named("one"))
    with ExitStack() as after, monkeypatch.context() as patch:

        def fills_up(app: Path, config: str, lock: int | None = None) -> str:
            after.enter_context(full_disk())
            return str(start(app, config, lock))

        patch.setattr(superlink, "start_run", fills_up)
        queue.dispatch(superlink)
    assert states(queue) == {"one": STARTING}
    queue.dispatch(superlink)
    assert states(queue) == {"one": STARTED}
    assert len(superlink.known) == 1


def test_a_damaged_database_is_named(server: ServerFolder) -> None:
    queue = Queue(server)
    queue.add(named("one"))
    queue.store.path.write_bytes(b"no database" * 1000)
    for look in (queue.waiting, lambda: queue.add(named("two"))):
        with pytest.raises(QueueError, match=r"queue\.db cannot be read .*move it away, and submit again the runs that waited in it"):
            look()


def test_a_database_of_a_newer_version_is_refused(server: ServerFolder) -> None:
    queue = Queue(server)
    queue.add(named("one"))
    with closing(sqlite3.connect(queue.store.path)) as connection:
        connection.execute("PRAGMA user_version = 3")
    for look in (queue.waiting, lambda: queue.add(named("two"))):
        with pytest.raises(QueueError, match=r"queue\.db was written by a newer fl-bn \(table version 3, but this fl-bn reads 2\)"):
            look()


def add_until_killed(folder: Path, say: Any) -> None:
    queue = Queue(ServerFolder.read(folder))
    while True:
        say.send(queue.add(named("x")).name)


def test_no_run_that_was_added_is_lost_where_its_submitter_is_killed(server: ServerFolder) -> None:
    """SIGKILL at any moment: what ``add`` returned is there, at most one more is, and the database is whole."""
    context = multiprocessing.get_context("fork")
    added: list[str] = []
    for attempt in range(5):
        hear, say = context.Pipe(duplex=False)
        adds = context.Process(target=add_until_killed, args=(server.path, say))
        adds.start()
        say.close()
        for _ in range(3 + attempt):
            added.append(hear.recv())
        adds.kill()
        adds.join()
        with suppress(EOFError):
            while True:
                added.append(hear.recv())
        names = [entry.name for entry in Queue(server).waiting()]
        assert names[: len(added)] == added
        assert len(names) <= len(added) + 1
        added = names
    with closing(sqlite3.connect(Queue(server).store.path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def of_an_earlier_version(folder: Path, number: int, name: str, state: str = WAITING, **more: Any) -> None:
    """A run in the queue of a version that kept one JSON file per run."""
    values = {"number": number, "name": name, "config": named(name), "parallel": 0, "before": [2**63 + 1], "run": "", "why": ""}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**values, "submitted": "2026-11-22T12:00:00+00:00", "state": state, **more})
    (folder / f"{number:06}.json").write_text(text)


def test_the_queue_of_an_earlier_version_is_taken_over(server: ServerFolder, superlink: Any) -> None:
    queue = Queue(server)
    of_an_earlier_version(queue.store.folder, 3, "done", STARTED, run="7")
    of_an_earlier_version(queue.store.folder, 5, "one", STARTING)
    of_an_earlier_version(queue.store.folder, 6, "two")
    (queue.store.folder / "last").write_text("9\n")
    assert [(entry.number, entry.name) for entry in queue.waiting()] == [(5, "one"), (6, "two")]
    assert {entry.earlier_runs for entry in queue.waiting()} == {(2**63 + 1,)}
    assert sorted(path.name for path in queue.store.folder.iterdir()) == [".lock", "queue.db"]
    assert queue.add(named("three")).number == 10
    assert states(queue) == {"done": STARTED, "one": STARTING, "two": WAITING, "three": WAITING}
    of_an_earlier_version(queue.store.folder, 6, "two")  # as a process leaves it that was killed before it removed the file
    of_an_earlier_version(queue.store.folder, 5, "four")  # as the earlier version adds it, where somebody went back to it
    assert queue.dispatch(superlink).keys() == {6, 10, 11}
    assert [entry.name for entry in queue.store.entries()] == ["done", "one", "two", "three", "four"]


def test_a_file_of_an_earlier_version_that_cannot_be_read_is_named(server: ServerFolder) -> None:
    queue = Queue(server)
    of_an_earlier_version(queue.store.folder, 1, "one")
    (queue.store.folder / "000002.json").write_text('{"number": 1')
    for _ in range(2):
        with pytest.raises(QueueError, match=r"000002\.json cannot be read .*move it away, and submit again the run that it held"):
            queue.waiting()
    (queue.store.folder / "000002.json").unlink()
    assert [entry.name for entry in queue.waiting()] == ["one"]
