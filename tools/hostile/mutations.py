"""Change messages as bytes: the objects into which Flower takes a message apart, their protobuf and JSON, and arrays in NumPy's format.

A client that does not run Flower's SuperNode may send any bytes as the objects of its reply. Flower puts the objects
together in the server's process, when the server pulls the reply. The SuperLink between them checks only an object's
name and length. New values are hostile, or close to the honest ones.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flwr.app import Message

Rng = np.random.Generator
Field = tuple[int, int, Any]  # of protobuf: number, wire type, value

VARINTS = [0, 1, 2, 127, 128, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]
DOUBLES = [np.nan, np.inf, -np.inf, 0.0, -0.0, 5e-324, 1.7e308, -1.7e308, 2.0**53, 3.5e38]
TEXTS = [b"", b"\xff\xfe", b"\x00\x1b[2J", b"a/b\n", b"x" * 100_000, b"[" * 100_000, b"\xe2\x80\xae", b"../..", b"nan", b'{"a": 1}']
NESTED = "[" * 50_000
JSONS = [NESTED, NESTED + "]" * 50_000, "", "null", "1", "[]", '{"a": 1e999}', '{"a": ' + "9" * 5000 + "}", '"\\ud800"', "NaN"]
KINDS = ["Message", "RecordDict", "ArrayRecord", "Array", "ArrayChunk", "ConfigRecord", "MetricRecord"]
DESCRS: list[Any] = [
    *("<f2", ">f4", "<f8", "<i4", "<c8", "<U4", "|S4", "|V4", "<M8[s]", "f4", "float32", "<f4,<f4", "(2,)<f4", "(True,)<f4", "O", ""),
    *("x" * 500, ("<f4", (2,)), ("<f4", (0,)), ("<f4", (2**31,)), ("<f4", (True,)), (("<f4", (2,)), (3,))),
    *([("a", "<f4")], [("a", "<f4"), ("a", "<f4")], [("a", "|O")], [], 7, None, True, 1.5, b"<f4"),
]  # fmt: skip
HEADS = [  # sent in place of the header's whole dict
    "", "x", "None", "[]", "{'descr': '<f4'", "__import__('os').getpid()", "(" * 2000, "-" * 3000 + "1", "1" + "+1" * 1500, "{**{}}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (3L,), }", "{'descr': '<f4', 'fortran_order': False, 'shape': (0x3,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}\x00\x00", "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), 'more': 1}",
    "{'shape': (3,)}", "{1: 2}", "{[]: 1}", "'" + "\\x" * 100,
]  # fmt: skip


def pick(rng: Rng, values: Sequence[Any]) -> Any:
    return values[int(rng.integers(len(values)))]


def flipped(data: bytes, rng: Rng) -> bytes:
    changed = bytearray(data or b"x")
    for _ in range(int(rng.integers(1, 4))):
        changed[int(rng.integers(len(changed)))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


# protobuf


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
    elif how == 5:  # groups that are opened but never closed
        return put_together(fields[:at]) + varint(number << 3 | 3) * int(pick(rng, [1, 200, 5000]))
    elif how == 6 and wire == 2:
        for _ in range(int(pick(rng, [2, 120]))):  # nests the field in itself
            value = put_together([(number, 2, value)])
        fields[at] = (number, wire, value)
    elif wire == 0:
        fields[at] = (number, wire, pick(rng, [*VARINTS, value + 1, max(0, value - 1), 2 * value]))
    elif wire == 1:
        honest = np.frombuffer(value)[0]
        fields[at] = (number, wire, np.float64(pick(rng, [*DOUBLES, -honest, 2 * honest, 1e6 * honest])).tobytes())
    elif wire == 5:
        fields[at] = (number, wire, np.float32(pick(rng, [np.nan, np.inf, 0.0, -1.0, 3e38])).tobytes())
    else:
        fields[at] = (number, wire, pick(rng, [*TEXTS, value[:-1], value + b"x", value * 100, value[::-1], flipped(value, rng)]))
    return put_together(fields)


# JSON


def changed_json(data: bytes, rng: Rng) -> bytes:
    tree, how = json.loads(data), int(rng.integers(6))
    if how == 0 or not isinstance(tree, dict) or not tree:
        return str(pick(rng, JSONS)).encode()
    key = pick(rng, list(tree))
    if how == 1:
        del tree[key]
    elif how == 2:
        tree[pick(rng, ["", "x", "\x00", "y" * 10_000, "\ud800", f"{key}\n", *tree])] = tree.pop(key)
    elif how == 3:
        tree[pick(rng, ["more", "9.more", *tree])] = tree[key]
    else:
        tree[key] = pick(rng, [None, 1, -1, 2**70, 1.5, True, "", "x", [], [[1]], [-1], [True], ["x"], {}, [2**62], tree[key][:-1]])
    return json.dumps(tree).encode()


# arrays


def npy(head: str, body: bytes) -> bytes:
    """Return an array in version 1 of NumPy's format."""
    text = head.encode("latin1", "replace") + b"\n"
    return b"\x93NUMPY\x01\x00" + min(len(text), 2**16 - 1).to_bytes(2, "little") + text + body


def changed_array(data: bytes, rng: Rng) -> bytes:
    """Change an array in NumPy's format: its values, its header, or both with a body of the fitting length."""
    end = 10 + int.from_bytes(data[8:10], "little")
    text, body = data[10:end].decode("latin1").rstrip(), data[end:]
    try:
        told = dict(ast.literal_eval(text))
        shape, dtype = tuple(told["shape"]), np.dtype(told["descr"])
    except Exception:  # noqa: BLE001  (an earlier change made the header unreadable, and NumPy may raise anything for it)
        return npy(pick(rng, HEADS), body)
    how = int(rng.integers(12))
    if how < 5:
        return npy(text, edges(dtype, len(body), rng))
    if how == 5:
        return npy(pick(rng, HEADS), body)
    if how <= 7:  # another version of the format, or another length of the header
        return pick(rng, [data[:6] + b"\x02" + data[7:], data[:7] + b"\x01" + data[8:], data[:8] + rng.bytes(2) + data[10:]])
    if how != 8:
        told["descr"] = pick(rng, DESCRS)
    if how in (8, 9):
        told["shape"] = other_shape(shape, rng)
    if how == 10:
        told["fortran_order"] = pick(rng, [True, 1, None, "x", []])
    return npy(repr(told), fitting(told, body) if rng.integers(3) else body)


def other_shape(honest: tuple[int, ...], rng: Rng) -> Any:
    """Return a random value for the header's ``shape``: a wrong shape, or a value of another type."""
    n = math.prod(honest)
    shapes: list[Any] = [(n,), (1, *honest), (*honest, 1), (n // 2, 2), (), (0,), (0, 2**62), (True,), (-1,), (-n,), (2**31,), (2**63,)]
    shapes += [(2**64, 0), (2**32, 2**32), (float(n),), ("3",), ((n,),), list(honest), n, None, (1,) * 65 + (n,), (10**4000,), {}]
    return pick(rng, shapes)


def fitting(told: dict[str, Any], body: bytes) -> bytes:
    """Return ``body``, cut or repeated to the length that follows from a header, so that it passes a parser's check of the length.

    Where that length is above 1 MiB, or cannot be computed, return ``body`` unchanged.
    """
    try:
        dtype = np.dtype([tuple(one) for one in told["descr"]] if isinstance(told["descr"], list) else told["descr"])
        wanted = math.prod(told["shape"]) * dtype.itemsize
    except Exception:  # noqa: BLE001  (NumPy may raise anything for such a dtype)
        return body
    if not isinstance(wanted, int) or not 0 <= wanted <= 2**20:
        return body
    return (body * (wanted // max(len(body), 1) + 1))[:wanted] if body else bytes(wanted)


def edges(dtype: np.dtype[Any], size: int, rng: Rng) -> bytes:
    """Return ``size`` bytes of values, all or one of which are at a limit of ``dtype`` or far away; random bytes for other kinds."""
    if dtype.kind not in "fiu" or not size:
        return rng.bytes(size)
    if dtype.kind == "f":
        info: Any = np.finfo(dtype)
        values = [info.max, info.min, info.tiny, info.smallest_subnormal, info.eps, 0.0, -0.0, np.inf, -np.inf, np.nan]
        values += [float(info.max) ** 0.5, float(info.max) / 2, 1.0, -1.0, 1e4, 1e9]
    else:
        info = np.iinfo(dtype)
        values = [info.max, info.min, info.max - 1, 0, 1]
    new = np.full(size // dtype.itemsize, 0.5 if dtype.kind == "f" else 1, dtype)
    with np.errstate(all="ignore"):
        new[slice(None) if rng.integers(2) else int(rng.integers(len(new)))] = pick(rng, values)
    return new.tobytes()


# messages


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
        kind = pick(rng, sorted({content.partition(b" ")[0] for content in contents.values()}))
        named = [name for name, content in contents.items() if content.partition(b" ")[0] == kind]
        name = pick(rng, sorted(named, key=lambda key: (contents[key], key)))
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
            kind = pick(rng, KINDS)
        else:
            children = pick(rng, [[], children[:-1], children * 2, children[::-1], ["0" * 64]])
    elif kind in ("Message", "ConfigRecord", "MetricRecord"):
        body = changed_protobuf(body, rng)
    elif kind == "ArrayChunk":
        body = changed_array(body, rng)
    else:
        body = changed_json(body, rng)
    return what, f"{kind} {','.join(children)} {len(body)}".encode() + b"\x00" + body
