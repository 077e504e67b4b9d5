"""Rounding to two bytes a number: how far off, what stays exact, what is refused."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from fl_bn.federation.payload import Overflow, PayloadDtype, check_payload
from fl_bn.methods import METHODS
from tests.listed import listed
from tests.refusals import refused

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
NARROW = tuple(UNIT)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def there_and_back(rounding: PayloadDtype, values: np.ndarray) -> np.ndarray:
    return rounding.widen(rounding.narrow({"weights": {"0.weight": values}}))["weights"]["0.weight"]


@pytest.mark.parametrize("dtype", NARROW)
@given(values=arrays(np.float32, (2, 3), elements=st.floats(-60000, 60000, width=32)))
def test_a_number_changes_by_at_most_the_stated_share_of_its_size(dtype: str, values: np.ndarray) -> None:
    came = there_and_back(PayloadDtype.of(dtype, network()), values)
    assert came.dtype == np.float32
    least = np.full((2, 3), 1 + UNIT[dtype], np.float32)  # control: half of the share is too little
    assert (np.abs(there_and_back(PayloadDtype.of(dtype, network()), least) - least) > UNIT[dtype] / 2 * least).all()
    smallest = 2.0**-25 if dtype == "float16" else 2.0**-134  # half a step where steps no longer shrink
    assert (np.abs(came.astype(np.float64) - values) <= np.maximum(UNIT[dtype] * np.abs(values.astype(np.float64)), smallest)).all()


def test_bit_patterns_are_those_of_the_upper_half_of_a_float32() -> None:
    """What NumPy alone makes of the message."""
    values = np.array([[1.0, -2.5, 0.1], [3e38, -1e-40, 0.0]], np.float32)
    sent = PayloadDtype.of("bfloat16", network()).narrow({"weights": {"0.weight": values}})["weights"]["0.weight"]
    assert sent.dtype == np.uint16
    bits = values.view(np.uint32).astype(np.uint64)
    assert (sent == (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).all()  # to the nearest, ties to even
    assert not (sent == bits >> 16).all()  # control: cut off


def test_what_is_no_weight_stays_exact() -> None:
    third = np.full(2, 1 / 3, np.float32)
    payload = {
        "weights": {"0.bias": third, "1.num_batches_tracked": np.array(3), "buffer": third},
        "statistics": {"1.running_mean": third},
        "moments": {"1.mean": third},
        "control": {"0.bias": third},
    }
    sent = PayloadDtype.of("float16", network()).narrow(payload)
    assert sent["weights"]["0.bias"].dtype == np.float16  # control
    del sent["weights"]["0.bias"], payload["weights"]["0.bias"]
    assert all(array is payload[section][name] for section, tensors in sent.items() for name, array in tensors.items())


@pytest.mark.parametrize("dtype", NARROW)
def test_a_number_beyond_the_range_is_named_before_it_is_sent(dtype: str) -> None:
    rounding, values = PayloadDtype.of(dtype, network()), np.ones((2, 3), np.float32)
    values[1, 2] = {"float16": 65520, "bfloat16": 3.4e38}[dtype]
    with pytest.raises(Overflow, match=f"weights/0.weight: 1 of 6 values are beyond .*, the largest number of payload-dtype='{dtype}'"):
        rounding.narrow({"weights": {"0.weight": values}})
    values[1, 2] = 65504
    assert there_and_back(rounding, values).max() >= 65504  # control


@listed(("dtype", "came"), [("bfloat16", "float32"), ("bfloat16", "float16"), ("float16", "float32"), ("float16", "uint16")])
def test_another_type_than_asked_for_is_refused(dtype: str, came: str) -> None:
    with refused("weights", "0.weight"):
        PayloadDtype.of(dtype, network()).widen({"weights": {"0.weight": np.ones((2, 3), came)}})


@listed("name", METHODS)
def test_methods_that_exchange_need_their_weights_as_they_are(name: str) -> None:
    check_payload("float32", METHODS[name]())
    for dtype in NARROW:
        with pytest.raises(ValueError, match="payload-dtype") if METHODS[name]().exchanges else nullcontext():
            check_payload(dtype, METHODS[name]())
