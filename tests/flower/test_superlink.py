"""The repairs of Flower 1.25's SuperLink: late tensors, equal ones at once, and replies that never end."""

from __future__ import annotations

import hashlib
import runpy
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

import fl_bn_site
from tests.flower.inside import find

pytestmark = pytest.mark.pinned("Flower 1.25's SuperLink is repaired, and no other runs")
SCRIPT = Path(fl_bn_site.__file__).with_name("superlink.py")


Repair = Callable[..., None]


@pytest.fixture
def repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repair:
    """Return ``repair(by, kind, *methods)``, which lets superlink.py change these methods until the test ends."""
    monkeypatch.chdir(tmp_path)

    def repaired(by: str, name: str, *methods: str) -> None:
        kind = find(name)
        for method in methods:
            monkeypatch.setattr(kind, method, getattr(kind, method))
        runpy.run_path(str(SCRIPT))[by](kind)

    return repaired


def test_no_bytes_are_no_error_and_others_are_counted(repair: Repair) -> None:
    link = link_state("state.db")
    run = link.create_run("id", "0.1", "0" * 64, {}, "federation", ConfigRecord(), None)
    with pytest.raises(ValueError, match="zero"):  # control: Flower 1.25.0 as it is
        link.store_traffic(run, bytes_sent=0, bytes_recv=0)
    repair("repair", "SqliteLinkState", "store_traffic")
    for sent, received in ((0, 0), (5, 0), (1, 2)):
        link.store_traffic(run, bytes_sent=sent, bytes_recv=received)
    found = link.get_run(run)
    assert (found.bytes_sent, found.bytes_recv) == (6, 2)


def link_state(database: str) -> Any:
    """A SuperLink's state; its modules are where the pinned version has them."""
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink.federation import NoOpFederationManager

    return LinkStateFactory(database, NoOpFederationManager(), ObjectStoreFactory(database)).state()


def failures_of_equal_tensors(path: Path) -> list[str]:
    """What goes wrong where six threads enter replies, each its own with one tensor that all have, at the same moment, and delete them."""
    from flwr.proto.message_pb2 import ObjectTree

    kind, start = find("SqliteObjectStore"), threading.Barrier(6)
    kind(str(path)).initialize()

    def failure(round: int, place: int) -> str:
        store = kind(str(path))
        store.initialize()
        shared, own = (hashlib.sha256(f"{round} {of}".encode()).hexdigest() for of in ("shared", place))
        start.wait()
        try:
            store.preregister(1, ObjectTree(object_id=own, children=[ObjectTree(object_id=shared)]))
            store.delete(own)
        except sqlite3.Error as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(6) as pool:
        found = [error for round in range(15) for error in pool.map(partial(failure, round), range(6))]
    return [error for error in found if error]


def test_equal_tensors_of_two_sites_may_come_at_the_same_moment(tmp_path: Path, repair: Repair) -> None:
    assert failures_of_equal_tensors(tmp_path / "plain.db"), "control: Flower 1.25.0 as it is"
    repair("one_at_a_time", "SqliteObjectStore", "preregister", "delete", "delete_objects_in_run")
    assert failures_of_equal_tensors(tmp_path / "repaired.db") == []


class Asked:
    """A SuperLink's state with a run, and a node that has been asked something and has begun to reply."""

    def __init__(self) -> None:
        from flwr.common.constant import SUPERLINK_NODE_ID
        from flwr.common.inflatable import get_all_nested_objects, get_object_tree
        from flwr.supercore.constant import NOOP_FEDERATION

        self.state = link_state("state.db")
        run = self.state.create_run("id", "0.1", "0" * 64, {}, NOOP_FEDERATION, ConfigRecord(), None)
        self.node = self.state.create_node("owner", "name", b"key", 30.0)
        assert self.state.activate_node(self.node, 30.0)
        asked = Message(RecordDict({"a": ArrayRecord({"w": Array(np.ones(3))})}), self.node, "train")
        asked.metadata.__dict__.update(_run_id=run, _src_node_id=SUPERLINK_NODE_ID, _message_id=asked.object_id)
        assert self.state.store_message_ins(asked)
        assert self.state.get_message_ins(self.node, limit=None)
        reply = Message(RecordDict({"a": ArrayRecord({"w": Array(np.zeros(3))})}), reply_to=asked)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        assert self.state.store_message_res(reply)
        self.state.object_store.preregister(run, get_object_tree(reply))
        self.id, self.parts = asked.metadata.message_id, {key: part.deflate() for key, part in get_all_nested_objects(reply).items()}

    def reply(self) -> list[str]:
        """What the ServerApp is handed over: the content of replies, or the reason of errors."""
        found = self.state.get_message_res({self.id})
        return [message.error.reason or "error" if message.has_error() else "whole" for message in found]


def test_a_reply_is_handed_over_when_all_of_it_is_there(repair: Repair) -> None:
    assert Asked().reply() == ["whole"], "control: Flower 1.25.0 hands over what it does not have"
    repair("whole_replies", "SqliteLinkState", "get_message_res")
    Path("state.db").unlink()
    asked = Asked()
    for key, part in asked.parts.items():
        assert asked.reply() == []
        asked.state.object_store.put(key, part)
    assert asked.reply() == ["whole"]
    assert asked.reply() == [], "once"


def test_of_a_site_that_left_in_the_midst_of_its_reply_the_server_is_told(repair: Repair) -> None:
    repair("whole_replies", "SqliteLinkState", "get_message_res")
    asked = Asked()
    assert asked.reply() == []
    assert asked.state.deactivate_node(asked.node)
    time.sleep(0.01)
    (reason,) = asked.reply()
    assert "Node Unavailable" in reason
