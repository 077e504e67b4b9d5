"""``python -P superlink.py ARGUMENT...``: Flower 1.25's ``flower-superlink``, with two repairs.

A ServerApp sends a message in two steps, first the message, then its tensors. A SuperNode that asks in between is told to wait for them,
but Flower 1.25.0 counts the traffic of that answer, 0 bytes, as an error: the SuperNode then gives the message up and hangs for ever. It
happens once in a hundred messages to small models, and more often the longer the tensors take. Here an answer of no bytes is not counted.

Replies of two sites that share a tensor, bit for bit, and come at the same moment: Flower's store looks whether the tensor is known, and
enters it if not. Both found it unknown, the second failed, and that reply was lost. Here the store is changed by one thread at a time.

Its log leaves out the line that every question of a site for messages would make, twice a second and site.

Run by its path, and so is ``compat``, since the package around them would import torch.
"""

import logging
import runpy
import sys
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

POLL = "[Fleet.PullMessages]"


def repair(kind: Any) -> None:
    """Let ``kind.store_traffic`` take an answer of no bytes for what it is."""
    count = kind.store_traffic

    def store_traffic(self: Any, run_id: int, *, bytes_sent: int, bytes_recv: int) -> None:
        if bytes_sent or bytes_recv:
            count(self, run_id, bytes_sent=bytes_sent, bytes_recv=bytes_recv)

    kind.store_traffic = store_traffic


def one_at_a_time(kind: Any) -> None:
    """Let threads enter into, and delete from, the stores of ``kind`` one after the other: all of them are one database of this process."""
    alone = threading.RLock()

    def locked(change: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(change)
        def wait(*args: Any, **kwargs: Any) -> Any:
            with alone:
                return change(*args, **kwargs)

        return wait

    for name in ("preregister", "delete", "delete_objects_in_run"):
        setattr(kind, name, locked(getattr(kind, name)))


def tells(record: logging.LogRecord) -> bool:
    """Whether a line of the log tells more than that a site asks for messages."""
    return POLL not in str(record.msg)


def main() -> None:
    compat = runpy.run_path(str(Path(__file__).with_name("compat.py")))
    try:
        compat["check_deployed"]("fl-bn's SuperLink")
    except ValueError as error:
        sys.exit(str(error))
    find = compat["find"]
    for kind in (find("InMemoryLinkState"), find("SqliteLinkState")):
        repair(kind)
    one_at_a_time(find("SqliteObjectStore"))
    logging.getLogger("flwr").addFilter(tells)
    find("run_superlink")()


if __name__ == "__main__":
    main()
