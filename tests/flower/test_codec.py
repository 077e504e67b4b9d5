"""The wire: what goes in comes out, whatever the names, shapes and dtypes; what cannot be read is refused by name."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fl_bn.federation.payload import Payload, count_tensors, decode_moments, encode_moments, nbytes, tensor_name, to_numpy, to_tensors
from fl_bn.flower.wire.codec import FORMAT, Header, flatten, from_records, to_records, unflatten
from fl_bn.moments import Moments
from fl_bn.support.wire import WireError
from tests.listed import listed
from tests.refusals import refused

HEADER = Header("fbn", "train", 3, "0123")
NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
ARRAYS = arrays.arrays(
    st.sampled_from(["float32", "float64", "float16", "int64", "int32", "uint8", "bool"]),
    arrays.array_shapes(min_dims=0, max_dims=4, min_side=0),
)
PAYLOADS = st.dictionaries(NAMES.filter(lambda name: name != "header"), st.dictionaries(NAMES, ARRAYS, max_size=3), max_size=3)


def same(a: Payload, b: Payload) -> bool:
    """Same sections, names, order, dtypes, shapes and bits."""
    if [(k, list(v)) for k, v in a.items()] != [(k, list(v)) for k, v in b.items()]:
        return False
    pairs = [(a[s][n], b[s][n]) for s in a for n in a[s]]
    return all(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs)


@given(PAYLOADS)
def test_records_round_trip_through_protobuf(payload: Payload) -> None:
    content = recorddict_from_proto(recorddict_to_proto(to_records(payload, HEADER)))
    came, header = from_records(content)
    assert header == HEADER
    assert {k: list(v) for k, v in came.items()} == {k: list(v) for k, v in payload.items()}
    assert same({k: came[k] for k in payload}, payload)


@given(PAYLOADS)
def test_flatten_and_unflatten_are_inverse(payload: Payload) -> None:
    flat, layout = flatten(payload)
    assert same(unflatten(flat, layout), payload)
    assert sum(array.nbytes for array in flat) == nbytes(payload)
    assert len(flat) == count_tensors(payload)


def test_the_layout_carries_the_order() -> None:
    a, b = np.zeros(2), np.ones(2)
    flat, layout = flatten({"weights": {"a": a, "b": b}})
    swapped, other = flatten({"weights": {"b": b, "a": a}})
    assert same(unflatten(flat, layout), {"weights": {"a": a, "b": b}})
    assert not same(unflatten(swapped, layout), {"weights": {"a": a, "b": b}})  # control: another's layout swaps names
    assert layout != other


@listed("layout", ["", "{", "3", "null", '["weights"]', '[["weights"]]', '[["weights", 3]]', '[["weights", ["a"]]]'])
def test_a_layout_that_does_not_fit_is_refused(layout: str) -> None:
    with refused("layout"):
        unflatten([np.zeros(1), np.zeros(1)], layout)


def test_a_fortran_ordered_array_arrives_as_it_is() -> None:
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    came, _ = from_records(to_records({"weights": {"w": array}}, HEADER))
    assert np.array_equal(came["weights"]["w"], array)


def test_received_tensors_own_their_memory() -> None:
    came, _ = from_records(to_records({"weights": {"w": np.zeros(2, np.float32)}}, HEADER))
    tensor = to_tensors(came["weights"])["w"]
    tensor += 1
    assert came["weights"]["w"].max() == 0


@pytest.mark.parametrize(
    ("field", "other"), [("method", "hbn"), ("phase", "frozen"), ("round", 4), ("signature", "4567"), ("format", "fl-bn/0")]
)
def test_each_field_of_the_header_is_checked(field: str, other: str | int) -> None:
    HEADER.check(HEADER)
    with refused("header", field) as caught:
        HEADER.check(dataclasses.replace(HEADER, **{field: other}))
    assert repr(other) in caught.value.problem
    assert ("different model, method or version" in str(caught.value)) == (field in ("signature", "format"))


@listed("field", ["method", "phase", "round", "signature", "format", "payload"])
@listed("wrong", [None, 2.5, b"x", True])
def test_a_header_of_the_wrong_type_cannot_be_read(field: str, wrong: object) -> None:
    content = to_records({}, HEADER)
    values = {k: v for k, v in dataclasses.asdict(HEADER).items() if k != field}
    content["fl-bn/header"] = ConfigRecord(values if wrong is None else values | {field: wrong})
    with refused("header", field):
        from_records(content)


def test_a_message_without_header_says_what_came_instead() -> None:
    with pytest.raises(WireError, match=rf"header: expected a record 'fl-bn/header' of {FORMAT}, but got records \['spam'\]"):
        from_records(RecordDict({"spam": ConfigRecord()}))


def numpy_file(header: str) -> bytes:
    """A .npy file of version 1 with no data."""
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def saved(*given: np.ndarray, archive: bool = False) -> bytes:
    target = io.BytesIO()
    np.savez(target, *given) if archive else np.save(target, given[0], allow_pickle=True)
    return target.getvalue()


SHAPED = "{'descr': '<f4', 'fortran_order': False, 'shape': (%s,), }"
GOOD = saved(np.ones(3, np.float32))
UNREADABLE = {
    "nothing": b"",
    "noise": b"\x00\x01spam",
    "a pickle": b"\x80\x04K\x01.",
    "truncated": GOOD[:-1],
    "only magic": GOOD[:8],
    "an archive": saved(np.ones(3), archive=True),
    "half an archive": b"PK\x03\x04spam",
    "objects": saved(np.array([{}, 1], dtype=object)),
    "no header": numpy_file("{'descr': "),
    "no dtype": numpy_file("{'descr': 'zz', 'fortran_order': False, 'shape': (3,), }"),
    "a negative shape": numpy_file(SHAPED % -3),
    "a huge shape": numpy_file(SHAPED % 99_999_999_999_999),
    "an absurd shape": numpy_file(SHAPED % ("9" * 40)),
}


@listed("kind", UNREADABLE)
def test_bytes_that_are_no_array_are_refused_by_name(kind: str) -> None:
    array = Array(dtype="float32", shape=(3,), stype="numpy.ndarray", data=UNREADABLE[kind])
    content = to_records({}, HEADER)
    content["fl-bn/weights"] = ArrayRecord({"head.bias": array})
    with refused("weights", "head.bias"):
        from_records(content)
    content["fl-bn/weights"] = ArrayRecord({"head.bias": Array(dtype="float32", shape=(3,), stype="numpy.ndarray", data=GOOD)})
    assert from_records(content)[0]["weights"]["head.bias"].tolist() == [1, 1, 1]  # control


def test_an_array_in_another_serialisation_is_refused() -> None:
    content = to_records({}, HEADER)
    content["fl-bn/weights"] = ArrayRecord({"w": Array(dtype="float32", shape=(3,), stype="pickle", data=GOOD)})
    with refused("weights", "w"):
        from_records(content)


@given(
    st.dictionaries(st.sampled_from(["", "a", "a.b", "count", "x.mean"]), st.integers(0, 2**40)),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_moments_round_trip(counts: dict[str, int], dtype: torch.dtype) -> None:
    values = torch.tensor([0.1, -3.0, 7.5]).to(dtype).double()
    moments = {layer: Moments(count, values, values.square()) for layer, count in counts.items()}
    encoded = encode_moments(moments, dtype)
    assert all(encoded[tensor_name(k, "mean")].dtype == dtype for k in moments)
    decoded = decode_moments(encoded)
    assert list(decoded) == list(moments)
    for layer, m in decoded.items():
        assert m.count == counts[layer]
        assert m.mean.dtype == torch.float64
        assert torch.equal(m.mean, values)
        assert torch.equal(m.var, values.square().to(dtype).double())


def test_a_dtype_that_numpy_lacks_is_refused_by_name() -> None:
    with pytest.raises(WireError, match=r"^tensor/head.weight: expected a dtype that NumPy has, but got torch.bfloat16: keep the model"):
        to_numpy({"head.bias": torch.zeros(2), "head.weight": torch.zeros(2, dtype=torch.bfloat16)})
    moments = {"norm": Moments(3, torch.zeros(2), torch.ones(2))}
    with refused("tensor", "norm.mean"):
        to_numpy(encode_moments(moments, torch.bfloat16))
    assert to_numpy({"x": torch.ones(2, dtype=torch.float16)})["x"].dtype == np.float16  # control
