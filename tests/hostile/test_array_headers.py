"""What an array's head says of itself: whatever it is, it is an array of plain numbers, or an error that names the array.

That such an error costs its sender the reply, and never ends the server, the fuzzer tries: it changes heads in messages, too.
"""

from __future__ import annotations

import numpy as np

from fl_bn.flower.wire.codec import array_from
from tests.hostile.liars import WireError
from tools.hostile.mutations import changed_array, npy

HEAD = "{{'descr': {}, 'fortran_order': False, 'shape': {}, }}"
HONEST = [npy(HEAD.format("'<f4'", (2, 3)), bytes(24)), npy(HEAD.format("'<i8'", (3,)), bytes(24))]
ODD = [HEAD.format(*of) for of in (("('<f4',(2,))", (3,)), ("'<f4'", (True,)), ("'O'", (1,)), ("'<f4'", "(2**3,)"))] + ["[" * 3000, ""]


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


def test_bytes_are_an_array_of_numbers_or_an_error_of_the_wire() -> None:
    """Control: both come, and what is honest is read."""
    rng = np.random.default_rng(0)
    assert {read_well(data) for data in HONEST} == {"read"}
    assert {read_well(npy(head, bytes(24))) for head in ODD} == {"refused"}
    assert {read_well(changed_array(HONEST[number % 2], rng)) for number in range(600)} == {"read", "refused"}
    assert {read_well(rng.bytes(number)) for number in range(100)} == {"refused"}
