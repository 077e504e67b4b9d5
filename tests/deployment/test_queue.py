"""The queue of runs: one at a time, nothing lost, nothing twice, whoever is killed or whatever disk is full; and the lists of runs."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_bn import durable
from fl_bn.cli.main import app
from fl_bn.pairs import Scalar
from fl_bn.run.config import ConfigError
from fl_bn.run.overrides import parse_overrides
from fl_bn.site import queue as module
from fl_bn.site import runs as runs_module
from fl_bn.site import submit as submit_module
from fl_bn.site.control import ControlError
from fl_bn.site.folders import FolderError, ServerFolder
from fl_bn.site.kit import Plan, create
from fl_bn.site.queue import REFUSED, STARTED, STARTING, WAITING, NameTaken, NoQueue, Queue, QueueError
from fl_bn.site.registered import Submitted
from fl_bn.site.runs import NoSuchRun, NotHere, abort, fetch, listed
from fl_bn.site.submit import resume, submit

THEN = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


class SuperLink:
    """Runs, without any that computes. ``dies_after``: number of runs after which whoever submits one is killed, once."""

    address, authority = "h:1", Path("ca.crt")

    def __init__(self) -> None:
        self.known: list[Submitted] = []
        self.refuses = ""
        self.away = False
        self.killed_at: str = ""

    def runs(self) -> list[Submitted]:
        if self.away:
            raise ControlError("away")
        return list(reversed(self.known))

    def nodes(self, sites: list[Path]) -> list[int]:
        return [100 + ord(site.stem[0]) for site in sites]

    def start_run(self, app: Path, config: str) -> str:
        if self.killed_at == "before":
            raise KeyboardInterrupt
        if self.refuses:
            raise ControlError(self.refuses)
        values = parse_overrides(config)
        self.known.append(Submitted(len(self.known) + 1, "running", values, THEN, None, THEN))
        if self.killed_at == "after":
            raise KeyboardInterrupt
        return str(len(self.known))

    def end(self, number: int, status: str = "finished:completed") -> None:
        self.known[number - 1] = replace(self.known[number - 1], status=status, ended=THEN + timedelta(seconds=30))

    def stop(self, run: str) -> None:
        self.end(int(run), "finished:stopped")

    def status(self, run: str) -> str:
        return self.known[int(run) - 1].status

    @contextmanager
    def log(self, run: str) -> Iterator[Iterator[str]]:
        self.end(int(run))
        yield iter(["a line"])

    def going(self) -> list[str]:
        return [str(run.config["name"]) for run in self.known if not run.status.startswith("finished")]


@pytest.fixture
def server(tmp_path: Path) -> ServerFolder:
    create(Plan("127.0.0.1", ["a", "b"], exchange_port=free_range(4)), tmp_path / "kit")
    return ServerFolder.read(tmp_path / "kit/server")


@pytest.fixture
def superlink(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = SuperLink()

    @contextmanager
    def control_of(server: ServerFolder, address: str = "") -> Iterator[SuperLink]:
        yield made

    for where in (submit_module, runs_module):
        monkeypatch.setattr(where, "control_of", control_of)
    monkeypatch.setattr("fl_bn.site.submit.time.sleep", lambda seconds: None)
    monkeypatch.setattr(module, "staged", staged)
    monkeypatch.setattr(module, "available", lambda: 100_000)
    return made


@contextmanager
def staged(project: Path) -> Iterator[Path]:
    yield project


def free_range(count: int) -> int:
    """The first of ``count`` ports in a row on which nobody listens."""
    first = 15000 + os.getpid() % 10000
    while not all(module.is_free(port) for port in range(first, first + count)):
        first += count
    return first


def named(name: str, **more: Scalar) -> dict[str, Scalar]:
    return {"name": name, "rounds": 1, **more}


def states(queue: Queue) -> dict[str, str]:
    return {entry.name: entry.state for entry in queue.entries()}


def test_one_run_at_a_time_in_the_order_in_which_they_came(server: ServerFolder, superlink: Any) -> None:
    queue = Queue(server)
    for name in ("one", "two", "three"):
        queue.add(named(name))
    assert queue.dispatch(superlink) == {2: "one is going on, and 1 may at a time", 3: "one is going on, and 1 may at a time"}
    assert superlink.going() == ["one"]
    assert queue.dispatch(superlink).keys() == {2, 3}  # a second look changes nothing
    superlink.end(1)
    queue.dispatch(superlink)
    assert superlink.going() == ["two"]
    superlink.end(2, "finished:failed")
    assert queue.dispatch(superlink) == {}
    assert states(queue) == dict.fromkeys(("one", "two", "three"), STARTED)
    sent = superlink.known[0].config
    assert (sent["clients"], sent["client-nodes"], sent["client-names"], sent["checkpoint-every"]) == (2, "197,198", "a,b", 5)


def test_runs_beside_each_other_have_ports_of_their_own(server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, first = Queue(server), server.exchange_port
    for number in range(6):
        queue.add(named(f"run-{number}"), parallel=9)
    with socket.socket() as other:
        other.bind(("", first + 1))
        other.listen()
        why = queue.dispatch(superlink)
    assert [run.config["exchange-port"] for run in superlink.known] == [first, first + 2, first + 3]
    assert set(why.values()) == {
        f"all ports of the exchange, {first} to {first + 3}, are in use: close what listens there, or raise exchange-ports"
    }
    superlink.end(2)
    monkeypatch.setattr(module, "available", lambda: 100)
    assert set(queue.dispatch(superlink).values()) == {"100 MiB of memory are free, and a run beside run-2, run-0 takes 1024"}
    monkeypatch.setattr(module, "available", lambda: None)
    queue.dispatch(superlink)
    ports = [run.config["exchange-port"] for run in superlink.known if run.status == "running"]
    assert sorted(ports) == [first, first + 1, first + 2, first + 3]


def test_server_toml_says_how_many_runs_at_a_time(server: ServerFolder, superlink: Any) -> None:
    file = server.path / "server.toml"
    text = file.read_text()
    file.write_text(text.replace("parallel = 1", "parallel = 2"))
    queue = Queue(ServerFolder.read(server.path))
    for name in ("one", "two", "three"):
        queue.add(named(name))
    assert queue.dispatch(superlink) == {3: "one, two are going on, and 2 may at a time"}
    for wrong in ("parallel = 0", "exchange-ports = 65000"):
        file.write_text(text.replace(wrong.split("=")[0] + "= " + {"p": "1", "e": "4"}[wrong[0]], wrong))
        with pytest.raises(FolderError, match=r"parallel must be at least 1|must stay below 65536"):
            ServerFolder.read(server.path)


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


def test_names_are_not_given_twice(server: ServerFolder) -> None:
    queue = Queue(server)
    (server.results / "old").mkdir(parents=True)
    assert [queue.add(named(name)).name for name in ("x", "x", "old", "x")] == ["x", "x-2", "old-2", "x-3"]
    with pytest.raises(NameTaken, match="another run here is called old: give another name, or go on with it: fl-bn resume"):
        queue.add(named("old"), rename=False)


def add_one(folder: Path, place: int, barrier: Any) -> None:
    queue = Queue(ServerFolder.read(folder))
    barrier.wait()
    for _ in range(5):
        queue.add({"name": f"same-{place % 2}", "rounds": 1})


def test_submits_at_once_lose_none(server: ServerFolder) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    processes = [context.Process(target=add_one, args=(server.path, place, barrier)) for place in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    entries = Queue(server).entries()
    assert [entry.number for entry in entries] == list(range(1, 21))
    assert len({entry.name for entry in entries}) == 20


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


def test_submit_waits_its_turn_and_says_for_whom(server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    superlink.known = [Submitted(1, "running", {"name": "other"}, THEN, None)]
    monkeypatch.setattr("fl_bn.site.submit.time.sleep", lambda seconds: superlink.end(1))
    said: list[str] = []
    assert submit(server, "name='mine' rounds=1", say=said.append)
    assert said == [
        "mine waits: other is going on, and 1 may at a time",
        "run 2 is submitted to h:1 as mine, for sites a, b",
        "a line",
        f"run 2: {submit_module.COMPLETED}",
    ]
    with pytest.raises(NameTaken):
        submit(server, "name='mine' rounds=1", say=said.append)


def test_a_submit_that_is_interrupted_leaves_its_run_in_the_queue(
    server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    superlink.known = [Submitted(1, "running", {"name": "other"}, THEN, None)]

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fl_bn.site.submit.time.sleep", interrupted)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        submit(server, "name='mine' rounds=1", say=said.append)
    assert said[-1] == f"  fl-bn abort {server.path} mine"
    assert [(run.name, run.state) for run in listed(server)] == [("mine", WAITING), ("other", "running")]
    assert abort(server, "mine") == "mine is no more in the queue; it had not begun"
    assert [run.name for run in listed(server)] == ["other"]


def test_a_folder_that_may_not_be_written_to_has_no_queue(server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path: Path, data: bytes, mode: int = 0o600) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(durable, "write", read_only)
    said: list[str] = []
    assert submit(server, "name='mine' rounds=1", say=said.append)
    assert "the run does not wait for others, but starts at once" in said[0]
    with pytest.raises(NoQueue):
        Queue(server).add(named("x"))


def interrupted_run(server: ServerFolder, superlink: Any, **more: Scalar) -> Path:
    """A folder as a run leaves it whose server died after round 4."""
    from fl_bn.run.config import RunConfig
    from fl_bn.run.run_directory import to_toml

    folder = server.results / "died"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints/round-000004.safetensors").write_bytes(b"")
    given = {
        "rounds": 9,
        "clients": 2,
        "client-nodes": "1,2",
        "client-names": "a,b",
        "checkpoint-every": 2,
        "method": "hbn",
        "name": "died",
    }
    config = RunConfig.from_mapping({**given, "output": str(server.results), **more})
    (folder / "config.toml").write_text(to_toml(config.to_mapping()))
    (folder / "rounds.jsonl").write_text('{"round": 1}\n{"round": 2}\n')
    superlink.known = [Submitted(1, "finished:failed", {"name": "died"}, THEN, THEN + timedelta(seconds=7), THEN)]
    return folder


def test_resume_reads_the_stored_config_and_the_sites_as_they_are_now(server: ServerFolder, superlink: Any) -> None:
    interrupted_run(server, superlink)
    (row,) = listed(server)
    assert (row.id, row.name, row.state, row.round, row.rounds, row.seconds) == ("1", "died", "failed", 2, 9, 7.0)
    for name in ("died", ""):
        assert resume(server, name, say=lambda line: None)
    sent = superlink.known[-1].config
    assert (sent["resume"], sent["rounds"], sent["method"], sent["client-nodes"], "name" in sent) == ("died", 9, "hbn", "197,198", False)
    (server.results / "died/checkpoints/round-000004.safetensors").unlink()
    with pytest.raises(ConfigError, match="died has no checkpoint to go on from"):
        resume(server, "died")
    with pytest.raises(ConfigError, match="no run in .* has a checkpoint"):
        resume(server, "")


def test_resume_without_a_site_that_took_part_says_which(server: ServerFolder, superlink: Any) -> None:
    interrupted_run(server, superlink, **{"client-names": "a,gone"})
    with pytest.raises(ControlError, match="gone took part in died, and is no more a site here"):
        resume(server, "died", say=lambda line: None)


def test_every_failure_prints_the_command_to_type(server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_run(server, superlink)
    monkeypatch.setattr(superlink, "status", lambda run: "finished:failed")
    said: list[str] = []
    assert not resume(server, "died", say=said.append)
    assert said[-1] == f"go on with it from round 4: fl-bn resume {server.path} died"
    assert not submit(server, "name='new'", say=said.append)
    assert said[-1].endswith(f'begin it anew: fl-bn submit {server.path} --run-config "..."')
    superlink.known.append(Submitted(9, "running", {"resume": "died"}, THEN, None))
    monkeypatch.setattr(superlink, "stop", lambda run: None)
    assert abort(server, "died") == f"died is stopped; go on with it from round 4: fl-bn resume {server.path} died"
    shown = CliRunner().invoke(app, ["resume", str(server.results / "died")])
    assert (shown.exit_code, "fl-bn resume SERVER died" in shown.output) == (2, True)


def test_fetch_copies_a_run_or_says_where_it_is(server: ServerFolder, superlink: Any, tmp_path: Path) -> None:
    folder = interrupted_run(server, superlink)
    (folder / ".lock").touch()
    assert fetch(server, "died", None) == fetch(server, "1", None) == str(folder)
    copied = Path(fetch(server, "died", tmp_path / "here"))
    assert copied == tmp_path / "here/died"
    assert sorted(path.name for path in copied.iterdir()) == ["checkpoints", "config.toml", "rounds.jsonl"]
    with pytest.raises(FileExistsError, match="exists already"):
        fetch(server, "died", tmp_path / "here")
    with pytest.raises(NoSuchRun, match="dyed is no run of .*: the last are died"):
        fetch(server, "dyed", None)
    superlink.known.append(Submitted(2, "finished:completed", {"name": "far", "output": "/elsewhere"}, THEN, THEN))
    with pytest.raises(NotHere, match="/elsewhere/far is not on this machine"):
        fetch(server, "far", None)


def test_what_people_and_programs_read(server: ServerFolder, superlink: Any) -> None:
    interrupted_run(server, superlink)
    shown = CliRunner().invoke(app, ["runs", str(server.path)], env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    assert all(word in shown.output for word in ("died", "failed", "2/9", "2026-11-22"))
    told = CliRunner().invoke(app, ["runs", str(server.path), "--json"])
    assert json.loads(told.output)[0]["seconds"] == 7.0
    assert CliRunner().invoke(app, ["abort", str(server.path), "died"]).output == "died had ended already: failed\n"
    assert CliRunner().invoke(app, ["abort", str(server.path), "other"]).exit_code == 2
