"""The wire: what goes in comes out, whatever the names, shapes and dtypes. What cannot be read: see tests/hostile."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fl_bn.flower.wire.codec import LazyArray
from fl_bn.methods import METHODS
from tests.flower.inside import Header, LocalTraining, Payload, header_of, payload_of, to_records
from tests.hostile.liars import people
from tests.in_process import WatchedGrid, client_app, identical, run

HEADER = Header("fbn", "train", 3, "0123")
NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
ARRAYS = arrays.arrays(
    st.sampled_from(["float32", "float64", "float16", "int64", "int32", "uint8", "bool"]),
    arrays.array_shapes(min_dims=0, max_dims=4, min_side=0),
)
PAYLOADS = st.dictionaries(NAMES.filter(lambda name: name != "header"), st.dictionaries(NAMES, ARRAYS, max_size=3), max_size=3)


def travelled(content: RecordDict) -> RecordDict:
    return recorddict_from_proto(recorddict_to_proto(content))


def bits(payload: Payload) -> dict[str, list[tuple[str, np.dtype, tuple[int, ...], bytes]]]:
    return {section: [(k, a.dtype, a.shape, a.tobytes()) for k, a in named.items()] for section, named in payload.items()}


@given(PAYLOADS)
def test_records_round_trip_through_protobuf(payload: Payload) -> None:
    came = travelled(to_records(payload, HEADER))
    assert header_of(came) == HEADER
    assert bits(payload_of(came)) == bits(payload)


class AsBytes(WatchedGrid):
    """Every message travels as protobuf, in both directions, though all is in one process."""

    def _answer(self, message: Message) -> Message:
        message.content.update(travelled(message.content))
        reply = super()._answer(message)
        reply.content.update(travelled(reply.content))
        return reply


def handed_over(grid: WatchedGrid) -> int:
    records = [record for reply in grid.received for record in reply.content.array_records.values()]
    return sum(isinstance(array, LazyArray) for record in records for array in record.values())


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["hbn", "fedtan", "fbn"])
def test_a_run_has_the_same_bits_whether_arrays_are_handed_over_or_encoded(name: str) -> None:
    method, clients = METHODS[name](), people(3)
    settings = LocalTraining(batch_size=4, steps=2, momentum=0.9, maintain="reset" if method.exchanges else "local")
    handed = run(method, clients, 3, settings=settings)
    encoded = run(method, clients, 3, settings=settings, grid=AsBytes(client_app(method, clients, settings), 3))
    assert handed_over(handed.grid) > handed_over(encoded.grid) == 0
    assert all(identical(tensors, encoded.trajectory[round]) for round, tensors in handed.trajectory.items())
