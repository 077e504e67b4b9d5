"""A SuperNode answers each message before it takes the next. Flower's own loop, in this process; the control is without the change."""

from __future__ import annotations

from threading import Thread, Timer
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.common.inflatable import get_all_nested_objects
from flwr.common.typing import Run
from flwr.supercore.object_store import ObjectStoreFactory

from fl_bn.flower.compat import find
from fl_bn_site import supernode

ENDED, GOING_ON = 7, 8


class Loop:
    """One turn of a SuperNode's main loop at a time, its app, and a server where the run ``ENDED`` ends while its message is received."""

    def __init__(self, changed: bool = True) -> None:
        self.module = find("start_client_internal").__globals__
        self.names = {name: self.module[name] for name in ("_pull_and_store_message", "_push_messages")}
        if changed:
            supernode.answer_each_message(self.names)
        self.state = find("InMemoryNodeState")(ObjectStoreFactory().store())
        self.sent, self.errors = list[str](), list[str]()
        for run in (ENDED, GOING_ON):
            self.state.store_run(Run.create_empty(run))

    def pull(self, run: int, lost: bool = False) -> Message:
        """Receive a message of ``run``; with ``lost``, the connection ends before it is complete."""
        message = Message(RecordDict(), dst_node_id=1, message_type="train", ttl=600.0)
        message.metadata.__dict__.update(_run_id=run, _message_id=message.object_id, _src_node_id=1)

        objects = {identity: part.deflate() for identity, part in get_all_nested_objects(message).items()}

        def confirm(run: int, identity: str) -> None:
            if lost:
                raise ConnectionError("the connection was lost")
            if run == ENDED:
                raise self.module["RunNotRunningException"]

        self.went_on = self.names["_pull_and_store_message"](
            state=self.state, ffs=None, object_store=self.state.object_store, node_config={},
            receive=lambda: (message, self.module["get_object_tree"](message)), get_run=None, get_fab=None,
            pull_object=lambda run, identity: objects[identity], confirm_message_received=confirm, trusted_entities=None,
        )  # fmt: skip
        return message

    def take(self, message: Message) -> None:
        """Let the app take the message."""
        self.state.get_messages(run_ids=[message.metadata.run_id], is_reply=False)
        self.state.record_message_processing_start(message_id=message.metadata.message_id)

    def reply(self, message: Message) -> None:
        """Let the app answer the message."""
        self.state.record_message_processing_end(message_id=message.metadata.message_id)
        self.module["_insert_message"](Message(RecordDict(), reply_to=message), self.state, self.state.object_store)

    def push(self) -> None:
        """Send replies, as Flower's loop does after a message."""

        def send(reply: Message, tree: Any, seconds: float) -> set[str]:
            if reply.metadata.run_id == ENDED:
                raise self.module["RunNotRunningException"]
            self.sent.append(reply.metadata.reply_to_message_id)
            self.errors += [reply.error.reason] if reply.has_error() else []
            return set()

        self.names["_push_messages"](state=self.state, object_store=self.state.object_store, send=send, push_object=None)


@pytest.mark.parametrize("changed", [True, False])
def test_a_late_reply_of_a_run_that_has_ended_does_not_delay_the_others(changed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(changed)
    monkeypatch.setitem(loop.module, "time", SimpleNamespace(sleep=lambda seconds: supernode.time.sleep(0.01)))
    taken, store = list[Message](), find("InMemoryNodeState").store_message

    def app_is_quick(state: Any, message: Message) -> Any:
        identity = store(state, message)
        if message.metadata.run_id == ENDED and not message.metadata.reply_to_message_id:
            loop.take(message)
            taken.append(message)
        return identity

    monkeypatch.setattr(type(loop.state), "store_message", app_is_quick)
    loop.pull(ENDED)
    assert loop.went_on is None, "Flower waits for no reply"
    loop.reply(taken[0])
    for _ in range(3):
        message = loop.pull(GOING_ON)
        loop.take(message)
        answers = Timer(0.1, loop.reply, [message])
        answers.start()
        loop.push()
        late = loop.sent[-1:] != [message.metadata.message_id]
        answers.join()
        assert late == (not changed), "control: Flower sends the reply after the next message"
    assert len(loop.sent) == (3 if changed else 2)


@pytest.mark.parametrize("changed", [True, False])
def test_a_message_that_was_not_received_is_answered_by_an_error(changed: bool) -> None:
    loop = Loop(changed)
    message = loop.pull(GOING_ON, lost=True)
    assert loop.went_on == GOING_ON
    waits = Thread(target=loop.push, daemon=True)
    waits.start()
    waits.join(2.0)
    assert waits.is_alive() == (not changed), "control: Flower waits for ever"
    assert loop.sent == ([message.metadata.message_id] if changed else [])
    if changed:
        assert loop.errors == [supernode.NOT_RECEIVED]
        assert not loop.state.msg_store
    else:  # end the thread
        loop.state.store_message(message)
        loop.take(message)
        loop.reply(message)
        waits.join(5.0)
