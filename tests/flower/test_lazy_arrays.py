"""Arrays that stay in a process are handed over; the wire sees them as Flower's own."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from fl_bn.flower.wire.codec import LazyArray
from fl_bn.methods import METHODS
from tests.flower.byzantine import equal_clients
from tests.flower.inside import LocalTraining
from tests.in_process import identical, run

ARRAYS = {"f": np.arange(6, dtype=np.float32).reshape(2, 3).T, "i": np.array(3), "e": np.empty((0, 2))}


def test_on_the_wire_it_is_flowers_own_array() -> None:
    for array in ARRAYS.values():
        lazy, own = LazyArray(array), Array(np.asarray(array, order="C"))
        assert (lazy.dtype, lazy.shape, lazy.stype, lazy.data) == (own.dtype, own.shape, own.stype, own.data)
        assert lazy.object_id == own.object_id
        assert lazy.deflate() == own.deflate()


def test_it_survives_pickling_and_cannot_be_changed() -> None:
    lazy = LazyArray(np.ones(3))
    assert np.array_equal(pickle.loads(pickle.dumps(lazy)).array, np.ones(3))
    with pytest.raises(ValueError, match="read-only"):
        lazy.numpy()[0] = 2.0


@pytest.mark.parametrize(
    ("name", "payload"), [("hbn", "float32"), ("fedtan", "float32"), ("fbn", "float32"), ("hbn", "bfloat16"), ("fedavg", "float16")]
)
def test_a_run_has_the_same_bits_whether_arrays_are_handed_over_or_encoded(
    name: str, payload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = METHODS[name]()
    settings = LocalTraining(batch_size=4, steps=2, momentum=0.9, maintain="reset" if method.exchanges else "local")
    handed = run(method, equal_clients(3), 3, settings=settings, policy={"payload": payload})

    def encoded(arrays: dict[str, np.ndarray]) -> ArrayRecord:
        return ArrayRecord({name: Array(np.asarray(array, order="C")) for name, array in arrays.items()})

    for module in ("wire.codec", "app.client_state", "layerwise.transcript"):
        monkeypatch.setattr(f"fl_bn.flower.{module}.to_record", encoded)
    over_the_wire = run(method, equal_clients(3), 3, settings=settings, policy={"payload": payload})
    assert not any(isinstance(a, LazyArray) for a in over_the_wire.result.arrays.values())
    assert all(identical(tensors, over_the_wire.trajectory[round]) for round, tensors in handed.trajectory.items())
