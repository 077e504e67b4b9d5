"""The wire of the gRPC carrier: requests and answers byte for byte, refusals by name, and Python modules that are what the .proto says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from fl_bn.exchange.call import Refused
from fl_bn.exchange.grpc.wire import decode_answer, decode_request
from tests.exchange.cohorts import Join, Key, Layer, Local, Quantity, Request, encode_request, pb
from tests.listed import listed

ROOT = Path(__file__).parents[2]
PACKAGE = Path("fl_bn/exchange/grpc")
GENERATED = ["exchange_pb2.py", "exchange_pb2.pyi"]
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


def on_the_wire(request: Request) -> bytes:
    return encode_request(request).SerializeToString()


@given(UINT64)
def test_a_join_round_trips_and_a_leave_is_no_request(batch: int) -> None:
    assert decode_request(on_the_wire(Join(batch)), {}) == Join(batch)
    assert decode_request(pb.Request(leave=pb.Leave()).SerializeToString(), LAYERS) is None


@given(st.data(), st.text(st.characters(exclude_categories=("Cs",))), st.sampled_from(Quantity), st.integers(1, 5), UINT32, UINT64)
def test_values_round_trip_byte_for_byte(data: st.DataObject, layer: str, quantity: Quantity, channels: int, call: int, count: int) -> None:
    values = data.draw(vectors(quantity.width(channels)))
    came = decode_request(on_the_wire(Local(Key(layer, quantity, call), values, count)), {layer: Layer(channels, values.dtype)})
    assert isinstance(came, Local)
    assert came.key == Key(layer, quantity, call)
    assert came.count == count
    assert bits(came.values) == bits(values)


def test_values_are_little_endian() -> None:
    one = Local(Key("", Quantity.MEAN), torch.tensor([1.0, -2.0]), 1)
    assert encode_request(one).local.values.hex() == "0000803f000000c0"
    assert decode_answer(pb.Answer(values=bytes.fromhex("000000000000f03f")), torch.float64).values.tolist() == [1.0]


def message(layer: str = "stem.bn", quantity: int = pb.MEAN, call: int = 0, count: int = 4, values: bytes = bytes(8)) -> pb.Request:
    return pb.Request(local=pb.Local(layer=layer, quantity=quantity, call=call, count=count, values=values))  # type: ignore[arg-type]


REFUSED: dict[str, tuple[bytes, tuple[str, ...]]] = {
    kind: (request if isinstance(request, bytes) else request.SerializeToString(), words)
    for kind, (request, *words) in {
        "an empty request": (pb.Request(),),
        "a quantity of a later version": (message(quantity=6), "quantity", "6"),
        "an unknown layer": (message("head.bn", call=2), "head.bn", "stem.bn"),
        "half a value": (message(values=bytes(6)), "stem.bn", "6 bytes"),
        "no UTF-8": (b"\x12\x04\x0a\x02\xff\xfe", "6 bytes"),
        "a name with lines": (message("spam\n2026-01-01 all is well"),),
        "a name with many letters, and no quantity": (message("spam" * 1000, 0),),
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


# the generated modules


def compile_proto(root: Path, out: Path) -> dict[str, str]:
    """The text of the modules that CONTRIBUTING's command generates from the .proto below ``root``."""
    out.mkdir()
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, str(PACKAGE / "exchange.proto")], cwd=root, check=True)
    return {name: (out / PACKAGE / name).read_text() for name in GENERATED}


def test_the_modules_are_what_the_compiler_makes_of_the_proto(tmp_path: Path) -> None:
    """Control: of another .proto it makes other modules."""
    pytest.importorskip("grpc_tools")
    ours = {name: (ROOT / PACKAGE / name).read_text() for name in GENERATED}
    same = compile_proto(ROOT, tmp_path / "same")
    versions = {re.findall("Protobuf Python Version: (.*)", text["exchange_pb2.py"])[0] for text in (ours, same)}
    if len(versions) > 1:
        pytest.skip(f"the modules were made by, and grpcio-tools here makes those of, two versions of protobuf: {versions}")
    assert same == ours
    changed = tmp_path / "changed" / PACKAGE / "exchange.proto"
    changed.parent.mkdir(parents=True)
    changed.write_text((ROOT / PACKAGE / "exchange.proto").read_text().replace("uint64 count = 4;", "uint64 count = 6;"))
    assert compile_proto(tmp_path / "changed", tmp_path / "other")["exchange_pb2.py"] != ours["exchange_pb2.py"]
