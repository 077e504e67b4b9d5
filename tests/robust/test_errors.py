"""What no rule takes is refused; how names are read."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from fl_bn.robust import (
    PREAGGREGATIONS,
    RULES,
    Rule,
    bucketing,
    krum,
    mean,
    median,
    multi_krum,
    nnm,
    rule_named,
    trimmed_mean,
)
from tests.listed import listed
from tests.refusals import naming

HALF = ["median", "trimmed-mean", "geometric-median", "centered-clipping"]
FEWEST: list[tuple[Rule, int, int]] = [  # a rule, f, and the fewest rows that it takes
    *((rule_named(name), f, 2 * f + 1) for name in (*HALF, "nnm+mean", "nnm+median") for f in (1, 4)),
    *((rule_named(name), f, 2 * f + 3) for name in ("krum", "multi-krum", "nnm+krum", "nnm+multi-krum") for f in (0, 1, 3)),
    *((partial(bucketing, size=size), f, 2 * f * size + 1) for f in (1, 2) for size in (1, 2, 3)),
    (partial(bucketing, then=krum), 1, 9),  # five buckets of two: the rule after it has its own bound
]


@listed(("rule", "f", "fewest"), FEWEST)
def test_f_must_be_below_the_rule_s_bound(rule: Rule, f: int, fewest: int) -> None:
    with naming(f"f={f}"):
        rule(np.zeros((fewest - 1, 3)), f)
    rule(np.zeros((fewest, 3)), f)
    mean(np.zeros((1, 3)), 5)  # no bound: no defence


@listed("name", [*RULES, "nnm+median", "bucketing+median"])
def test_f_is_a_whole_number(name: str, rng: np.random.Generator) -> None:
    for f in (-1, True, 1.0, 0.5, np.float64(1), np.bool_(True)):
        with naming(repr(f)):
            rule_named(name)(np.zeros((9, 2)), f)  # type: ignore[arg-type]
    x = rng.normal(size=(9, 2))
    np.testing.assert_array_equal(rule_named(name)(x, np.int64(2)).value, rule_named(name)(x, 2).value)


def test_some_rows_must_be_finite() -> None:
    for name in ("mean", "median", "nnm+median"):
        for rows in (np.zeros((0, 4)), np.full((5, 2), np.nan)):
            with naming("at least 1"):
                rule_named(name)(rows, 0)


@listed("name", ["", "medain", "nnm", "nnm+", "+median", "median+nnm", "nnm+bucketing", "NNM+median", "nnm + median", "krum+median"])
def test_unknown_names(name: str) -> None:
    with naming(repr(name)) as caught:
        rule_named(name)
    assert all(known in str(caught.value) for known in [*RULES, *PREAGGREGATIONS])


def test_names_are_read_from_left_to_right(rng: np.random.Generator) -> None:
    x = rng.normal(size=(15, 3))
    assert rule_named("median") is median
    np.testing.assert_array_equal(rule_named("nnm+trimmed-mean")(x, 2).value, nnm(x, 2, then=trimmed_mean).value)
    by_hand = bucketing(x, 2, then=partial(nnm, then=multi_krum)).value
    np.testing.assert_array_equal(rule_named("bucketing+nnm+multi-krum")(x, 2).value, by_hand)
    assert np.abs(nnm(x, 2, then=partial(bucketing, then=multi_krum)).value - by_hand).max() > 1e-3  # control
    np.testing.assert_array_equal(nnm(x, 2).value, nnm(x, 2, then=median).value)
    np.testing.assert_array_equal(bucketing(x, 2).value, bucketing(x, 2, then=median, size=2, seed=0).value)


@listed(
    "rows",
    [
        [np.zeros(3), np.zeros(4)],
        [np.zeros(3), np.zeros((3, 1))],
        [{"a": np.zeros(3)}, {"a": np.zeros(3)}],
        np.zeros((2, 3), dtype=int),
        np.zeros((2, 3, 4)),
    ],
)
def test_rows_of_other_forms_are_refused(rows: Any) -> None:
    with pytest.raises(ValueError, match="rows must be vectors|same shape"):
        median(rows, 0)
