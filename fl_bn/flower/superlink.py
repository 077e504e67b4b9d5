"""``python -P superlink.py ARGUMENT...``: Flower 1.25's ``flower-superlink``, with one repair.

A ServerApp sends a message in two steps, first the message, then its tensors. A SuperNode that asks in between is told to wait for them,
but Flower 1.25.0 counts the traffic of that answer, 0 bytes, as an error: the SuperNode then gives the message up and hangs for ever. It
happens once in a hundred messages to small models, and more often the longer the tensors take. Here an answer of no bytes is not counted.

Run by its path, and so is ``compat``, since the package around them would import torch.
"""

import runpy
import sys
from pathlib import Path
from typing import Any


def repair(kind: Any) -> None:
    """Let ``kind.store_traffic`` take an answer of no bytes for what it is."""
    count = kind.store_traffic

    def store_traffic(self: Any, run_id: int, *, bytes_sent: int, bytes_recv: int) -> None:
        if bytes_sent or bytes_recv:
            count(self, run_id, bytes_sent=bytes_sent, bytes_recv=bytes_recv)

    kind.store_traffic = store_traffic


def main() -> None:
    compat = runpy.run_path(str(Path(__file__).with_name("compat.py")))
    try:
        compat["check_deployed"]("fl-bn's SuperLink")
    except ValueError as error:
        sys.exit(str(error))
    find = compat["find"]
    for kind in (find("InMemoryLinkState"), find("SqliteLinkState")):
        repair(kind)
    find("run_superlink")()


if __name__ == "__main__":
    main()
