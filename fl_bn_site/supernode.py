"""Run Flower 1.25's ``flower-supernode`` so that it asks for messages more often, and answers messages that nobody answers.

Usage: ``python -P supernode.py --poll-seconds S ARGUMENT...``.
Flower's SuperNode asks the server for messages every 3 s. It looks for the answer of its app every 0.5 s, and waits 1 s
for a tensor that has not arrived. Here it asks every S seconds while messages come, and every 3 s again after a minute
without any message. The two other waits are 0.1 s.

The gate (``gate.py``) answers where the process of an app dies. Where the gate's own process dies or hangs, Flower 1.25
notices it after a minute, but does not tell the server. The round then waits until its deadline. Here the message gets an
error reply with the reason. The SuperNode also notices when nobody asks it for work for ``ABSENT`` seconds.

The SuperNode sends a reply to the server only when all of the reply has arrived. A process may die while it hands over a
reply. Without this rule, the SuperNode would then wait for the rest of the reply for ever.

Where Flower's SuperNode cannot open the app of a run, it ends. Here the messages of that run get an error as their answer.
In Flower, two kinds of messages delay the replies to all later messages: one that cannot be received completely, and one whose
run has just ended. Here they do not (``answer_each_message``).

This file is run by its path, and runs ``compat`` by its path, since the package around them would import torch.
"""

import argparse
import logging
import runpy
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc

ASKING = 3.0  # seconds that Flower sleeps between two questions to the server; it sleeps less only while its app works
IDLE = 60.0  # seconds without a message after which the pause is Flower's again
SHORTEST = 0.1  # seconds between two looks for the answer of the app, or for a tensor
ABSENT = 15.0  # seconds after which the program that runs ClientApps counts as gone, if it has not asked for work
NOT_LET_IN = "generator didn't yield"  # Flower's last error where the server refuses this site; the log has the reason before it
SILENT = "its process sent no heartbeat for a minute, or none in its first half minute"
NOT_RECEIVED = "this site could not receive the message: the connection to the server ended before it was complete"
UNREADABLE = "this site cannot open the app of the run ({}): pack and submit it anew"
NOBODY = f"the program that runs its ClientApps has not asked for work for {ABSENT:.0f} s: read the site's logs/clientapp.log"

compat = runpy.run_path(str(Path(__file__).parents[1] / "fl_bn" / "flower" / "compat.py"))
find: Callable[[str], Any] = compat["find"]


class PollingTime:
    """Replace the module ``time`` in Flower's SuperNode: ``sleep`` is shorter while there is work.

    All other functions are those of the module ``time``.

    Args:
        poll: The longest pause between two requests to the server while messages come, in seconds.
    """

    def __init__(self, poll: float) -> None:
        self.poll, self.worked = poll, -IDLE

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds``, or for less while messages come."""
        if seconds < ASKING:  # the app works on a message
            self.worked = time.monotonic()
            time.sleep(min(seconds, SHORTEST))
        else:
            time.sleep(seconds if time.monotonic() - self.worked > IDLE else min(seconds, self.poll))


# Processes that ended


def fail(state: Any, run: int, why: str, unreadable: bool = False) -> None:
    """Send an error as the answer to each message that the SuperNode holds for a run, since no process can answer it.

    Args:
        state: Flower's state of the SuperNode, which holds the messages.
        run: Flower's id of the run.
        why: The reason, as text for the server.
        unreadable: Whether the app of the run cannot be opened. Then the server does not ask this site again.
    """
    from flwr.app import Error, Message

    codes = find("ErrorCode")
    error = Error(codes.LOAD_CLIENT_APP_EXCEPTION if unreadable else codes.CLIENT_APP_CRASHED, why)
    insert = find("start_client_internal").__globals__["_insert_message"]
    with state.lock_msg_store:
        entries = [entry for entry in state.msg_store.values() if entry.message.metadata.run_id == run]
        for entry in entries:
            answers = entry.message.metadata.reply_to_message_id
            if answers and not entry.is_retrieved:  # a part of a reply
                state.delete_messages(message_ids=[entry.message.metadata.message_id])
                state.object_store.delete(entry.message.metadata.message_id)
        for entry in entries:
            message, identity = entry.message, entry.message.metadata.message_id
            if message.metadata.reply_to_message_id:
                continue
            entry.is_retrieved = True
            state.record_message_processing_start(message_id=identity)  # without both times Flower drops the reply
            state.record_message_processing_end(message_id=identity)
            logging.getLogger("flwr").warning("a %s message gets an error as its answer: %s", message.metadata.message_type, why)
            insert(Message(error, reply_to=message), state, state.object_store)


def answer_for_the_dead(state_class: Any, servicer: Any) -> None:
    """Change Flower's classes so that a message whose process ended is answered with an error.

    Args:
        state_class: The class of the SuperNode's state.
        servicer: The class of the service for ClientApps.
    """
    get_messages, list_apps = state_class.get_messages, servicer.ListAppsToLaunch

    def whole_replies(self: Any, *, run_ids: Any = None, is_reply: bool | None = None, limit: int | None = None) -> Any:
        """Return messages as Flower does, but no replies of a run whose process still works, since they may be incomplete.

        A process that works holds a token. It returns the token after its whole reply.
        """
        if is_reply:
            _look_for_host(self)
            self._cleanup_expired_tokens()
            with self.lock_token_store:
                busy = set(self.token_store)
            run_ids = _runs(self) - busy if run_ids is None else set(run_ids) - busy
        messages = get_messages(self, run_ids=run_ids, is_reply=is_reply, limit=limit)
        for message in messages if is_reply else ():
            if message.has_error():  # nobody fetches the tensors of the message that it answers
                self.object_store.delete(message.metadata.reply_to_message_id)
        return messages

    def expired(self: Any, records: Iterable[tuple[int, float]]) -> None:
        for run, _ in records:
            fail(self, run, SILENT)

    def asked_for_work(self: Any, request: Any, context: Any) -> Any:
        self.state_factory.state().asked = time.monotonic()
        return list_apps(self, request, context)

    state_class.get_messages, state_class._on_tokens_expired = whole_replies, expired
    servicer.ListAppsToLaunch = asked_for_work


def answer_for_the_unreadable(names: dict[str, Any]) -> None:
    """Change Flower's main loop: where the app of a run cannot be opened, answer with an error and go on.

    Args:
        names: The globals of the module with the main loop.
    """
    take_in = names["_pull_and_store_message"]

    def guarded(**of: Any) -> int | None:
        received: list[Any] = []

        def receive() -> Any:
            received[:] = [of["receive"]()]
            return received[0]

        try:
            taken: int | None = take_in(**of | {"receive": receive})
        except Exception as error:  # a package is bytes from elsewhere: zipfile, tomllib and Flower may raise anything
            if not received or received[0] is None or isinstance(error, grpc.RpcError):
                raise
            message = received[0][0]
            taken = message.metadata.run_id
            of["state"].store_message(message)
            fail(of["state"], taken, UNREADABLE.format(f"{type(error).__name__}: {error}"), unreadable=True)
            with suppress(grpc.RpcError):  # the error is sent to the server nevertheless
                of["confirm_message_received"](taken, message.metadata.message_id)
        return taken

    names["_pull_and_store_message"] = guarded


def answer_each_message(names: dict[str, Any]) -> None:
    """Change Flower's main loop: the answer to a message is sent before the next message is taken.

    After each message Flower 1.25 waits for the first reply, whichever message it answers, and sends it. Two things go wrong:

    * A run may end while its message arrives. Flower then does not wait for its reply. But if the app has begun, it still
      replies. Flower sends this late reply after the next message. From then on, every reply is sent one message too late.
    * If a message cannot be received completely, Flower waits for ever for the reply to it. Here the server gets an
      error as the answer.

    Args:
        names: The globals of the module with the main loop.
    """
    take_in, send_replies, current = names["_pull_and_store_message"], names["_push_messages"], ""

    def taken(**of: Any) -> int | None:
        nonlocal current
        current = ""
        message: Any = None

        def receive() -> Any:
            nonlocal current, message
            if (received := of["receive"]()) is not None:
                message, current = received[0], received[0].metadata.message_id
            return received

        run: int | None = take_in(**of | {"receive": receive})
        if run is None and current:  # its run has ended
            _forget(of["state"], of["object_store"], current)
        elif current and not _is_owed(of["state"], current):  # Flower could not receive it, and has deleted it
            of["state"].store_message(message)
            fail(of["state"], message.metadata.run_id, NOT_RECEIVED)
        return run

    def sent(**of: Any) -> None:
        while _is_owed(of["state"], current):
            send_replies(**of)

    names["_pull_and_store_message"], names["_push_messages"] = taken, sent


def repeat_cancelled_calls(names: dict[str, Any]) -> None:
    """Change Flower's connection to the server: calls that a stopping server cancels are repeated.

    Args:
        names: The globals of the module with the main loop.
    """
    make = names["_make_fleet_connection_retry_invoker"]

    def made(**options: Any) -> Any:
        invoker = make(**options)
        compat["repeat_cancelled"](invoker)
        return invoker

    names["_make_fleet_connection_retry_invoker"] = made


def _is_owed(state: Any, message: str) -> bool:
    """Return whether the SuperNode has a message with this id, or a reply to it. Flower deletes both once the reply is sent."""
    with state.lock_msg_store:
        known = [entry.message.metadata for entry in state.msg_store.values()]
    return any(message in (one.message_id, one.reply_to_message_id) for one in known)


def _forget(state: Any, objects: Any, message: str) -> None:
    """Delete the message with this id and its tensors, unless an app has taken it."""
    with state.lock_msg_store:
        entry = state.msg_store.get(message)
        if entry is None or entry.is_retrieved:
            return
        state.delete_messages(message_ids=[message])
    objects.delete(message)


def _runs(state: Any) -> set[int]:
    with state.lock_msg_store:
        return {entry.message.metadata.run_id for entry in state.msg_store.values()}


def _look_for_host(state: Any) -> None:
    """Send an error as the answer to every message if no program has asked for work for ``ABSENT`` seconds.

    Flower calls this function again and again while it waits for replies. Only the time of such a wait counts.
    """
    now = time.monotonic()
    state.awaited = now if now - getattr(state, "looked", now) > ASKING else getattr(state, "awaited", now)
    state.looked = now
    if now - max(getattr(state, "asked", 0.0), state.awaited) > ABSENT:
        for run in _runs(state):
            fail(state, run, NOBODY)
            state.delete_token(run)


# What is said


def in_a_line(record: logging.LogRecord) -> bool:
    """Make a log record one line, since its texts may be the server's, and a gRPC error would take seven lines. Return True."""

    def short(value: Any) -> Any:
        if isinstance(value, str):
            return "".join(character if character.isprintable() else " " for character in value)
        code, details = getattr(value, "code", None), getattr(value, "details", None)
        return f"{code().name}: {details()}" if isinstance(value, Exception) and callable(code) and callable(details) else value

    record.msg = short(record.msg)
    if isinstance(record.args, tuple):
        record.args = tuple(map(short, record.args))
    return True


def own_options(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split a command line into the options of this program and the remaining words, which are for Flower's program."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--poll-seconds", type=float, default=ASKING)
    return parser.parse_known_args(words)


def main() -> None:
    """Run the SuperNode until it is stopped."""
    own, rest = own_options(sys.argv[1:])
    try:
        compat["check_deployed"]("fl-bn's SuperNode")
    except ValueError as error:
        sys.exit(str(error))
    names = find("start_client_internal").__globals__  # the globals of the module with Flower's main loop
    names["time"] = PollingTime(own.poll_seconds)
    names["pull_objects"] = partial(names["pull_objects"], initial_backoff=SHORTEST)
    answer_for_the_dead(find("InMemoryNodeState"), find("ClientAppIoServicer"))
    answer_for_the_unreadable(names)
    answer_each_message(names)
    repeat_cancelled_calls(names)
    logging.getLogger("flwr").addFilter(in_a_line)
    sys.argv = ["flower-supernode", *rest]
    try:
        find("flower_supernode")()
    except RuntimeError as error:
        if NOT_LET_IN not in str(error):
            raise
        sys.exit(1)


if __name__ == "__main__":
    main()
