"""The queue loses nothing and starts nothing twice, whoever is killed and whatever disk is full."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_bn import durable
from fl_bn.cli.main import app
from fl_bn.site import queue as module
from fl_bn.site.control import ControlError
from fl_bn.site.folders import ServerFolder
from fl_bn.site.queue import REFUSED, STARTED, STARTING, WAITING, NameTaken, Queue, QueueError
from fl_bn.site.registered import Submitted
from tests.deployment.superlink import THEN, named, states


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

    def fills_up(app: Path, config: str) -> str:
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
