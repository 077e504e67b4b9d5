"""Carry messages between the gate of a site and the process of an app: frames of JSON and bytes, on a socket.

What an app answers is read by its schema and never unpickled, since the process of an app runs foreign code. The other
direction needs no such care: a message to the app comes from the gate.
"""

from __future__ import annotations

import json
import pickle
import socket
import struct
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

KINDS = {"arrays": ArrayRecord, "metrics": MetricRecord, "config": ConfigRecord}
LARGEST_HEADER, LARGEST = 64 << 20, 16 << 30  # bytes of JSON in a frame, and of one of its parts
LENGTH = struct.Struct(">Q")


class WireError(Exception):
    """Signal that the process of an app sent something that is no answer."""


def send(connection: socket.socket, header: Mapping[str, Any], blobs: list[bytes] | None = None) -> None:
    """Send one frame: a header of JSON, and bytes."""
    blobs = blobs or []
    text = json.dumps({**header, "sizes": [len(blob) for blob in blobs]}).encode()
    connection.sendall(LENGTH.pack(len(text)) + text)
    for blob in blobs:
        connection.sendall(blob)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    """Receive one frame.

    Raises:
        EOFError: The other side has ended, before the frame or within it.
        WireError: These bytes are no frame.
    """
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    if length > LARGEST_HEADER:
        raise WireError(f"a header has {length} bytes, and at most {LARGEST_HEADER} are read")
    try:
        header = json.loads(_exactly(connection, length))
        sizes = header.pop("sizes")
        if not all(type(size) is int and 0 <= size <= LARGEST for size in sizes):
            raise TypeError(f"a size is no number of bytes up to {LARGEST}")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise WireError(f"a header cannot be read: {error}") from error
    return header, [_exactly(connection, size) for size in sizes]


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()  # it grows with what comes: an announced size is only a number
    while len(data) < size:
        if not (part := connection.recv(min(size - len(data), 1 << 20))):
            raise EOFError
        data += part
    return bytes(data)


def send_message(connection: socket.socket, message: Message, context: Context) -> None:
    """Send a message and its context from the gate to an app."""
    send(connection, {}, [pickle.dumps((message, context))])


def receive_message(connection: socket.socket) -> tuple[Message, Context]:
    """Receive what ``send_message`` sent."""
    _, (content,) = receive(connection)
    message, context = pickle.loads(content)
    return message, context


def describe(records: RecordDict, blobs: list[bytes]) -> list[Any]:
    """Describe Flower's records in JSON. Their bytes are appended to ``blobs``."""

    def put(blob: bytes) -> dict[str, int]:
        blobs.append(blob)
        return {"blob": len(blobs) - 1}

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        return put(value) if isinstance(value, bytes) else value

    found: list[Any] = []
    for name, record in records.items():
        if isinstance(record, ArrayRecord):
            arrays = {key: [one.dtype, list(one.shape), one.stype, put(one.data)] for key, one in record.items()}
            found.append([name, "arrays", arrays])
        else:
            kind = "metrics" if isinstance(record, MetricRecord) else "config"
            found.append([name, kind, {key: plain(value) for key, value in record.items()}])
    return found


def records_of(described: Any, blobs: list[bytes]) -> RecordDict:
    """Return the records that ``describe`` described.

    Raises:
        WireError: ``described`` has another form, or holds a value that Flower cannot send.
    """

    def whole(value: Any) -> Any:
        if isinstance(value, list):
            return [whole(item) for item in value]
        if isinstance(value, dict):
            return blobs[value["blob"]]
        if isinstance(value, str):
            value.encode()
        elif isinstance(value, int) and not -(2**63) <= value < 2**64:  # Flower sends sint64 or uint64
            raise ValueError(f"the number {value} has more than 64 bits")
        return value

    def array(dtype: str, shape: list[int], stype: str, data: Any) -> Array:
        sizes = tuple(map(whole, shape))
        if not all(type(size) is int and 0 <= size < 1 << 31 for size in sizes):  # Flower sends int32
            raise ValueError(f"{shape} is no shape")
        return Array(dtype=whole(dtype), shape=sizes, stype=whole(stype), data=whole(data))

    try:
        found = RecordDict()
        for name, kind, items in described:
            made = {whole(key): array(*item) if kind == "arrays" else whole(item) for key, item in items.items()}
            found[whole(name)] = KINDS[kind](made)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise WireError(f"a record cannot be read: {type(error).__name__}: {error}") from error
    return found
