"""The defence: how many replies it needs, what it makes of statistics and updates, and whose claims it believes.

The rules are compared with their papers in tests/robust, attacked rounds are in tests/flower/test_byzantine_rounds.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_bn.robust import RULES, Outcome, median, rule_named
from tests.listed import listed
from tests.training.core import NO_DEFENCE, Defence, Moments, TooFew, weighted_mean

NAMES = (*RULES, "nnm+median", "nnm+trimmed-mean", "nnm+krum", "bucketing+median")


def random_parts(rng: np.random.Generator, n: int) -> list[dict[str, Tensor]]:
    return [{"a": torch.from_numpy(rng.normal(5, 1, (6, 2))).float(), "b": torch.from_numpy(rng.normal(size=3)).float()} for _ in range(n)]


def moments(count: int, value: float = 0.0) -> Moments:
    return Moments(count, torch.full((2,), value, dtype=torch.float64), torch.ones(2, dtype=torch.float64))


def enough(defence: Defence, replies: int) -> bool:
    try:
        return defence.among(replies, 0) is not None
    except TooFew:
        return False


def test_refused_clients_lower_f_only_where_the_rest_is_too_few_for_it() -> None:
    """nnm+median needs 2f + 1 rows, krum 2f + 3: who was refused may have been honest."""
    defence = Defence(3, "nnm+median", "krum")
    assert [defence.among(n, 2).f for n in (20, 9, 8, 7, 6, 5)] == [3, 3, 2, 2, 1, 1]
    assert [defence.among(n, 5).f for n in (9, 4, 3)] == [3, 0, 0]
    assert defence.among(9, 0) == defence
    for n, refused in ((4, 2), (2, 5), (5, 0)):
        with pytest.raises(TooFew):
            defence.among(n, refused)


def test_without_a_word_there_is_no_defence() -> None:
    assert Defence() == NO_DEFENCE
    assert not Defence().active
    assert Defence().average is weighted_mean
    assert all(made.active for made in (Defence(1), Defence(0, "median"), Defence(0, "mean", "krum")))
    counts, values = torch.tensor([1.0, 3.0]), torch.tensor([[0.0], [4.0]], dtype=torch.float64)
    assert Defence().average(values, counts).item() == 3.0
    assert Defence(1).average(values, counts).item() == 2.0  # an active one weighs all alike


# Statistics


@listed("rule", NAMES)
@listed("f", [0, 1, 2, 3])
@listed("rows", [1, 2, 3, 4, 5, 6, 9])
def test_the_average_of_statistics_is_the_rules_however_few_clients_ran_the_layer(
    rule: str, f: int, rows: int, rng: np.random.Generator
) -> None:
    values, counts = torch.from_numpy(rng.normal(size=(rows, 4))), torch.from_numpy(rng.uniform(1, 100, rows))
    defence = Defence(f, rule)
    got = defence.average(values, counts)
    assert got.dtype is torch.float64
    assert (got >= values.min(0).values - 1e-12).all()
    assert (got <= values.max(0).values + 1e-12).all()
    if defence.active and enough(defence, rows):
        np.testing.assert_allclose(got, rule_named(rule)(values.numpy(), f).value, rtol=1e-12)


# Updates


@listed("rule", NAMES)
@listed("with_origin", [True, False])
def test_updates_are_one_vector_of_differences_in_float64(rule: str, with_origin: bool, rng: np.random.Generator) -> None:
    parts, f = random_parts(rng, 9), 2
    origin = {name: torch.from_numpy(rng.normal(5, 1, t.shape)).float() for name, t in parts[0].items()} if with_origin else None
    before = [{name: t.clone() for name, t in part.items()} for part in parts]
    got, report = Defence(f, updates=rule).update(parts, origin)

    def flat(named: Mapping[str, Tensor]) -> np.ndarray:
        return np.concatenate([named[name].numpy().astype(np.float64).reshape(-1) for name in ("a", "b")])

    start = flat(origin) if origin is not None else np.zeros(15)
    value = rule_named(rule)(np.stack([flat(part) - start for part in parts]), f).value
    assert all(t.dtype is torch.float64 for t in got.values())
    assert {name: t.shape for name, t in got.items()} == {"a": (6, 2), "b": (3,)}
    np.testing.assert_allclose(flat(got), start + value, rtol=1e-12, atol=1e-14)
    distances = [np.linalg.norm(flat(part) - start - value) for part in parts]
    np.testing.assert_allclose(report.distances, distances, rtol=1e-9, atol=1e-12)
    assert all(torch.equal(part[name], old[name]) for part, old in zip(parts, before, strict=True) for name in part)


def latest(rows: Any, f: int = 0) -> Outcome:
    """A rule of one's own: the last row."""
    return rule_named("mean")(rows[-1:])


def test_a_rule_may_be_given_as_it_is(rng: np.random.Generator) -> None:
    parts, values, ones = random_parts(rng, 5), torch.from_numpy(rng.normal(size=(5, 4))), torch.ones(5)
    as_named, as_object, own = Defence(1, "median", "median"), Defence(1, median, median), Defence(1, latest, latest)
    assert torch.equal(as_object.update(parts, None)[0]["a"], as_named.update(parts, None)[0]["a"])
    assert torch.equal(as_object.average(values, ones), as_named.average(values, ones))
    assert (enough(as_object, 2), enough(own, 1)) == (False, True)
    assert torch.equal(own.update(parts, None)[0]["a"].float(), parts[4]["a"])
    assert torch.equal(own.average(values, ones), values[4])


# How many replies


@listed(
    ("least", "defence"),
    [
        (7, {"f": 3, "statistics": "median"}),
        (5, {"f": 2, "updates": "trimmed-mean"}),
        (9, {"f": 3, "updates": "krum"}),
        (5, {"f": 1, "statistics": "multi-krum"}),
        (7, {"f": 3, "statistics": "nnm+median"}),
        (9, {"f": 2, "updates": "bucketing+median"}),
        (9, {"f": 1, "updates": "bucketing+nnm+krum"}),  # of clients, not of the buckets that the last rule sees
        (7, {"f": 2, "statistics": "krum", "updates": "median"}),
        (1, {"f": 5, "statistics": "mean"}),
    ],
)
def test_too_few_replies_are_refused_with_the_smallest_number(least: int, defence: dict[str, Any]) -> None:
    for n in (least, least + 1, least + 8):
        Defence(**defence).among(n, 0)
    for n in range(least):
        with pytest.raises(TooFew) as refused:
            Defence(**defence).among(n, 0)
    assert least == 1 or f"{least}, but got n={least - 1}" in str(refused.value)


def test_claims_become_the_medians_and_a_count_of_0_stays_0() -> None:
    reports = [{"a": moments(8), "b": moments(4)}, {"a": moments(10**9, 2.0), "b": moments(6)}, {"a": moments(9), "b": moments(10**18)}]
    believed, steps = Defence(1).believed([*reports, {"a": moments(0)}], [5, 10**9, 4, 5])
    assert [[report[layer].count for layer in "ab"] for report in believed[:3]] == [[9, 6]] * 3
    assert (believed[3]["a"].count, steps) == (0, [5, 5, 5, 5])
    assert torch.equal(believed[1]["a"].mean, reports[1]["a"].mean)  # what was measured stays
