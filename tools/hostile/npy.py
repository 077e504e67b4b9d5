"""Change the bytes of serialised arrays: malformed headers of NumPy's ``.npy`` format, and values at the limits of a dtype.

NumPy's parsers may raise any exception for such headers.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Rng = np.random.Generator

TYPES = "?bBhHiIqQefdgFDGOSUVMm"
DESCRS: list[Any] = [
    *(f"{order}{np.dtype(code).str[1:]}" for code in TYPES for order in "<>|="),
    "<U4",
    "|S4",
    "|V4",
    "<M8[s]",
    "<m8[ns]",
    "f4",
    "float32",
    "<f4,<f4",
    "4<f4",
    "(2,)<f4",
    "(True,)<f4",
    "O",
    "",
    "x" * 500,
    ("<f4", (2,)),
    ("<f4", (0,)),
    ("<f4", (2**31,)),
    ("<f4", (True,)),
    (("<f4", (2,)), (3,)),
    [("a", "<f4")],
    [("a", "<f4"), ("b", "<i4", (3,))],
    [("a", "<f4"), ("a", "<f4")],
    [("a", "|O")],
    [],
    7,
    None,
    True,
    1.5,
    b"<f4",
]
FORTRANS: list[Any] = [True, False, 1, 0, None, "x", []]
RAW = [  # sent in place of the header's whole dict
    "",
    "x",
    "None",
    "[]",
    "{'descr': '<f4'",
    "__import__('os').getpid()",
    "(" * 2000,
    "-" * 3000 + "1",
    "1" + "+1" * 1500,
    "{**{}}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (3L,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (0x3,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}\x00\x00",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (\N{ARABIC-INDIC DIGIT THREE},)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), 'more': 1}",
    "{'shape': (3,)}",
    "{1: 2}",
    "{[]: 1}",
    "'" + "\\x" * 100,
]


class Npy(NamedTuple):
    """Hold the parts of an array in NumPy's ``.npy`` format.

    Attributes:
        version: The version of the format.
        head: The text of the header, which is a Python dict.
        body: The bytes of the values.
    """

    version: tuple[int, int]
    head: str
    body: bytes

    def bytes(self, claimed: int | None = None) -> bytes:
        """Return the parts as the bytes of one array.

        Args:
            claimed: The length of the header, in bytes, that is written before it; None: the true length.
        """
        head = self.head.encode("latin1", "replace") + b"\n"
        size = min(len(head) if claimed is None else claimed, 2**32 - 1)
        length = size.to_bytes(4, "little") if self.version[0] > 1 else min(size, 2**16 - 1).to_bytes(2, "little")
        return b"\x93NUMPY" + bytes(self.version) + length + head + self.body


def taken_apart(data: bytes) -> Npy | None:
    """Split the bytes of an array into their parts. None: ``data`` is not an array in version 1 of the format."""
    if data[:6] != b"\x93NUMPY" or data[6:7] != b"\x01":
        return None
    end = 10 + int.from_bytes(data[8:10], "little")
    return Npy((1, 0), data[10:end].decode("latin1").rstrip(), data[end:])


def pick(rng: Rng, values: list[Any]) -> Any:
    return values[int(rng.integers(len(values)))]


def shapes(honest: tuple[int, ...], rng: Rng) -> Any:
    """Return a random value for the header's ``shape``: the shape ``honest``, a wrong shape, or a value of another type."""
    n = math.prod(honest)
    choices: list[Any] = [
        honest,
        (n,),
        (1, *honest),
        (*honest, 1),
        (n // 2, 2),
        (),
        (0,),
        (0, 2**62),
        (True,),
        (False,),
        (*honest[:-1], True),
        (-1,),
        (-n,),
        (2**31,),
        (2**62,),
        (2**63,),
        (2**64, 0),
        (2**32, 2**32),
        (float(n),),
        (1.0,),
        ("3",),
        ((n,),),
        list(honest),
        n,
        None,
        (1,) * 17 + (n,),
        (1,) * 65 + (n,),
        (10**4000,),
        {},
    ]
    return pick(rng, choices)


def changed(data: bytes, rng: Rng) -> bytes:
    """Change the bytes of an array at random: its header, with or without a body of the fitting length, or its values."""
    if (honest := taken_apart(data)) is None:
        return data + b"x"
    how = int(rng.integers(12))
    if how == 0:
        return honest._replace(head=pick(rng, RAW)).bytes()
    if how == 1:
        return honest._replace(version=pick(rng, [(0, 0), (1, 1), (2, 0), (3, 0), (255, 255)])).bytes()
    if how == 2:
        length = len(honest.head) + 1
        return honest.bytes(pick(rng, [0, 1, length - 1, length + 1, 2**16 - 1, 2**31]))
    try:
        told = dict(ast.literal_eval(honest.head))
        shape, before = tuple(told["shape"]), np.dtype(told["descr"])
    except (ValueError, TypeError, SyntaxError, KeyError, RecursionError, MemoryError):
        return honest._replace(head=pick(rng, RAW)).bytes()  # an earlier change made the header unreadable
    body = honest.body
    if how <= 5:
        told["descr"] = pick(rng, DESCRS)
    elif how <= 8:
        told["shape"] = shapes(shape, rng)
    elif how == 9:
        told["fortran_order"] = pick(rng, FORTRANS)
    elif how == 10:
        told["descr"], told["shape"] = pick(rng, DESCRS), shapes(shape, rng)
    else:
        return honest._replace(body=edges(before, len(body), rng)).bytes()
    if rng.integers(3):
        body = fitting(told, body)
    head = repr(told)
    return honest._replace(head=head + " " * (-(11 + len(head)) % 64), body=body).bytes()


def fitting(told: dict[str, Any], body: bytes) -> bytes:
    """Return ``body``, cut or repeated to the length that follows from a header. It then passes a parser's check of the length.

    Where that length is above 1 MiB, or cannot be computed, return ``body`` unchanged.

    Args:
        told: The fields of the header.
        body: The bytes of the values.
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
    """Return ``size`` bytes of values, all or one of which are at a limit of ``dtype``, such as its largest value.

    For a ``dtype`` that is neither float nor integer, return random bytes.
    """
    if dtype.kind == "f":
        info = np.finfo(dtype)
        values = [info.max, info.min, info.tiny, -info.tiny, info.smallest_subnormal, info.eps, 0.0, -0.0, np.inf, -np.inf, np.nan]
        values += [float(info.max) ** 0.5, float(info.max) / 2, -(float(info.max) ** 0.5)]
    elif dtype.kind in "iu":
        values = [np.iinfo(dtype).max, np.iinfo(dtype).min, np.iinfo(dtype).max - 1, 0, 1]
    else:
        return rng.bytes(size)
    many: Callable[[Any], bytes] = lambda value: np.full(size // dtype.itemsize, value, dtype).tobytes()  # noqa: E731
    with np.errstate(all="ignore"):
        whole = many(pick(rng, values))
        if rng.integers(2):
            return whole
        rest = np.frombuffer(many(0.5 if dtype.kind == "f" else 1), dtype).copy()
        rest[int(rng.integers(len(rest))) :][:1] = np.frombuffer(whole, dtype)[:1]
        return rest.tobytes()
