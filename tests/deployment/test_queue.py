"""The queue of runs: one at a time, in the order in which they came; it loses none and starts none twice, whoever is killed."""

from __future__ import annotations

import multiprocessing
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_bn_site.queue import NameTaken
from fl_bn_site.queue_store import REFUSED, STARTED, STARTING, WAITING, QueueError, QueueStore
from tests.deployment.inner import (
    ConfigError,
    ControlError,
    FolderError,
    Queue,
    RunConfig,
    ServerFolder,
    Submitted,
    abort,
    app,
    list_runs,
    run_config,
    submit,
)
from tests.deployment.superlink import THEN, full_disk, named, states


def test_one_run_at_a_time_in_the_order_in_which_they_came(server: ServerFolder, superlink: Any) -> None:
    queue = Queue(server)
    for name in ("one", "two", "three"):
        queue.add(named(name))
    assert queue.dispatch(superlink).keys() == {2, 3}
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


def test_runs_beside_each_other_have_ports_of_their_own(server: ServerFolder, superlink: Any) -> None:
    file, first = server.path / "server.toml", server.exchange_port
    file.write_text(file.read_text().replace("parallel = 1", "parallel = 2"))
    queue = Queue(ServerFolder.read(server.path))
    for name in ("one", "two", "three"):
        queue.add(named(name))
    queue.add(named("four"), parallel=9)
    with socket.socket() as other:
        other.bind(("", first + 1))
        other.listen()
        assert queue.dispatch(superlink).keys() == {3}
    assert [run.config["exchange-port"] for run in superlink.known] == [first, first + 2, first + 3]
    superlink.end(2)
    assert queue.dispatch(superlink).keys() == {3}, "two go on, of three that fit"


def test_names_are_not_given_twice(server: ServerFolder) -> None:
    queue = Queue(server)
    (server.results / "old").mkdir(parents=True)
    assert [queue.add(named(name)).name for name in ("x", "x", "old", "x")] == ["x", "x-2", "old-2", "x-3"]
    with pytest.raises(NameTaken):
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
    entries = Queue(server).store.entries()
    assert [entry.number for entry in entries] == list(range(1, 21))
    assert len({entry.name for entry in entries}) == 20


# Faults


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_is_not_lost_nor_started_twice_where_whoever_starts_it_is_killed(when: str, server: ServerFolder, superlink: Any) -> None:
    """Nor is the failed run taken for it with which it goes on."""
    superlink.known = [Submitted(1, "finished:failed", {"name": "one"}, THEN, THEN)]
    queue = Queue(server)
    queue.add({"resume": "one", "rounds": 9})
    superlink.killed_at = when
    with pytest.raises(KeyboardInterrupt):
        queue.dispatch(superlink)
    assert states(queue) == {"one": STARTING}
    superlink.killed_at = ""
    for _ in range(2):
        assert queue.dispatch(superlink) == {}
    assert [run.config.get("resume") for run in superlink.known] == [None, "one"]
    assert states(queue) == {"one": STARTED}


def test_a_superlink_that_is_away_loses_nothing_and_one_that_refuses_is_believed(server: ServerFolder, superlink: Any) -> None:
    queue = Queue(server)
    queue.add(named("one"))
    superlink.away = True
    with pytest.raises(ControlError):
        queue.dispatch(superlink)
    assert states(queue) == {"one": WAITING}
    superlink.away, superlink.refuses = False, "no such federation"
    assert queue.dispatch(superlink) == {1: "no such federation"}
    superlink.refuses = ""
    assert (queue.dispatch(superlink), states(queue), superlink.known) == ({}, {"one": REFUSED}, [])


def test_a_full_disk_is_said_and_loses_no_run(server: ServerFolder, superlink: Any) -> None:
    queue = Queue(server)
    queue.add(named("one"))
    with full_disk():
        for write in (lambda: queue.add(named("two")), lambda: queue.dispatch(superlink)):
            with pytest.raises(QueueError):
                write()
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
    queue = Queue(server)
    queue.add(named("one"))
    superlink.refuses = "could not start"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=5 << 20))
        assert str(server.state) in queue.dispatch(superlink)[1]
        assert states(queue) == {"one": WAITING}
    superlink.refuses = ""
    assert queue.dispatch(superlink) == {}
    assert states(queue) == {"one": STARTED}


def add_until_killed(folder: Path, say: Any) -> None:
    queue = Queue(ServerFolder.read(folder))
    while True:
        say.send(queue.add(named("x")).name)


def test_no_run_that_was_added_is_lost_where_its_submitter_is_killed(server: ServerFolder) -> None:
    """SIGKILL at any moment: what ``add`` returned is there, and at most one more is."""
    context = multiprocessing.get_context("fork")
    added: list[str] = []
    for attempt in range(3):
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


# What waits, and whoever submitted it

OF_EXCHANGE = [
    f"exchange-{key}" for key in ("host", "port", "join-timeout", "certificate", "key", "authority")
]  # what a server's folder says of it


def test_submit_waits_its_turn_and_says_for_whom(server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    superlink.known = [Submitted(1, "running", {"name": "other"}, THEN, None)]
    monkeypatch.setattr("fl_bn_site.submit.time.sleep", lambda seconds: superlink.end(1))
    said: list[str] = []
    assert submit(server, "name='mine' rounds=1", say=said.append)
    assert [line for line in said if "other" in line] == said[:1]
    assert "for sites a, b" in said[1]
    with pytest.raises(NameTaken):
        submit(server, "name='mine' rounds=1", say=said.append)


def test_a_submit_that_is_interrupted_leaves_its_run_in_the_queue(
    server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    superlink.known = [Submitted(1, "running", {"name": "other"}, THEN, None)]

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fl_bn_site.submit.time.sleep", interrupted)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        submit(server, "name='mine' rounds=1", say=said.append)
    assert said[-1] == f"  fl-bn abort {server.path} mine"
    assert [(run.name, run.state) for run in list_runs(server)] == [("mine", WAITING), ("other", "running")]
    abort(server, "mine")
    assert [(run.name, run.state) for run in list_runs(server)] == [("mine", "dropped"), ("other", "running")]


@pytest.mark.parametrize(("owner", "where"), [(Queue, "dispatch"), (QueueStore, "find"), (Queue, "waiting")])
def test_a_submit_that_cannot_look_for_a_while_waits_on(
    server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch, owner: type, where: str
) -> None:
    look, errors = getattr(owner, where), [QueueError("held by another fl-bn"), FolderError("server.toml: cut short"), OSError("no disk")]

    def fails(queue: Any, *args: Any) -> Any:
        if errors:
            raise errors.pop()
        return look(queue, *args)

    monkeypatch.setattr(owner, where, fails)
    assert submit(server, "name='mine' rounds=1", say=lambda line: None)
    assert errors == []


def test_a_run_without_an_exchange_is_given_no_address_for_one(server: ServerFolder) -> None:
    """Else it would be refused for keys that nobody typed. Control: a run that has an exchange gets all that the folder says."""
    defaults = {key: spec.default for key, spec in RunConfig.keys().items() if key.startswith("exchange")}
    plain = run_config(server, "method='fedavg'")
    assert {key: value for key, value in plain.items() if key.startswith("exchange")} == {key: defaults[key] for key in OF_EXCHANGE}
    RunConfig.from_mapping(plain)
    exchanging = run_config(server, "method='fedtan'")
    assert exchanging["exchange-certificate"] == str(server.certificate)
    assert exchanging["exchange-port"] == server.exchange_port != 0
    with pytest.raises(ConfigError, match="exchange-host"):
        run_config(server, "method='fedavg' exchange-host='elsewhere'")
