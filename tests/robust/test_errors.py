"""What no rule takes is refused, and the error says what it would."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from fl_bn.robust import PREAGGREGATIONS, RULES, bucketing, centered_clipping, krum, mean, median, multi_krum, nnm, rule_named, trimmed_mean
from tests.listed import listed

WEIGHTED = ["mean", "median", "trimmed-mean", "geometric-median", "centered-clipping"]


@listed("f", [1, 2, 4])
@listed("name", ["median", "trimmed-mean", "geometric-median", "centered-clipping", "nnm+mean", "nnm+median"])
def test_f_must_be_below_half(name: str, f: int) -> None:
    with pytest.raises(ValueError, match=rf"withstands f={f} Byzantine rows among at least {2 * f + 1}, but got n={2 * f}"):
        rule_named(name)(np.zeros((2 * f, 3)), f)
    rule_named(name)(np.zeros((2 * f + 1, 3)), f)


@listed("f", [0, 1, 3])
@listed("name", ["krum", "multi-krum", "nnm+krum", "nnm+multi-krum"])
def test_krum_needs_three_rows_more_than_twice_f(name: str, f: int) -> None:
    with pytest.raises(ValueError, match=rf"f={f} Byzantine rows among at least {2 * f + 3}, but got n={2 * f + 2}"):
        rule_named(name)(np.zeros((2 * f + 2, 3)), f)
    rule_named(name)(np.zeros((2 * f + 3, 3)), f)


@pytest.mark.parametrize("f", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_buckets_must_outnumber_the_liars(f: int, size: int) -> None:
    fewest = 2 * f * size + 1
    with pytest.raises(ValueError, match=rf"bucketing withstands f={f} Byzantine rows among at least {fewest}, but got n={fewest - 1}"):
        bucketing(np.zeros((fewest - 1, 3)), f, size=size)
    bucketing(np.zeros((fewest, 3)), f, size=size)


def test_the_rule_after_it_has_its_own_bound() -> None:
    with pytest.raises(ValueError, match=r"krum withstands f=1 Byzantine rows among at least 5, but got n=4"):
        bucketing(np.zeros((8, 3)), 1, then=krum)
    bucketing(np.zeros((9, 3)), 1, then=krum)


def test_which_rule_it_was() -> None:
    for name in RULES:
        if name != "mean":
            with pytest.raises(ValueError, match=name.removeprefix("multi-").replace("-", " ")):
                RULES[name](np.zeros((2, 3)), 1)
    mean(np.zeros((1, 3)), 5)  # no bound: no defence


@listed("name", [*RULES, "nnm+median", "bucketing+median"])
def test_f_is_a_whole_number(name: str) -> None:
    for f in (-1, True, False, 1.0, 0.5, np.float64(1), np.bool_(True)):
        with pytest.raises(ValueError, match=rf"Byzantine rows, must be a whole number >= 0, but got {re.escape(repr(f))}"):
            rule_named(name)(np.zeros((9, 2)), f)  # type: ignore[arg-type]


def test_numpys_whole_numbers_are_some(rng: np.random.Generator) -> None:
    x = rng.normal(size=(9, 2))
    for name in (*RULES, "nnm+median"):
        np.testing.assert_array_equal(rule_named(name)(x, np.int64(2)).value, rule_named(name)(x, 2).value)


@listed(
    ("rows", "message"),
    [
        ([np.zeros(3), np.zeros(3), np.zeros(4)], r"^row 2 has shape \(4,\), but row 0 has \(3,\)"),
        ([np.zeros(3), np.zeros((3, 1))], r"^row 1 has shape \(3, 1\), but row 0 has \(3,\)"),
        ([{"a": np.zeros(2)}, {"a": np.zeros((2, 1))}], r"^layer 'a' of row 1 has shape \(2, 1\), but row 0 has \(2,\)"),
        ([{"a": np.zeros(2)}, {"b": np.zeros(2)}], r"row 1 has layers \['b'\], but row 0 has \['a'\]"),
        ([{"a": np.zeros(2)}, {"a": np.zeros(2), "b": np.zeros(2)}], r"row 1 has layers \['a', 'b'\], but row 0 has \['a'\]"),
        ([{"a": np.zeros(2), "b": np.zeros(2)}, {"a": np.zeros(2)}], r"row 1 has layers \['a'\], but row 0 has \['a', 'b'\]"),
        ([np.zeros(3), np.zeros(3, int)], r"^row 1 has dtype int64: expected floating-point numbers"),
        (np.zeros((3, 2), bool), "row 0 has dtype bool"),
        (np.zeros((3, 2), complex), "row 0 has dtype complex128"),
        ([{"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.int32)}] * 2, r"layer 'b' of row 0 has dtype torch.int32"),
        (np.zeros(3), r"expected a matrix \(n, d\) or a list of rows, but got an array of shape \(3,\)"),
        (torch.zeros(3, 2, 2), r"but got an array of shape \(3, 2, 2\)"),
        ([], "at least one row, but got none"),
        (np.zeros((0, 4)), "at least one row, but got none"),
    ],
)
def test_rows_must_be_alike(rows: Any, message: str) -> None:
    for name in ("mean", "median", "nnm+median"):
        with pytest.raises(ValueError, match=message):
            rule_named(name)(rows, 0)


@listed(
    ("weights", "message"),
    [
        ([1.0] * 4, r"one weight per row \(5\), but got shape \(4,\)"),
        ([1.0] * 6, r"one weight per row \(5\), but got shape \(6,\)"),
        (np.ones((5, 1)), r"but got shape \(5, 1\)"),
        (1.0, r"but got shape \(\)"),
        ([1, 1, np.nan, 1, 1], "weights must be finite"),
        ([1, 1, np.inf, 1, 1], "weights must be finite"),
        ([1, 1, -1, 1, 1], "not negative"),
        ([0] * 5, "not all zero"),
    ],
)
def test_weights_must_fit(weights: Any, message: str) -> None:
    for name in WEIGHTED:
        with pytest.raises(ValueError, match=message):
            partial(RULES[name], weights=weights)(np.zeros((5, 2)), 1)


def test_weights_that_do_not_fit_are_not_mended_by_rows_that_leave() -> None:
    x = np.zeros((5, 2))
    x[2] = np.nan
    with pytest.raises(ValueError, match="weights must be finite"):
        median(x, 1, weights=[1, 1, np.nan, 1, 1])


@listed("name", [*RULES, "nnm+median", "bucketing+median"])
def test_no_finite_row_is_nothing_to_aggregate(name: str) -> None:
    with pytest.raises(ValueError, match="all 5 rows hold numbers that are not finite"):
        rule_named(name)(np.full((5, 2), np.nan), 1)


@listed(
    "name", ["", "medain", "nnm", "nnm+", "+median", "median+nnm", "nnm+bucketing", "NNM+median", "nnm + median", "krum+median"]
)
def test_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(name))) as caught:
        rule_named(name)
    assert all(known in str(caught.value) for known in [*RULES, *PREAGGREGATIONS])


def test_names_are_read_from_left_to_right(rng: np.random.Generator) -> None:
    x = rng.normal(size=(15, 3))
    assert rule_named("median") is median
    np.testing.assert_array_equal(rule_named("nnm+trimmed-mean")(x, 2).value, nnm(x, 2, then=trimmed_mean).value)
    by_hand = bucketing(x, 2, then=partial(nnm, then=multi_krum)).value
    np.testing.assert_array_equal(rule_named("bucketing+nnm+multi-krum")(x, 2).value, by_hand)
    other = nnm(x, 2, then=partial(bucketing, then=multi_krum)).value
    np.testing.assert_array_equal(rule_named("nnm+bucketing+multi-krum")(x, 2).value, other)
    assert np.abs(other - by_hand).max() > 1e-3
    np.testing.assert_array_equal(nnm(x, 2).value, nnm(x, 2, then=median).value)
    np.testing.assert_array_equal(bucketing(x, 2).value, bucketing(x, 2, then=median, size=2, seed=0).value)


@pytest.mark.parametrize(("radius", "steps"), [(0.0, 1), (-1.0, 1), (np.nan, 1), (1.0, 0), (None, 0), (None, -1)])
def test_clipping_needs_a_radius_and_a_step(radius: float | None, steps: int) -> None:
    with pytest.raises(ValueError, match=f"radius > 0 and steps >= 1, but got radius={radius} and steps={steps}"):
        centered_clipping(np.zeros((5, 2)), 1, radius=radius, steps=steps)


@pytest.mark.parametrize("size", [0, -2])
def test_buckets_need_a_size(size: int) -> None:
    with pytest.raises(ValueError, match=f"size of at least 1, but got {size}"):
        bucketing(np.zeros((5, 2)), 0, size=size)
