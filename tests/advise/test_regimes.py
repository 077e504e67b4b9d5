"""The map: the nearest regime, and how far each method is above plain BatchNorm there."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fl_bn.advise.regimes import dump, load, nearest
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
    assert nearest(clients(**changes), MAP).name == name


def test_a_gain_that_may_be_chance_is_called_so() -> None:
    one = regime("r", {"fedavg": [80.0, 81.0], "gn": [70.0, 71.0], "fbn": [84.0, 85.0], "hbn": [86.0, 86.0]})
    assert [one.gain(name) for name in ("fedavg", "gn", "fbn", "hbn")] == ["plain BatchNorm", "-10.0", "+4.0, within chance", "+5.5"]


def test_a_run_that_did_not_stay_finite_counts_as_nothing() -> None:
    one = regime("r", {"fedavg": [90.0, 90.0], "gn": [95.0, math.nan]})
    assert one.methods == ["fedavg", "gn"]
    assert one.above("gn") == pytest.approx(-42.5)


def test_the_map_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text(dump(MAP))
    assert load(file) == MAP


def test_the_map_that_is_installed_can_be_read() -> None:
    assert all(len(one.methods) > 1 and "fedavg" in one.methods for one in load())
