"""Change a message: its records, fields, names, arrays and their bytes. New values are hostile, or close to the
honest ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common import Array

from fl_bn.flower.wire.codec import array_from
from fl_bn.support.wire import WireError
from tools.hostile import npy

Rng = np.random.Generator

INTS = [-1, 0, 1, 2, 7, 2**31, 2**53, 2**53 + 1, 2**62, -(2**63)]
FLOATS = [float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 0.0, -0.5, 1e-320, 3.5]
TEXTS = ["", "x", "..", "a/b\n", "\x00\x1b[2J", "x" * 100_000, "[" * 100_000, "[1e999]", "[" + "9" * 5000 + "]", '{"a": 1}', "null"]
BLOBS = [b"", b"x", bytes(range(256)), b"\x93NUMPY" + bytes(100), b"x" * 1_000_000]
LISTS: list[list[Any]] = [[], [1] * 1000, [0, 0], [float("nan")], [2**63 - 1]]


def pick(rng: Rng, values: list[Any]) -> Any:
    return values[int(rng.integers(len(values)))]


def hostile(rng: Rng, config: bool) -> Any:
    kinds = [INTS, FLOATS, LISTS, *([TEXTS, BLOBS, [[b""], ["a"], [b"x" * 5000], [True]]] if config else [])]
    return pick(rng, pick(rng, kinds))


def near(value: Any, rng: Rng) -> Any:
    """Return a changed value of the same kind."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | bytes | list):
        return value
    if isinstance(value, int):
        return value + int(rng.integers(-3, 4))
    if isinstance(value, float):
        return value * float(rng.choice([-1, 0, 0.5, 2, 1e6]))
    if isinstance(value, list):
        return pick(rng, [value[:-1], value + value[:1], value[::-1], value * 2])
    cut = int(rng.integers(len(value) + 1))
    if isinstance(value, str):
        return pick(rng, [value[:cut], value + value[:cut], value[::-1], value.replace("1", "2")])
    flipped = bytearray(value)
    if flipped:
        flipped[cut - 1] ^= 1 << int(rng.integers(8))
    return pick(rng, [value[:cut], value + value[:cut], bytes(flipped)])


# changes of a message's content, in place


def drop_record(content: RecordDict, rng: Rng) -> None:
    if content:
        del content[pick(rng, list(content))]


def rename_record(content: RecordDict, rng: Rng) -> None:
    if content:
        name = pick(rng, list(content))
        record = content[name]
        del content[name]
        content[pick(rng, ["x", name + " ", "weights", "moments", "metrics2", "y" * 5000])] = record


def extra_record(content: RecordDict, rng: Rng) -> None:
    number = int(rng.choice([1, 1, 50]))
    for i in range(number):
        name = f"{pick(rng, ['local', 'weights', 'moments', 'kept', 'transcript', 'exchange', 'z' * 300])}{i if number > 1 else ''}"
        if name not in content:
            content[name] = pick(rng, [ArrayRecord({"0.weight": Array(np.ones(3))}), ConfigRecord({"a": 1}), MetricRecord({"b": 2})])


def fields(content: RecordDict) -> list[str]:
    return [name for name, record in content.items() if not isinstance(record, ArrayRecord) and len(record)]


def change_field(content: RecordDict, rng: Rng) -> None:
    if found := fields(content):
        name = pick(rng, found)
        old, config = dict(content[name]), name in content.config_records
        key = pick(rng, list(old))
        how = int(rng.integers(4))
        if how == 0:
            del old[key]
        elif how == 1:
            old[key] = near(old[key], rng)
        else:
            old[key] = hostile(rng, config)
        replace_record(content, name, old, config)


def extra_field(content: RecordDict, rng: Rng) -> None:
    if found := fields(content):
        name = pick(rng, found)
        config = name in content.config_records
        new = {pick(rng, ["kept", "updates", "drift", "unreadable", "save", "x" * 1000, "a\nb"]): hostile(rng, config)}
        if rng.integers(40) == 0:
            new = {f"field {i}": 1 for i in range(12_000)}
        replace_record(content, name, {**dict(content[name]), **new}, config)


def other_kind(content: RecordDict, rng: Rng) -> None:
    """Send a config record in place of metrics, or metrics in place of a config record."""
    if found := fields(content):
        name = pick(rng, found)
        values = dict(content[name])
        try:
            replace_record(content, name, values, name not in content.config_records)
        except (TypeError, ValueError):
            replace_record(content, name, {}, name in content.config_records)


def replace_record(content: RecordDict, name: str, values: dict[str, Any], config: bool) -> None:
    new = (ConfigRecord if config else MetricRecord)(values)
    del content[name]
    content[name] = new


def sections(content: RecordDict) -> list[str]:
    return [name for name, record in content.items() if isinstance(record, ArrayRecord) and len(record)]


def change_array(content: RecordDict, rng: Rng) -> None:
    if found := sections(content):
        record = content.array_records[pick(rng, found)]
        name = pick(rng, list(record))
        how = pick(rng, [values, values, values, shape_or_dtype, raw_bytes, head, head, head, untrue_claim])
        record[name] = how(record[name], rng)


def plain(array: Array) -> np.ndarray:
    """Return the array's values; zeros if an earlier change made them unreadable."""
    try:
        return array_from(array.data, "") if array.stype == "numpy.ndarray" else np.zeros(4, np.float32)
    except WireError:
        return np.zeros(4, np.float32)


def values(array: Array, rng: Rng) -> Array:
    new = plain(array).copy()
    flat = new.reshape(-1)
    if flat.size:
        where = slice(None) if rng.integers(2) else int(rng.integers(flat.size))
        big = [1e30, -1e30, 3e38, 4.6e18, 1e9, -1.0, 0.0, 1e-30, float("nan"), float("inf")]
        if flat.dtype.kind == "f":
            flat[where] = flat[where] * 1.5 if rng.integers(3) == 0 else pick(rng, big)
        else:
            flat[where] = np.array(pick(rng, INTS) % 2**64, np.uint64).astype(flat.dtype)  # wraps round if the value does not fit
    return Array(new)


def shape_or_dtype(array: Array, rng: Rng) -> Array:
    new = plain(array)
    kinds: list[Callable[[], np.ndarray]] = [
        lambda: new[None],
        lambda: new.reshape(-1)[:0],
        lambda: np.append(new, new),
        lambda: new.astype("float64" if new.dtype != np.float64 else "float16"),
        lambda: new.astype(">f4"),
        lambda: new.astype("U4"),
        lambda: np.asfortranarray(new.T),
        lambda: np.zeros((1000, 1000), np.float32),
        lambda: new.astype("complex64"),
    ]
    return Array(pick(rng, kinds)())


def raw_bytes(array: Array, rng: Rng) -> Array:
    data = bytearray(array.data or b"x")
    kinds: list[Callable[[], bytes]] = [
        lambda: bytes(data[: int(rng.integers(len(data) + 1))]),
        lambda: bytes(data) + rng.bytes(50),
        lambda: rng.bytes(200),
        lambda: b"",
        lambda: flipped(data, rng),
        lambda: bytes(data) * 50,
        lambda: bytes(data[:128]).replace(b"(4,", b"(9999999999999,").replace(b"(1,", b"(-1,"),
        lambda: bytes(data).replace(b"'<f4'", b"'|O' "),
        lambda: b"PK\x03\x04" + bytes(data),
    ]
    return Array(dtype=array.dtype, shape=tuple(array.shape), stype=array.stype, data=pick(rng, kinds)())


def head(array: Array, rng: Rng) -> Array:
    return Array(dtype=array.dtype, shape=tuple(array.shape), stype=array.stype, data=npy.changed(array.data, rng))


def flipped(data: bytearray, rng: Rng) -> bytes:
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        changed[int(rng.integers(len(changed)))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def untrue_claim(array: Array, rng: Rng) -> Array:
    claims: list[dict[str, Any]] = [{"dtype": "float99"}, {"dtype": "x" * 10_000}, {"shape": (2**62,)}, {"shape": (-1,)}, {"stype": "x"}]
    return Array(**{"dtype": array.dtype, "shape": tuple(array.shape), "stype": array.stype, "data": array.data, **pick(rng, claims)})


def change_names(content: RecordDict, rng: Rng) -> None:
    if found := sections(content):
        record = content.array_records[pick(rng, found)]
        name = pick(rng, list(record))
        how = int(rng.integers(4))
        array = record[name]
        if how != 3:
            del record[name]
        if how == 0:
            record[pick(rng, ["x", name + "\n", "a" * 10_000, "", "mean/0/1", "moments/999999999999/1"])] = array
        elif how == 1 and len(record):
            record[pick(rng, list(record))] = array
        elif how == 3:
            record["9.more"] = array


CHANGES = [drop_record, rename_record, extra_record, change_field, change_field, change_field, extra_field, other_kind]
CHANGES += [change_array, change_array, change_array, change_names]
