"""What an array's head says of itself: whatever it is, it costs its sender the reply, and never ends the server."""

from __future__ import annotations

import struct
from functools import cache

import numpy as np
from flwr.app import Array, Message, RecordDict
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fl_bn.flower.wire.codec import array_from
from fl_bn.support.wire import WireError
from tests.hostile.liars import LIAR
from tests.hostile.outcomes import REFUSED, Outcome, judged, listening
from tests.hostile.recorded import Liar, PlayingGrid, recorded, served

PAIRS = "{'descr': ('<f4',(2,)), 'fortran_order': False, 'shape': (3,), }", 24
TRUE = "{'descr': '<f4', 'fortran_order': False, 'shape': (True,), }", 4
ASKED = {
    "fbn": "train",
    "fbn robust": "train",
    "hbn robust": "train",
    "fedtan": "train",
    "fedtan robust": "train",
    "hbn": "query.statistics",
    "fedbn unseen": "query.kept",
}


def npy(head: str, nbytes: int, version: tuple[int, int] = (1, 0)) -> bytes:
    """An array in NumPy's format, whose head is this text."""
    text = head.encode("latin1", "replace") + b"\n"
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version == (1, 0) else "<I", len(text)) + text + bytes(nbytes)


class OneArray(Liar):
    """In the ``turn``-th message, array ``which`` (of all of the message's) is ``data``."""

    def __init__(self, turn: int, data: bytes, which: int = 0) -> None:
        self.turn, self.data, self.which = turn, data, which

    def answer(self, message: Message, turn: int, asked: str, content: RecordDict) -> Message:
        if turn == self.turn:
            sections = [(record, name) for record in content.array_records.values() for name in record]
            record, name = sections[self.which % len(sections)]
            array: Array = record[name]
            record[name] = Array(dtype=array.dtype, shape=array.shape, stype=array.stype, data=self.data)
        return Message(content, reply_to=message)


@cache
def turns(name: str) -> list[int]:
    """The liar's messages with arrays in them that answer what is asked here."""
    found = [
        turn
        for (node, turn), (asked, content) in recorded(name).canned.items()
        if node == LIAR + 1 and asked == ASKED[name] and any(content.array_records.values())
    ]
    assert found, {asked for asked, _ in recorded(name).canned.values()}
    return found


def became(name: str, data: bytes, turn: int = 0, which: int = 0) -> Outcome:
    """What a run of one round makes of such an array in the liar's reply."""
    with listening() as said:
        ran = served(name, PlayingGrid(recorded(name), OneArray(turns(name)[turn % len(turns(name))], data, which)))
        return judged(name, ran, said.lines)


ODD = st.one_of(
    st.sampled_from(
        ["True", "False", "None", "-1", "0", "1", "2.0", "1j", "'3'", "b'3'", "(3,)", "[3]", "2**3", "1e3", "0x3", "...", "3L"]
    ),
    st.integers(-(2**70), 2**70).map(str),
)
SHAPES = st.one_of(
    st.lists(ODD, max_size=3).map(lambda sizes: "(" + "".join(f"{size}, " for size in sizes) + ")"),
    st.lists(ODD, max_size=3).map(lambda sizes: "[" + ", ".join(sizes) + "]"),
    st.integers(0, 70).map(lambda n: "(" + "1, " * n + ")"),
    ODD,
)
PLAIN = [
    order + kind for order in "<>|=" for kind in ("f4", "f8", "f2", "i8", "u1", "b1", "c8", "f16", "M8[s]", "m8", "S0", "U3", "V2", "O")
]
DTYPES = st.one_of(
    st.sampled_from(PLAIN).map(repr),
    st.tuples(st.sampled_from(PLAIN), SHAPES).map(lambda pair: f"({pair[0]!r}, {pair[1]})"),
    st.lists(st.tuples(st.sampled_from(["a", "", "b"]), st.sampled_from(PLAIN)), max_size=3).map(repr),
    st.sampled_from(
        ["'f4,f4'", "'(2,)f4'", "{'names': ['a'], 'formats': ['<f4']}", "'float'", "'T'", "'d, '", "''", "None", "3", "'<f4' '<f4'"]
    ),
    st.text(max_size=6).map(repr),
)
HEADS = st.builds(
    lambda descr, order, shape: f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}",
    DTYPES,
    st.sampled_from(["False", "True", "0", "None", "'C'"]),
    SHAPES,
)
BYTES = st.one_of(
    st.builds(npy, HEADS, st.integers(0, 40), st.sampled_from([(1, 0), (1, 0), (1, 0), (2, 0), (3, 0), (9, 9)])),
    st.builds(npy, st.text(max_size=60), st.integers(0, 40)),
    st.builds(lambda data, at: data[:at], st.builds(npy, HEADS, st.integers(0, 40)), st.integers(0, 120)),
    st.binary(max_size=100),
)


@settings(max_examples=400)
@given(BYTES)
@example(npy(*PAIRS))
@example(npy(*TRUE))
def test_bytes_are_an_array_of_numbers_or_an_error_of_the_wire(data: bytes) -> None:
    assert read_well(data)


def read_well(data: bytes) -> bool:
    """As an array of plain numbers, or with an error that names the array and fits into a log."""
    try:
        array = array_from(data, "weights", "w")
    except WireError as error:
        return len(str(error)) < 1000 and str(error).startswith("weights/w: expected a NumPy array, but its bytes ")
    numbers = array.dtype.kind in "biuf" and array.dtype.isnative and all(type(size) is int for size in array.shape)
    return type(array) is np.ndarray and numbers and array.nbytes <= len(data)


@settings(max_examples=60)
@given(st.sampled_from(sorted(ASKED)), BYTES, st.integers(0, 3), st.integers(0, 9))
@example("fbn", npy(*PAIRS), 0, 0)
@example("fedtan robust", npy(*TRUE), 0, 0)
def test_whatever_the_head_says_the_reply_is_refused_by_name(name: str, data: bytes, turn: int, which: int) -> None:
    """Control: ``judged`` says that something is broken where a round does not go on, or an honest client pays."""
    assert became(name, data, turn, which).kind == REFUSED
