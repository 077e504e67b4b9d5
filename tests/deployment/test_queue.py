"""The queue of runs: one at a time, in the order in which they came, each with a name and a port of its own."""

from __future__ import annotations

import multiprocessing
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fl_bn_site import queue as module
from fl_bn_site.control import ANSWER
from fl_bn_site.folders import FolderError, ServerFolder
from fl_bn_site.queue import NameTaken, Queue, whoami
from fl_bn_site.queue_store import DROPPED, LOCK_TIMEOUT, STARTED
from tests.deployment.superlink import named, states


def test_one_run_at_a_time_in_the_order_in_which_they_came(server: ServerFolder, superlink: Any) -> None:
    queue = Queue(server)
    for name in ("one", "two", "three"):
        queue.add(named(name))
    assert queue.dispatch(superlink) == dict.fromkeys((2, 3), "one is going on, and at most 1 may run at a time")
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
        f"all ports of the exchange, {first} to {first + 3}, are in use: end the programs that listen there, or raise exchange-ports"
    }
    superlink.end(2)
    monkeypatch.setattr(module, "free_memory", lambda: 100)
    assert set(queue.dispatch(superlink).values()) == {
        "100 MiB of memory are free, but 1024 must be free to start a run beside run-2, run-0"
    }
    monkeypatch.setattr(module, "free_memory", lambda: None)
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
    assert queue.dispatch(superlink) == {3: "one, two are going on, and at most 2 may run at a time"}
    for wrong, words in (("parallel = 0", r"parallel must be 1\.\.1024"), ("exchange-ports = 65000", "must be below 65536, but is")):
        file.write_text(text.replace(wrong.split("=")[0] + "= " + {"p": "1", "e": "4"}[wrong[0]], wrong))
        with pytest.raises(FolderError, match=words):
            ServerFolder.read(server.path)


def test_names_are_not_given_twice(server: ServerFolder) -> None:
    queue = Queue(server)
    (server.results / "old").mkdir(parents=True)
    assert [queue.add(named(name)).name for name in ("x", "x", "old", "x")] == ["x", "x-2", "old-2", "x-3"]
    with pytest.raises(NameTaken, match="another run here is called old: give another name, or resume that run: fl-bn resume"):
        queue.add(named("old"), rename=False)


def test_numbers_are_not_given_twice(server: ServerFolder) -> None:
    queue = Queue(server)
    mine = [queue.add(named(name)) for name in ("x", "y")][-1]
    assert queue.remove(mine)
    assert queue.add(named("y")).number == 3
    dropped = queue.store.find(mine.number)
    assert dropped is not None
    assert (dropped.state, queue.remove(mine)) == (DROPPED, False)
    assert dropped.why.startswith(f"taken out of the queue by {whoami()} at 20")


def test_an_entry_says_who_submitted_it_and_which_code_the_sites_received(server: ServerFolder, superlink: Any) -> None:
    queue = Queue(server)
    entry = queue.add(named("x"))
    assert (entry.submitter, entry.code) == (whoami(), "")
    queue.dispatch(superlink)
    started = queue.store.find(entry.number)
    assert started is not None
    assert (started.state, started.code) == (STARTED, "c0de")


def test_a_queue_of_the_first_version_gets_the_new_columns(server: ServerFolder) -> None:
    queue = Queue(server)
    queue.add(named("x"))
    with closing(sqlite3.connect(queue.store.path)) as connection:
        for name in ("submitter", "code"):
            connection.execute(f"ALTER TABLE runs DROP COLUMN {name}")
        connection.execute("PRAGMA user_version = 1")
        connection.commit()
    queue.add(named("y"))
    assert [(entry.name, entry.submitter) for entry in queue.store.entries()] == [("x", ""), ("y", whoami())]


def test_the_lock_is_waited_for_longer_than_a_start_takes() -> None:
    assert LOCK_TIMEOUT > ANSWER + 30, "a flwr whose parent was killed ends by then"


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
