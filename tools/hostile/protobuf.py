"""Change messages as bytes: their protobuf and JSON, and the objects into which Flower takes a message apart.

A client that does not run Flower's SuperNode may send any bytes as the objects of its reply. Flower puts the objects
together in the server's process, when the server pulls the reply. The SuperLink between them checks only an object's
name and length.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Message

from tools.hostile import npy
from tools.hostile.npy import Rng, pick

VARINTS = [0, 1, 2, 127, 128, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]
DOUBLES = [np.nan, np.inf, -np.inf, 0.0, -0.0, 5e-324, 1.7e308, -1.7e308, 2.0**53, 3.5e38]
TEXTS = [b"", b"\xff\xfe", b"\x00", b"x" * 100_000, b"\xe2\x80\xae", b"../..", b"nan"]
Field = tuple[int, int, Any]  # number, wire type, value


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at, value = at + 1, value | (byte & 127) << shift
        if byte < 128:
            return value, at
    raise IndexError("a number of more than ten bytes")


def fields_of(data: bytes) -> list[Field] | None:
    """Return the fields of a protobuf message; None if ``data`` is not protobuf."""
    found, at = list[Field](), 0
    try:
        while at < len(data):
            tag, at = read_varint(data, at)
            number, wire = tag >> 3, tag & 7
            if wire == 0:
                value, at = read_varint(data, at)
                found.append((number, wire, value))
                continue
            size, at = read_varint(data, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
            if number == 0 or at + size > len(data):
                return None
            found.append((number, wire, data[at : at + size]))
            at += size
    except (IndexError, KeyError):
        return None
    return found


def put_together(fields: list[Field]) -> bytes:
    out = bytearray()
    for number, wire, value in fields:
        out += varint(number << 3 | wire)
        out += varint(value) if wire == 0 else varint(len(value)) + value if wire == 2 else value
    return bytes(out)


def flipped(data: bytes, rng: Rng) -> bytes:
    changed = bytearray(data or b"x")
    for _ in range(int(rng.integers(1, 4))):
        changed[int(rng.integers(len(changed)))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def changed_protobuf(data: bytes, rng: Rng) -> bytes:
    """Change one field of a message, or of a message inside it: omit, repeat or move it, or change its number, type,
    size or value.
    """
    fields = fields_of(data)
    if not fields or rng.integers(12) == 0:
        return pick(rng, [flipped(data, rng), data[: int(rng.integers(len(data) + 1))], data + rng.bytes(9), b"", data * 2])
    at = int(rng.integers(len(fields)))
    number, wire, value = fields[at]
    if wire == 2 and rng.integers(4) and fields_of(value):
        fields[at] = (number, wire, changed_protobuf(value, rng))
        return put_together(fields)
    how = int(rng.integers(9))
    if how == 0:
        del fields[at]
    elif how == 1:
        fields.insert(int(rng.integers(len(fields) + 1)), fields[at])
    elif how == 2:
        fields[at] = (int(pick(rng, [number + 1, max(1, number - 1), 999, 2**29 - 1])), wire, value)
    elif how == 3:
        other = int(pick(rng, [0, 1, 2, 5]))
        fields[at] = (number, other, 7 if other == 0 else b"\x01" * {1: 8, 2: 3, 5: 4}[other])
    elif how == 4 and wire == 2:  # a length that does not match the value
        return put_together(fields[:at]) + varint(number << 3 | 2) + varint(pick(rng, VARINTS)) + value
    elif how == 5:
        depth = varint(number << 3 | 3) * int(pick(rng, [1, 200, 5000]))  # groups that are opened but never closed
        return put_together(fields[:at]) + depth
    elif how == 6 and wire == 2:
        for _ in range(int(pick(rng, [2, 120]))):  # nests the field in itself
            value = put_together([(number, 2, value)])
        fields[at] = (number, wire, value)
    elif wire == 0:
        fields[at] = (number, wire, pick(rng, VARINTS))
    elif wire == 1:
        fields[at] = (number, wire, np.float64(pick(rng, DOUBLES)).tobytes())
    elif wire == 5:
        fields[at] = (number, wire, np.float32(pick(rng, [np.nan, np.inf, 0.0, -1.0, 3e38])).tobytes())
    else:
        fields[at] = (number, wire, pick(rng, [*TEXTS, value[:-1], value + b"x", value * 100, flipped(value, rng)]))
    return put_together(fields)


def changed_json(data: bytes, rng: Rng) -> bytes:
    try:
        tree = json.loads(data)
    except ValueError:
        return flipped(data, rng)
    nested = "[" * 50_000
    raw = [nested, nested + "]" * 50_000, "", "null", "1", "[]", '{"a": 1e999}', '{"a": ' + "9" * 5000 + "}", '"\\ud800"', "NaN"]
    how = int(rng.integers(6))
    if how == 0 or not isinstance(tree, dict) or not tree:
        return str(pick(rng, raw)).encode()
    key = pick(rng, list(tree))
    if how == 1:
        del tree[key]
    elif how == 2:
        tree[pick(rng, ["", "x", "\x00", "y" * 10_000, "\ud800"])] = tree.pop(key)
    elif how == 3:
        tree["more"] = tree[key]
    else:
        tree[key] = pick(rng, [None, 1, -1, 2**70, 1.5, True, "", "x", [], [[1]], [-1], [True], ["x"], {}, [2**62], tree[key][:-1]])
    return json.dumps(tree).encode()


def in_bytes(message: Message, rng: Rng) -> tuple[str, Message]:
    """Change the bytes of one of the objects into which Flower takes ``message`` apart.

    Returns:
        What was changed, and the message that Flower puts together from the objects.

    Raises:
        Exception: Any exception that Flower raises for such objects.
    """
    what = ""

    def change(contents: dict[str, bytes]) -> None:
        nonlocal what
        name = pick(rng, sorted(contents, key=lambda key: (contents[key], key)))
        what, contents[name] = changed_object(contents[name], rng)

    changed = opened(message, change)
    return what, changed


def opened(message: Message, change: Callable[[dict[str, bytes]], None]) -> Message:
    """Take ``message`` apart into Flower's objects, pass them to ``change``, and let Flower put them together again.

    Args:
        message: The message.
        change: Changes a dict of the objects in place: object id -> bytes.
    """
    from flwr.common.inflatable import get_all_nested_objects  # private to Flower, and in another module in later versions
    from flwr.common.inflatable_utils import inflate_object_from_contents

    identity = message.object_id
    contents = {name: one.deflate() for name, one in get_all_nested_objects(message).items()}
    change(contents)
    inflated: Any = inflate_object_from_contents(identity, contents)
    if isinstance(inflated, Message):
        inflated.metadata.__dict__["_message_id"] = identity
    return inflated  # type: ignore[no-any-return]


def changed_object(content: bytes, rng: Rng) -> tuple[str, bytes]:
    head, _, body = content.partition(b"\x00")
    kind, of, _ = head.decode().split(" ")
    children, what = of.split(",") if of else [], kind
    if rng.integers(8) == 0:
        what += " head"
        if rng.integers(2):
            kind = pick(rng, ["Message", "RecordDict", "ArrayRecord", "Array", "ArrayChunk", "ConfigRecord", "MetricRecord"])
        else:
            children = pick(rng, [[], children[:-1], children * 2, children[::-1], ["0" * 64]])
    elif kind in ("Message", "ConfigRecord", "MetricRecord"):
        body = changed_protobuf(body, rng)
    elif kind == "ArrayChunk":
        body = npy.changed(body, rng)
    else:
        body = changed_json(body, rng)
    return what, f"{kind} {','.join(children)} {len(body)}".encode() + b"\x00" + body
