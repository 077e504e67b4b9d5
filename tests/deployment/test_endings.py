"""A SuperNode answers for a process that died. Flower's classes, in this process; the control is Flower without the change."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.supercore.object_store import ObjectStoreFactory

from fl_bn.flower.compat import find
from fl_bn_site import app_host, endings, supernode

RUN, OTHER = 7, 8


class Site:
    """The state of a SuperNode that has received a message, and the service for the process that works on it."""

    def __init__(self, changed: bool = True) -> None:
        state_class = type("State", (find("InMemoryNodeState"),), {})
        servicer = type("Servicer", (find("ClientAppIoServicer"),), {})
        if changed:
            supernode.answer_for_the_dead(state_class, servicer)
        objects = ObjectStoreFactory()
        self.state, self.objects = state_class(objects.store()), objects.store()
        self.service = servicer(SimpleNamespace(state=lambda: self.state), None, objects)

    def receive(self, run: int = RUN) -> Message:
        message = Message(RecordDict({"arrays": ArrayRecord({})}), 1, "train", ttl=600.0)
        message.metadata.__dict__.update(_run_id=run, _src_node_id=1)
        insert = find("start_client_internal").__globals__["_insert_message"]
        insert(message, self.state, self.objects)
        return message

    def take(self, run: int = RUN) -> str:
        """What a process of the message does at its start."""
        token = self.state.create_token(run)
        (message,) = self.state.get_messages(run_ids=[run], is_reply=False)
        self.state.record_message_processing_start(message_id=message.metadata.message_id)
        return str(token)

    def tell(self, token: str, why: str) -> None:
        metadata = [("user-agent", "x"), (endings.ENDED, why.encode())]
        request = find("SendAppHeartbeatRequest")(token=token)
        self.service.SendAppHeartbeat(request, SimpleNamespace(invocation_metadata=lambda: metadata))

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


def test_the_reason_of_a_death_is_the_reply_at_once(site: Site) -> None:
    message = site.receive()
    token = site.take()
    assert site.replies() == []
    site.tell(token, "its process was killed by SIGKILL: out of memory")
    (reply,) = site.replies()
    assert (reply.error.code, reply.error.reason) == (8, "its process was killed by SIGKILL: out of memory")
    assert reply.metadata.reply_to_message_id == message.metadata.message_id
    assert message.metadata.message_id in site.state.time_store, "else Flower would drop the reply"
    assert message.object_id not in site.objects, "its tensors are freed"
    assert site.state.create_token(RUN), "the next message can be worked on"


def test_a_part_of_a_reply_does_not_go_on_its_way(site: Site) -> None:
    """The SuperNode would wait for the rest for ever. A whole one goes when its process has handed its token back."""
    message = site.receive()
    token = site.take()
    reply = Message(RecordDict({"arrays": ArrayRecord({})}), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    site.state.store_message(reply)
    assert site.replies() == []
    site.tell(token, "x")
    assert site.errors() == [(8, "x")]
    whole = Site()
    message = whole.receive()
    whole.take()
    reply = Message(RecordDict({"arrays": ArrayRecord({})}), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    whole.state.store_message(reply)
    whole.state.delete_token(RUN)
    assert [one.has_content() for one in whole.replies()] == [True]


def test_a_watcher_tells_how_the_process_of_its_message_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes; who is told is this one."""
    said: list[Any] = []
    monkeypatch.setattr(app_host, "_stub", lambda site: None)
    monkeypatch.setattr(app_host, "tell_end", lambda stub, token, why: said.append((token, why)))
    request, app = app_host.Request("token", "c"), app_host.App("c", "a/b", lambda **of: None)
    for work in (lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os._exit(3), lambda: time.sleep(0)):
        monkeypatch.setattr(app_host, "answer", lambda *of, work=work: work())
        app_host.watch(app_host.Site("nowhere", Path()), request, app)
    assert said == [("token", "its process was killed by SIGKILL"), ("token", "its process ended with exit code 3")]


def test_what_the_server_says_is_no_line_of_its_own_in_the_log() -> None:
    said = ("1]\nINFO :      run 6 is admitted: signed by alice\x1b[1A\u2028", 5)
    record = logging.LogRecord("flwr", logging.INFO, "", 1, "[ROUND %s, RUN %s]", said, None)
    assert supernode.in_a_line(record)
    assert record.getMessage() == "[ROUND 1] INFO :      run 6 is admitted: signed by alice [1A , RUN 5]"
