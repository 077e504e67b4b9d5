"""The wire: what goes in comes out, whatever the names, shapes and dtypes; what does not fit the schema is refused by name.

What cannot be read at all: see test_malformed_replies, and tests/hostile.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fl_bn import convert
from fl_bn.federation.network import Network
from fl_bn.flower.wire.codec import LazyArray
from fl_bn.methods import METHODS, Phase
from tests.flower.byzantine import equal_clients
from tests.flower.inside import (
    Header,
    LocalTraining,
    Payload,
    from_records,
    signature,
    to_records,
)
from tests.in_process import identical, run
from tests.networks import seeded_network

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


# What a payload must look like


def test_layers_without_running_statistics_are_not_asked_for_moments() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4, track_running_stats=False), torch.nn.BatchNorm2d(4))
    asked = Network(model, METHODS["fedavg"]()).reply(Phase.MEASURE).sections["moments"]
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


# Arrays that stay in a process are handed over; the wire sees them as Flower's own

GIVEN = {"f": np.arange(6, dtype=np.float32).reshape(2, 3).T, "i": np.array(3), "e": np.empty((0, 2))}


def test_on_the_wire_it_is_flowers_own_array() -> None:
    for array in GIVEN.values():
        lazy, own = LazyArray(array), Array(np.asarray(array, order="C"))
        assert (lazy.dtype, lazy.shape, lazy.stype, lazy.data) == (own.dtype, own.shape, own.stype, own.data)
        assert lazy.object_id == own.object_id
        assert lazy.deflate() == own.deflate()


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["hbn", "fedtan", "fbn"])
def test_a_run_has_the_same_bits_whether_arrays_are_handed_over_or_encoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = METHODS[name]()
    settings = LocalTraining(batch_size=4, steps=2, momentum=0.9, maintain="reset" if method.exchanges else "local")
    handed = run(method, equal_clients(3), 3, settings=settings)

    def encoded(arrays: dict[str, np.ndarray]) -> ArrayRecord:
        return ArrayRecord({name: Array(np.asarray(array, order="C")) for name, array in arrays.items()})

    for module in ("wire.codec", "handlers", "layerwise.transcript"):
        monkeypatch.setattr(f"fl_bn.flower.{module}.to_record", encoded)
    over_the_wire = run(method, equal_clients(3), 3, settings=settings)
    assert not any(isinstance(a, LazyArray) for a in over_the_wire.result.arrays.values())
    assert all(identical(tensors, over_the_wire.trajectory[round]) for round, tensors in handed.trajectory.items())
