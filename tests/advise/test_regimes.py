"""The map: the nearest regime, what separates methods there, and who is worth trying."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from scipy.stats import t

from fl_bn.advise.regimes import ONE_SEED, candidates, dump, load, nearest, verdict, why
from tests.advise.made_up import MAP, clients, regime


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("alike", {"label_skew": 0.1}),
        ("one class", {"label_skew": 0.9}),
        ("domains", {"distance": 0.8}),
        ("domains", {"distance": 0.8, "batch_size": 16}),
        ("small batches", {"batch_size": 8}),
        ("few take part", {"participation": 0.02}),
        ("many steps", {"local_steps": 100}),
    ],
)
def test_the_nearest_regime(name: str, changes: dict[str, float]) -> None:
    assert nearest(clients(**changes), MAP).regime.name == name


def test_the_axis_on_which_they_differ_most_is_named() -> None:
    assert nearest(clients(label_skew=1.0, batch_size=8), MAP).farthest == "batch size"
    assert nearest(clients(label_skew=0.98), MAP).farthest == ""


def test_the_least_difference_that_tells_apart_by_hand() -> None:
    """Rows 90 91, 80 83, 70 69: left over by method and seed are -.5 .5 .5 -.5 ... : squares by hand below."""
    one = regime("r", {"fedavg": [90.0, 91.0], "gn": [80.0, 83.0], "fbn": [70.0, 69.0]})
    spans = [1.0, 3.0, -1.0]  # seed 1 minus seed 0; their mean is 1
    left = sum(2 * ((span - 1.0) / 2) ** 2 for span in spans)  # 2 degrees of freedom
    assert one.separable == pytest.approx(t.ppf(0.975, 2) * math.sqrt(2 * (left / 2) / 2))
    assert regime("r", {"fedavg": [90.0], "gn": [80.0]}).separable == ONE_SEED


def test_methods_that_are_not_told_apart_stand_together() -> None:
    even = regime("r", {"fedavg": [90.0, 91.0, 90.5], "gn": [80.0, 81.0, 80.4], "fbn": [90.1, 90.9, 90.7]})
    assert even.level("fbn") == ["fbn", "fedavg"]
    assert verdict(even) == "no method is significantly better than plain BatchNorm"
    ahead = regime("r", {"fedavg": [80.0, 81.0, 80.5], "gn": [70.0, 71.0, 70.4], "fbn": [90.1, 90.9, 90.7]})
    assert verdict(ahead) == "fbn is ahead of all others"
    two = regime("r", {"fedavg": [80.0, 81.0, 80.5], "hbn": [90.0, 90.6, 90.9], "fbn": [90.1, 90.9, 90.7]})
    assert verdict(two) == "fbn is ahead of plain BatchNorm, but not significantly ahead of hbn"
    assert "+10.1 points" in why(ahead, "fbn")
    assert "not significant" not in why(ahead, "fbn")
    assert "not significant" in why(even, "fbn")


def test_a_run_that_did_not_stay_finite_counts_as_nothing() -> None:
    one = regime("r", {"fedavg": [90.0, 90.0], "gn": [95.0, math.nan]})
    assert one.methods == ["fedavg", "gn"]
    assert one.above("gn") == pytest.approx(-42.5)


def test_two_or_three_candidates_of_those_that_can_run() -> None:
    runs = {"fedavg": [80.0], "gn": [79.0], "fbn": [90.0], "hbn": [88.0], "fedtan": [91.0], "silobn": [10.0]}
    one = regime("r", runs)
    assert candidates(one, runs) == ["fedtan", "fbn", "hbn"]
    assert candidates(one, runs.keys() - {"fedtan"}) == ["fbn", "hbn"]  # the third is ten points behind
    assert candidates(one, {"silobn", "fbn"}) == ["fbn", "silobn"]  # a second is named in any case


def test_the_map_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text(dump(MAP))
    assert load(file) == MAP


def test_the_map_that_is_installed_can_be_read() -> None:
    assert all(len(one.methods) > 1 and "fedavg" in one.methods for one in load())
