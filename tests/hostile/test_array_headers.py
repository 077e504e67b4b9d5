"""What an array's head says of itself: whatever it is, it is an array of plain numbers, or an error that names the array.

That such an error costs its sender the reply, and never ends the server, the fuzzer tries: it changes heads in messages, too.
"""

from __future__ import annotations

import struct

import numpy as np

from fl_bn.flower.wire.codec import array_from
from tests.hostile.liars import WireError
from tools.hostile.mutations import changed_array

HONEST = [("'<f4'", (2, 3)), ("'<i8'", (3,))]
ODD = [
    "{'descr': ('<f4',(2,)), 'fortran_order': False, 'shape': (3,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (True,), }",
    "{'descr': 'O', 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (2**3,), }",
    "[" * 3000,
    "",
]


def npy(head: str, nbytes: int) -> bytes:
    """Return an array in NumPy's format, whose head is this text."""
    text = head.encode() + b"\n"
    return b"\x93NUMPY" + bytes((1, 0)) + struct.pack("<H", len(text)) + text + bytes(nbytes)


def test_bytes_are_an_array_of_numbers_or_an_error_of_the_wire() -> None:
    """Control: both come, and what is honest is read."""
    rng = np.random.default_rng(0)
    honest = [
        npy(f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}", 24) for kind, shape in (("<f4", (2, 3)), ("<i8", (3,)))
    ]
    assert all(read_well(data) == "read" for data in honest)
    assert {read_well(npy(head, 24)) for head in ODD} == {"refused"}
    assert {read_well(changed_array(honest[number % 2], rng)) for number in range(600)} == {"read", "refused"}
    assert {read_well(rng.bytes(number)) for number in range(100)} == {"refused"}


def read_well(data: bytes) -> str:
    try:
        array = array_from(data, "weights", "w")
    except WireError as error:
        return "refused" if len(str(error)) < 1000 and (error.section, error.tensor) == ("weights", "w") else str(error)
    assert type(array) is np.ndarray
    assert array.dtype.kind in "biuf"
    assert array.dtype.isnative
    assert all(type(size) is int for size in array.shape)
    assert array.nbytes <= len(data)
    return "read"
