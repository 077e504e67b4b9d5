"""``python -P superlink.py ARGUMENT...``: Flower 1.25's ``flower-superlink``, with one repair.

A ServerApp sends a message in two steps, first the message, then its tensors. A SuperNode that asks in between is told to wait for them,
but Flower 1.25.0 counts the traffic of that answer, 0 bytes, as an error: the SuperNode then gives the message up and hangs for ever. It
happens once in a hundred messages to small models, and more often the longer the tensors take. Here an answer of no bytes is not counted.

Run by its path, since the package around it would import torch.
"""

from typing import Any

from flwr.server.superlink.linkstate import InMemoryLinkState, SqliteLinkState


def repair(kind: Any) -> None:
    """Let ``kind.store_traffic`` take an answer of no bytes for what it is."""
    count = kind.store_traffic

    def store_traffic(self: Any, run_id: int, *, bytes_sent: int, bytes_recv: int) -> None:
        if bytes_sent or bytes_recv:
            count(self, run_id, bytes_sent=bytes_sent, bytes_recv=bytes_recv)

    kind.store_traffic = store_traffic


def main() -> None:
    from flwr.server.app import run_superlink

    for kind in (InMemoryLinkState, SqliteLinkState):
        repair(kind)
    run_superlink()


if __name__ == "__main__":
    main()
