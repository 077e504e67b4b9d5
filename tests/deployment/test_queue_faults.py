"""The queue loses nothing and starts nothing twice, whoever is killed and whatever disk is full."""

from __future__ import annotations

import errno
import multiprocessing
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_bn.cli.main import app
from fl_bn.support import durable
from fl_bn_site import queue as module
from fl_bn_site.certificates import read_public
from fl_bn_site.control import Control, ControlError
from fl_bn_site.folders import ServerFolder
from fl_bn_site.queue import REFUSED, STARTED, STARTING, WAITING, NameTaken, Queue, QueueError
from fl_bn_site.registered import Submitted
from tests.deployment.superlink import THEN, SuperLink, named, stand_in, states


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
    with pytest.raises(NameTaken, match="one waits in the queue already"):
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

    def broken(project: Path) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module, "staged", broken)
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

    def start_run(self, app: Path, config: str, lock: int | None = None) -> str:
        return Control("h:1", self.folder, self.folder).start_run(app, config, lock)


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
    assert [(entry.state, entry.run) for entry in queue.entries()] == [(STARTED, "1")]


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
    assert queue.dispatch(superlink) == {2: "one is going on, and 1 may at a time"}
    assert states(queue) == {"one": STARTED, "two": WAITING}


def test_a_full_disk_is_said_and_loses_no_run(server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(server)
    queue.add(named("one"))

    def full(path: Path, data: bytes, mode: int = 0o600) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write", full)
        with pytest.raises(QueueError, match=r"queue cannot be written \(No space left on device\): make room on that disk"):
            queue.add(named("two"))
        with pytest.raises(QueueError, match="No run was lost"):
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
    queue, free = Queue(server), [module.DISK << 20]
    queue.add(named("one"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[0]))
    superlink.refuses = "could not start"

    def fills_up(app: Path, config: str, lock: int | None = None) -> str:
        free[0] = 5 << 20
        raise ControlError("could not start")

    with monkeypatch.context() as patch:
        patch.setattr(superlink, "start_run", fills_up)
        for _ in range(2):  # noticed only when it failed, and before
            assert queue.dispatch(superlink) == {1: f"5 MiB are free on the disk of {server.state}, and a run takes 32: make room there"}
        assert states(queue) == {"one": WAITING}
    free[0], superlink.refuses = module.DISK << 20, ""
    assert queue.dispatch(superlink) == {}
    assert states(queue) == {"one": STARTED}


def test_a_started_run_whose_file_could_not_be_written_is_found_again(
    server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, write, room = Queue(server), durable.write, [1]
    queue.add(named("one"))

    def fills_up(path: Path, data: bytes, mode: int = 0o600) -> None:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        room.pop()
        write(path, data, mode)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write", fills_up)
        queue.dispatch(superlink)
    assert states(queue) == {"one": STARTING}
    queue.dispatch(superlink)
    assert states(queue) == {"one": STARTED}
    assert len(superlink.known) == 1


def test_a_damaged_file_is_named(server: ServerFolder) -> None:
    queue = Queue(server)
    entry = queue.add(named("one"))
    (queue.folder / f"{entry.number:06}.json").write_text('{"number": 1')
    with pytest.raises(QueueError, match=r"000001\.json cannot be read .*move it away, and submit that run again"):
        queue.entries()
