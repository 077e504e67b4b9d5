"""Run Flower 1.25's ``flower-superlink`` with four repairs: ``python -P superlink.py ARGUMENT...``.

A ServerApp sends a message in two steps, first the message, then its tensors. A SuperNode that asks in between
is told to wait for them, but Flower 1.25.0 counts the traffic of that answer, 0 bytes, as an error. The
SuperNode then gives the message up and hangs for ever. It happens once in a hundred messages to small models,
and more often the longer the tensors take. Here an answer of no bytes is not counted.

Replies of two sites may share a tensor, bit for bit, and come at the same moment. Flower's store looks whether
the tensor is known, and enters it if not. Both find it unknown, the second fails, and that reply is lost. Here
the store is changed by one thread at a time.

A reply comes in two steps, too. A site that ends between them leaves a reply whose tensors never come. Flower
hands it to the ServerApp, which waits for them more than an hour, whatever the round's deadline. Here a reply
is handed over when all of it is there. If its site has gone by then, the ServerApp is told so, and asks again.

A full disk under its database fails whatever is to be entered: a site's reply, a run's next message. Flower's
ServerApp and SuperNode take that for their end. Here a change that finds the disk full waits for room on it,
and begins again.

Each site asks for messages twice a second. Here the log leaves out the line that every such question would
make.

This file is run by its path, and runs ``compat`` by its path, since the package around them would import torch.
"""

import inspect
import logging
import runpy
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

POLL = "[Fleet.PullMessages]"
FULL = "disk is full"  # of SQLite's "database or disk is full"
PATIENCE, PAUSE = 600.0, 1.0  # seconds that something waits for room on the disk, and between its tries
UNDELIVERED = """
    SELECT message_res.message_id AS reply, reply_to_message_id AS asked FROM message_res JOIN node ON node_id = src_node_id
    WHERE reply_to_message_id IN ({marks}) AND delivered_at = '' AND online_until >= ?
"""
MISSING = """
    WITH RECURSIVE part(id) AS (SELECT ? UNION SELECT child_id FROM object_children JOIN part ON parent_id = part.id)
    SELECT count(*) AS missing FROM part LEFT JOIN objects ON object_id = part.id WHERE is_available IS NOT 1
"""


def repair(kind: Any) -> None:
    """Make ``kind.store_traffic`` accept an answer of no bytes."""
    count = kind.store_traffic

    def store_traffic(self: Any, run_id: int, *, bytes_sent: int, bytes_recv: int) -> None:
        if bytes_sent or bytes_recv:
            count(self, run_id, bytes_sent=bytes_sent, bytes_recv=bytes_recv)

    kind.store_traffic = store_traffic


def whole_replies(kind: Any) -> None:
    """Make ``kind`` hand over a reply only when all its tensors are there, as long as its site is here to send them."""
    get_replies = kind.get_message_res

    def get_message_res(self: Any, message_ids: set[str]) -> Any:
        marks = ",".join("?" * len(message_ids))
        replies = self.query(UNDELIVERED.format(marks=marks), (*message_ids, time.time())) if message_ids else []
        partial = {r["asked"] for r in replies if self.object_store.query(MISSING, (r["reply"],))[0]["missing"]}
        return get_replies(self, message_ids - partial) if message_ids - partial else []

    kind.get_message_res = get_message_res


def one_at_a_time(kind: Any) -> None:
    """Make threads change the stores of ``kind`` one after the other.

    All of these stores are one database of this process.
    """
    alone = threading.RLock()

    def locked(change: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(change)
        def wait(*args: Any, **kwargs: Any) -> Any:
            with alone:
                return change(*args, **kwargs)

        return wait

    for name in ("preregister", "delete", "delete_objects_in_run"):
        setattr(kind, name, locked(getattr(kind, name)))


def wait_for_room(*kinds: Any) -> None:
    """Change the methods of the classes ``kinds`` so that they survive a full disk.

    A method that fails because the disk is full is called again until there is room, for ``PATIENCE`` seconds at
    most. That is safe, since each method is one database transaction. If one such method calls another, only the
    outer one is repeated.

    Args:
        kinds: The classes; they are changed in place.
    """
    thread = threading.local()

    def patient(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(thread, "another", False):
                return method(*args, **kwargs)
            thread.another, end, reported = True, time.monotonic() + PATIENCE, False
            try:
                while True:
                    try:
                        return method(*args, **kwargs)
                    except sqlite3.OperationalError as error:
                        if FULL not in str(error) or time.monotonic() > end:
                            raise
                    if not reported:
                        logging.getLogger("flwr").warning("the disk of the SuperLink's state is full: make room on it; trying again")
                    reported = True
                    time.sleep(PAUSE)
            finally:
                thread.another = False

        return call

    for kind in kinds:
        for name, method in list(vars(kind).items()):
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(kind, name, patient(method))


def tells(record: logging.LogRecord) -> bool:
    """Return whether a line of the log says more than that a site asks for messages."""
    return POLL not in str(record.msg)


def main() -> None:
    """Run the SuperLink until it is stopped."""
    compat = runpy.run_path(str(Path(__file__).parents[1] / "fl_bn" / "flower" / "compat.py"))
    try:
        compat["check_deployed"]("fl-bn's SuperLink")
    except ValueError as error:
        sys.exit(str(error))
    find = compat["find"]
    for kind in (find("InMemoryLinkState"), find("SqliteLinkState")):
        repair(kind)
    whole_replies(find("SqliteLinkState"))
    one_at_a_time(find("SqliteObjectStore"))
    wait_for_room(find("SqliteLinkState"), find("SqliteObjectStore"))
    logging.getLogger("flwr").addFilter(tells)
    find("run_superlink")()


if __name__ == "__main__":
    main()
