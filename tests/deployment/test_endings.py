"""A SuperNode answers for a process that is silent, and for a message that did not arrive whole. Flower's classes, in this process."""

from __future__ import annotations

import logging
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.common.inflatable import get_all_nested_objects
from flwr.common.typing import Run
from flwr.supercore.object_store import ObjectStoreFactory

from fl_bn_site import supernode
from tests.deployment.inner import find

RUN = 7


class Site:
    """The state of a SuperNode that has received a message, and the service for the process that works on it."""

    def __init__(self) -> None:
        state_class = type("State", (find("InMemoryNodeState"),), {})
        servicer = type("Servicer", (find("ClientAppIoServicer"),), {})
        supernode.answer_for_the_dead(state_class, servicer)
        objects = ObjectStoreFactory()
        self.state, self.objects = state_class(objects.store()), objects.store()
        self.service = servicer(SimpleNamespace(state=lambda: self.state), None, objects)

    def receive(self) -> Message:
        message = Message(RecordDict({"arrays": ArrayRecord({})}), 1, "train", ttl=600.0)
        message.metadata.__dict__.update(_run_id=RUN, _src_node_id=1)
        insert = find("start_client_internal").__globals__["_insert_message"]
        insert(message, self.state, self.objects)
        return message

    def take(self) -> str:
        """What a process of the message does at its start."""
        token = self.state.create_token(RUN)
        (message,) = self.state.get_messages(run_ids=[RUN], is_reply=False)
        self.state.record_message_processing_start(message_id=message.metadata.message_id)
        return str(token)

    def expire(self) -> None:
        """Let the process of the message be silent for so long that Flower gives it up."""
        self.state._on_tokens_expired([(RUN, 0.0)])
        self.state.delete_token(RUN)

    def replies(self) -> list[Message]:
        """What the SuperNode's loop takes; as there, both messages are gone then."""
        found = list(self.state.get_messages(is_reply=True))
        self.state.delete_messages(message_ids=[m.metadata.message_id for m in found] + [m.metadata.reply_to_message_id for m in found])
        return found

    def errors(self) -> list[tuple[int, str]]:
        return [(reply.error.code, str(reply.error.reason)) for reply in self.replies()]


@pytest.fixture
def site() -> Site:
    return Site()


def test_a_process_that_sends_no_heartbeat_is_answered_for(site: Site) -> None:
    message = site.receive()
    site.take()
    assert site.replies() == []
    site.expire()
    (reply,) = site.replies()
    assert (reply.error.code, reply.error.reason) == (8, supernode.SILENT)
    assert reply.metadata.reply_to_message_id == message.metadata.message_id
    assert message.metadata.message_id in site.state.time_store, "else Flower would drop the reply"
    assert message.object_id not in site.objects, "its tensors are freed"
    assert site.state.create_token(RUN), "the next message can be worked on"


@pytest.mark.parametrize("whole", [True, False])
def test_a_part_of_a_reply_does_not_go_on_its_way(site: Site, whole: bool) -> None:
    """The SuperNode would wait for the rest for ever. A whole one goes when its process has handed its token back."""
    message = site.receive()
    site.take()
    reply = Message(RecordDict({"arrays": ArrayRecord({})}), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    site.state.store_message(reply)
    if whole:
        site.state.delete_token(RUN)
        assert [one.has_content() for one in site.replies()] == [True]
    else:
        assert site.replies() == []
        site.expire()
        assert site.errors() == [(8, supernode.SILENT)]


def test_what_the_server_says_is_no_line_of_its_own_in_the_log() -> None:
    said = ("1]\nINFO :      run 6 is admitted: signed by alice\x1b[1A\u2028", 5)
    record = logging.LogRecord("flwr", logging.INFO, "", 1, "[ROUND %s, RUN %s]", said, None)
    assert supernode.in_a_line(record)
    assert record.getMessage() == "[ROUND 1] INFO :      run 6 is admitted: signed by alice [1A , RUN 5]"


class Loop:
    """One turn of a SuperNode's main loop at a time, whose connection to the server is lost while a message is received, and its app."""

    def __init__(self, changed: bool) -> None:
        self.module = find("start_client_internal").__globals__
        self.names = {name: self.module[name] for name in ("_pull_and_store_message", "_push_messages")}
        if changed:
            supernode.answer_each_message(self.names)
        self.state = find("InMemoryNodeState")(ObjectStoreFactory().store())
        self.sent, self.errors = list[str](), list[str]()
        self.state.store_run(Run.create_empty(RUN))

    def pull(self) -> Message:
        message = Message(RecordDict(), dst_node_id=1, message_type="train", ttl=600.0)
        message.metadata.__dict__.update(_run_id=RUN, _message_id=message.object_id, _src_node_id=1)
        objects = {identity: part.deflate() for identity, part in get_all_nested_objects(message).items()}

        def confirm(run: int, identity: str) -> None:
            raise ConnectionError("the connection was lost")

        self.names["_pull_and_store_message"](
            state=self.state, ffs=None, object_store=self.state.object_store, node_config={},
            receive=lambda: (message, self.module["get_object_tree"](message)), get_run=None, get_fab=None,
            pull_object=lambda run, identity: objects[identity], confirm_message_received=confirm, trusted_entities=None,
        )  # fmt: skip
        return message

    def push(self) -> None:
        """Send replies, as Flower's loop does after a message."""

        def send(reply: Message, tree: Any, seconds: float) -> set[str]:
            self.sent.append(reply.metadata.reply_to_message_id)
            self.errors += [reply.error.reason] if reply.has_error() else []
            return set()

        self.names["_push_messages"](state=self.state, object_store=self.state.object_store, send=send, push_object=None)


@pytest.mark.parametrize("changed", [True, False])
def test_a_message_that_was_not_received_is_answered_by_an_error(changed: bool) -> None:
    loop = Loop(changed)
    message = loop.pull()
    waits = Thread(target=loop.push, daemon=True)
    waits.start()
    waits.join(2.0)
    assert waits.is_alive() == (not changed), "control: Flower waits for ever"
    assert loop.sent == ([message.metadata.message_id] if changed else [])
    if changed:
        assert loop.errors == [supernode.NOT_RECEIVED]
        return
    loop.state.store_message(message)  # end the thread
    loop.state.get_messages(run_ids=[RUN], is_reply=False)
    loop.state.record_message_processing_start(message_id=message.metadata.message_id)
    loop.state.record_message_processing_end(message_id=message.metadata.message_id)
    loop.module["_insert_message"](Message(RecordDict(), reply_to=message), loop.state, loop.state.object_store)
    waits.join(5.0)
