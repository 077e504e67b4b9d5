"""The wire: what goes in comes out, whatever the names, shapes and dtypes; what does not fit the schema is refused by name.

What cannot be read at all: see test_malformed_replies.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fl_bn import convert
from fl_bn.federation import schema
from fl_bn.federation.payload import count_tensors, nbytes, tensor_name
from fl_bn.federation.schema import Schema
from fl_bn.flower.wire.codec import flatten, unflatten
from fl_bn.methods import METHODS, Phase
from fl_bn.moments import Moments
from tests.flower.inside import (
    Header,
    Payload,
    decode_moments,
    encode_moments,
    from_records,
    signature,
    to_numpy,
    to_records,
    to_tensors,
)
from tests.listed import listed
from tests.networks import seeded_network
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
    """The layout carries the order."""
    flat, layout = flatten(payload)
    assert same(unflatten(flat, layout), payload)
    assert sum(array.nbytes for array in flat) == nbytes(payload)
    assert len(flat) == count_tensors(payload)
    for section in payload:
        backwards = {**payload, section: dict(reversed(payload[section].items()))}
        assert len(payload[section]) < 2 or flatten(backwards)[1] != layout


@listed("layout", ["", "{", "3", "null", '["weights"]', '[["weights"]]', '[["weights", 3]]', '[["weights", ["a"]]]'])
def test_a_layout_that_does_not_fit_is_refused(layout: str) -> None:
    with refused("layout"):
        unflatten([np.zeros(1), np.zeros(1)], layout)


def test_a_fortran_ordered_array_arrives_as_it_is_and_tensors_own_their_memory() -> None:
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    came, _ = from_records(to_records({"weights": {"w": array}}, HEADER))
    assert np.array_equal(came["weights"]["w"], array)
    tensor = to_tensors(came["weights"])["w"]
    tensor += 1
    assert np.array_equal(came["weights"]["w"], array)


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
    with refused("tensor", "head.weight"):
        to_numpy({"head.bias": torch.zeros(2), "head.weight": torch.zeros(2, dtype=torch.bfloat16)})
    assert to_numpy({"x": torch.ones(2, dtype=torch.float16)})["x"].dtype == np.float16  # control


# What a payload must look like


def example(specs: Schema) -> Payload:
    return {section: {k: np.ones(s.shape, s.dtype) for k, s in specs.sections[section].items()} for section in specs.sections}


@listed(
    ("name", "phase", "expected"),
    [
        ("fedavg", Phase.TRAIN, {"weights", "statistics"}),
        ("fedavg", Phase.FROZEN, {"weights"}),
        ("gn", Phase.TRAIN, {"weights"}),
        ("fedbn", Phase.TRAIN, {"weights"}),
        ("fbn", Phase.TRAIN, {"weights", "moments"}),
        ("fbn", Phase.FROZEN, {"weights"}),
        ("hbn", Phase.MEASURE, {"moments"}),
    ],
)
def test_the_sections_of_a_reply(name: str, phase: Phase, expected: set[str]) -> None:
    """Gradients take the place of weights."""
    method = METHODS[name]()
    model = convert(seeded_network("cnn"), method)
    for update in ("weights", "gradients"):
        found = set(schema.reply(model, method, phase, update).sections)
        assert found == {update if section == "weights" else section for section in expected}


def test_layers_without_running_statistics_are_not_asked_for_moments() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4, track_running_stats=False), torch.nn.BatchNorm2d(4))
    asked = schema.reply(model, METHODS["fedavg"](), Phase.MEASURE).sections["moments"]
    assert list(asked) == ["2.count", "2.mean", "2.var"]


def test_the_signature_tells_models_methods_and_dtypes_apart() -> None:
    fbn, fedavg = METHODS["fbn"](), METHODS["fedavg"]()
    small, other = seeded_network("cnn"), seeded_network("resnet")
    found = [
        signature(convert(small, fedavg), fedavg),
        signature(convert(small, METHODS["fedbn"]()), METHODS["fedbn"]()),  # the same tensors
        signature(convert(small, fbn), fbn),
        signature(convert(other, fbn), fbn),
        signature(convert(seeded_network("cnn", dtype=torch.float64), fbn), fbn),
    ]
    assert len(set(found)) == len(found)
    assert signature(convert(seeded_network("cnn", seed=7), fbn), fbn) == found[2]  # values do not matter


@pytest.mark.parametrize("name", ["fedavg", "fbn"])
def test_the_one_wrong_tensor_among_many_is_named(name: str) -> None:
    """Small tensors of one dtype and range are checked together: the error and the largest value are those of each alone."""
    method = METHODS[name]()
    specs = schema.reply(convert(seeded_network("cnn"), method), method, Phase.TRAIN)
    payload = example(specs)
    assert specs.check(payload) == {section: float(any("float" in s.dtype for s in of.values())) for section, of in specs.sections.items()}
    for section, of in specs.sections.items():
        for tensor, spec in of.items():
            right = payload[section][tensor]
            wrong = {"dtype": right.astype(np.float16), "shape": right[None]}
            if "float" in spec.dtype:
                wrong |= {"finite": np.where(np.arange(right.size).reshape(right.shape) == right.size - 1, np.nan, right)}
                wrong["finite"] = wrong["finite"].astype(spec.dtype)
            if np.isfinite(spec.at_least):
                wrong["expected values >="] = right * 0 + np.asarray(spec.at_least - abs(spec.at_least) - 1, right.dtype)
            for what, array in wrong.items():
                with refused(section, tensor) as caught:
                    specs.check({**payload, section: {**payload[section], tensor: array}})
                assert what in str(caught.value)
            if "float" in spec.dtype:
                assert specs.check({**payload, section: {**payload[section], tensor: right * 5}})[section] == 5.0
