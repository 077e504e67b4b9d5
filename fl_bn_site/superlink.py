"""Run Flower 1.25's ``flower-superlink`` with three repairs: ``python -P superlink.py ARGUMENT...``.

Messages whose tensors have not arrived (``repair``): a ServerApp first sends a message, and then its tensors. If a
SuperNode asks in between, the SuperLink tells it to wait. Flower 1.25.0 fails when it counts the traffic of that
answer, which is 0 bytes. The SuperNode then gives the message up and hangs for ever. This happens for one in a
hundred messages of a small model, and for more with larger models. Here, answers of 0 bytes are not counted.

Replies with equal tensors (``one_at_a_time``): the replies of two sites may contain the same tensor, bit for
bit. Flower's store checks whether it has a tensor before it enters the tensor. If two threads check at the same
time, the second thread fails, and its reply is lost. Here, one thread at a time changes the store.

Replies without tensors (``whole_replies``): a site that ends while it sends a reply leaves a reply whose tensors
never come. Flower hands this reply to the ServerApp, which waits for the tensors for more than an hour, beyond
any deadline of the round. Here, a reply is handed over when it is complete. If its site has gone before that,
the ServerApp is told that the site does not answer.

The log is changed, too. Each site may ask for messages several times a second. The lines about these questions are
left out.

This file is run by its path, and runs ``compat`` by its path, since the package around them would import torch.
"""

import logging
import runpy
import threading
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

POLL = "[Fleet.PullMessages]"  # part of the log line that Flower writes when a site asks for messages
UNDELIVERED = """
    SELECT message_res.message_id AS reply, reply_to_message_id AS asked FROM message_res JOIN node ON node_id = src_node_id
    WHERE reply_to_message_id IN ({marks}) AND delivered_at = '' AND online_until >= ?
"""
MISSING = """
    WITH RECURSIVE part(id) AS (SELECT ? UNION SELECT child_id FROM object_children JOIN part ON parent_id = part.id)
    SELECT count(*) AS missing FROM part LEFT JOIN objects ON object_id = part.id WHERE is_available IS NOT 1
"""


def repair(kind: Any) -> None:
    """Make ``kind.store_traffic`` ignore answers of 0 bytes. Flower's own method raises an error for them.

    Args:
        kind: A class of Flower's LinkState. It is changed in place.
    """
    count = kind.store_traffic

    def store_traffic(self: Any, run_id: int, *, bytes_sent: int, bytes_recv: int) -> None:
        if bytes_sent or bytes_recv:
            count(self, run_id, bytes_sent=bytes_sent, bytes_recv=bytes_recv)

    kind.store_traffic = store_traffic


def whole_replies(kind: Any) -> None:
    """Make ``kind.get_message_res`` hold back a reply while its site is online and some of its tensors are missing.

    Args:
        kind: Flower's class SqliteLinkState. It is changed in place.
    """
    get_replies = kind.get_message_res

    def get_message_res(self: Any, message_ids: set[str]) -> Any:
        marks = ",".join("?" * len(message_ids))
        replies = self.query(UNDELIVERED.format(marks=marks), (*message_ids, time.time())) if message_ids else []
        partial = {r["asked"] for r in replies if self.object_store.query(MISSING, (r["reply"],))[0]["missing"]}
        return get_replies(self, message_ids - partial) if message_ids - partial else []

    kind.get_message_res = get_message_res


def one_at_a_time(kind: Any) -> None:
    """Put the methods that change a store under one lock, so that only one thread runs them at a time.

    All instances share one lock, because they share one database.

    Args:
        kind: Flower's class SqliteObjectStore. It is changed in place.
    """
    alone = threading.RLock()

    def locked(change: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            with alone:
                return change(*args, **kwargs)

        return wait

    for name in ("preregister", "delete", "delete_objects_in_run"):
        setattr(kind, name, locked(getattr(kind, name)))


def main() -> None:
    """Run the SuperLink until it is stopped."""
    find = runpy.run_path(str(Path(__file__).parents[1] / "fl_bn" / "flower" / "compat.py"))["find"]
    repair(find("SqliteLinkState"))
    whole_replies(find("SqliteLinkState"))
    one_at_a_time(find("SqliteObjectStore"))
    logging.getLogger("flwr").addFilter(lambda record: POLL not in str(record.msg))
    next(one for one in entry_points(group="console_scripts") if one.name == "flower-superlink").load()()


if __name__ == "__main__":
    main()
