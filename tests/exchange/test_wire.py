"""The wire of the gRPC carrier: requests and answers byte for byte, and refusals by name."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from fl_bn.exchange.call import Refused
from fl_bn.exchange.grpc.service import decode_answer, decode_request
from tests.exchange.cohorts import Join, Key, Layer, Local, Quantity, encode_request
from tests.listed import listed

UINT32, UINT64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
DTYPES = {torch.float32: "<u4", torch.float64: "<u8"}
LAYERS = {"stem.bn": Layer(2, torch.float32), "": Layer(3, torch.float64)}


@st.composite
def vectors(draw: st.DrawFn, length: int | None = None) -> Tensor:
    """float32 or float64 of any bits: NaNs with payloads, infinities, subnormal numbers, negative zeros."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    shape = draw(st.integers(0, 9)) if length is None else length
    drawn = draw(arrays(DTYPES[dtype], shape))
    return torch.from_numpy(drawn.view(drawn.dtype.str.replace("u", "f")))


def bits(values: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return values.dtype, tuple(values.shape), values.numpy().tobytes()


@given(UINT64)
def test_a_join_round_trips_and_a_leave_is_no_request(batch: int) -> None:
    assert decode_request(encode_request(Join(batch)), {}) == Join(batch)
    assert decode_request(encode_request(None), LAYERS) is None


@given(st.data(), st.text(st.characters(exclude_categories=("Cs",))), st.sampled_from(Quantity), st.integers(1, 5), UINT32, UINT64)
def test_values_round_trip_byte_for_byte(data: st.DataObject, layer: str, quantity: Quantity, channels: int, call: int, count: int) -> None:
    values = data.draw(vectors(quantity.width(channels)))
    came = decode_request(encode_request(Local(Key(layer, quantity, call), values, count)), {layer: Layer(channels, values.dtype)})
    assert isinstance(came, Local)
    assert came.key == Key(layer, quantity, call)
    assert came.count == count
    assert bits(came.values) == bits(values)


def test_values_are_little_endian() -> None:
    one = Local(Key("", Quantity.MEAN), torch.tensor([1.0, -2.0]), 1)
    assert encode_request(one).endswith(b"\n" + bytes.fromhex("0000803f000000c0"))
    answer = b'{"count": 2, "batch": 1}\n' + bytes.fromhex("000000000000f03f")
    assert decode_answer(answer, torch.float64).values.tolist() == [1.0]


def message(values: bytes = bytes(8), **fields: object) -> bytes:
    return json.dumps({"layer": "stem.bn", "quantity": "mean", "call": 0, "count": 4} | fields).encode() + b"\n" + values


REFUSED: dict[str, tuple[bytes, tuple[str, ...]]] = {
    kind: (request, words)
    for kind, (request, *words) in {
        "nothing": (b"",),
        "no request": (b"{}",),
        "a number": (b"7",),
        "a quantity of a later version": (message(quantity="median"), "median"),
        "an unknown layer": (message(layer="head.bn", call=2), "head.bn", "stem.bn"),
        "a layer that is a list": (message(layer=["stem.bn"]), "stem.bn"),
        "a count that is no number": (message(count=True), "true"),
        "a huge call": (message(call=2**64), str(2**64)),
        "half a value": (message(bytes(6)), "stem.bn"),
        "no UTF-8": (b"\xff\xfe{}", "4 bytes"),
        "deep": (b"[" * 100_000, "100000 bytes"),
        "a name with lines": (message(layer="spam\n2026-01-01 all is well"),),
        "a name with many letters": (message(layer="spam" * 1000),),
    }.items()
}


@listed("kind", REFUSED)
def test_what_is_neither_a_join_nor_a_known_layers_values_is_refused_by_name(kind: str) -> None:
    """In a short line, so that no name spoils the log."""
    request, words = REFUSED[kind]
    with pytest.raises(Refused) as refused:
        decode_request(request, LAYERS)
    assert all(word in str(refused.value) for word in words), refused.value
    assert len(str(refused.value)) < 300
    assert str(refused.value).isprintable()
