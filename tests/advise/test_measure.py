"""Clients in numbers: exact ones of clients made by hand, and what they tell apart."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fl_bn.app.advise.measure import Measured, classes_of, distance, label_skew, measure, sample_moments
from fl_bn.app.advise.regimes import Regime, dump, load, nearest
from fl_bn.app.config import RunConfig
from fl_bn.app.former import PAPERS
from fl_bn.federation.local import Samples
from tests.experiment.small_data import small_config
from tests.listed import listed

ALIKE = Measured(10, 100, 100, 100, 10.0, 0.0, 0.004, 0.004, 32, 1.0, 5)


def clients(**changes: float) -> Measured:
    """Return the measurements of clients that do not differ from each other; ``changes`` replaces fields."""
    return replace(ALIKE, **changes)  # type: ignore[arg-type]


def regime(name: str, accuracies: dict[str, list[float]], **changes: float) -> Regime:
    """Make a regime. ``accuracies`` has, for each method, the accuracies (%) of the seeds 0, 1, ...; ``changes`` is as in ``clients``."""
    runs = {method: dict(enumerate(values)) for method, values in accuracies.items()}
    return Regime(name, f"Problem {name}", clients(**changes), runs, dict.fromkeys(accuracies, 0.1), dict.fromkeys(accuracies, 5.0))


MAP = [
    regime("alike", {"fedavg": [90.0, 91.0], "gn": [85.0, 86.0], "fbn": [90.2, 90.9]}),
    regime("one class", {"fedavg": [20.0, 22.0], "gn": [80.0, 81.0], "fbn": [90.0, 92.0]}, label_skew=1.0, classes=1.0),
    regime("domains", {"fedavg": [70.0, 71.0], "fedbn": [88.0, 89.0], "gn": [75.0, 76.0]}, distance=2.0),
    regime("small batches", {"fedavg": [70.0, 71.0], "hbn": [88.0, 89.0], "gn": [75.0, 76.0]}, batch_size=4),
    regime("few take part", {"fedavg": [70.0, 71.0], "fbn": [88.0, 89.0], "gn": [75.0, 76.0]}, participation=0.1),
    regime("many steps", {"fedavg": [70.0, 71.0], "fixbn": [88.0, 89.0], "gn": [75.0, 76.0], "fedtan": [95.0, 96.0]}, local_steps=20),
]


@listed(
    ("counts", "skew", "classes"),
    [
        ([[8, 0], [0, 8]], 1.0, 1.0),
        ([[3, 1], [1, 3]], 1 - (2 * math.log(2) - 0.75 * math.log(3)) / math.log(2), 4 / 3**0.75),  # entropy ln 4 - .75 ln 3
        ([[6, 0], [2, 2]], 1 - 0.4 * math.log(2) / -(0.8 * math.log(0.8) + 0.2 * math.log(0.2)), 2**0.4),  # clients weigh by samples
        ([[], []], 0.0, 0.0),
    ],
)
def test_label_counts_by_hand(counts: list[list[int]], skew: float, classes: float) -> None:
    table = np.array(counts, dtype=np.int64).reshape(len(counts), -1)
    assert label_skew(table) == pytest.approx(skew, abs=1e-12)
    assert classes_of(table) == pytest.approx(classes, abs=1e-9)


ONE, OTHER = 2.001, 0.001


@listed(
    ("means", "variance", "values", "owners", "expected"),
    [
        ([0.0, 1.0, 3.0], 0.5, 2, [0, 1, 2], (1 + 4 + 9) / 3 / 1.0005),  # unbiased variance: 1; the floor is a thousandth of 0.5
        ([0.0, 1.0, 3.0], 0.5, 2, [0, 0, 0], 0.0),  # one client
        # a client's variance is within and between its samples: 0, 0, 2, 2 (unbiased 4/3), and the same, one higher
        ([0.0, 2.0, 1.0, 3.0], 0.0, 2, [0, 0, 1, 1], 3 / 4),
        # a table's column that is constant at a client: the floor is a thousandth of the mean of the variances, 2 and 0
        ([0.0, 2.0, 5.0, 5.0], 0.0, 1, [0, 0, 1, 1], (ONE / OTHER + OTHER / ONE) / 2 - 1 + 16 * (1 / ONE + 1 / OTHER) / 2),
    ],
)
def test_distance_by_hand(means: list[float], variance: float, values: int, owners: list[int], expected: float) -> None:
    mean = torch.tensor(means).double()[:, None]
    assert distance(mean, torch.full_like(mean, variance), values, np.array(owners)) == pytest.approx(expected, rel=1e-12)


def test_moments_of_what_enters_the_first_batch_norm() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    x = torch.randint(0, 256, (5, 1, 2, 2), dtype=torch.uint8)
    means, variances, values = sample_moments(network, Samples(x, torch.zeros(5, dtype=torch.int64)))
    entered = network[0](Samples(x, torch.zeros(5)).batch(np.arange(5), x.float())[0]).double()
    assert values == 4
    torch.testing.assert_close(means, entered.mean((2, 3)))
    torch.testing.assert_close(variances, entered.var((2, 3), correction=0))


def test_clients_of_a_run_by_hand(tmp_path: Path) -> None:
    """48 samples of 4 classes, 12 each; 4 clients of 2 classes each: 12 samples, in 3 batches of 4."""
    own = {"partition": "classes", "partition-parameter": 2.0, "clients": 4, "local-steps": 0, "local-epochs": 2, "fraction": 0.5}
    found = measure(RunConfig.from_mapping({**small_config(tmp_path), **own}))
    assert (found.clients, found.smallest, found.middle, found.largest) == (4, 12, 12, 12)
    assert (found.batch_size, found.local_steps, found.participation) == (4, 6, 0.5)
    assert found.classes == pytest.approx(2.0)
    assert found.label_skew == pytest.approx(0.5)


def test_label_skew_is_no_feature_shift_and_the_other_way_round() -> None:
    """Each client's classes look different; shuffled within the classes they look the same, unless the features differ."""
    keys = {"setup": PAPERS, "partition": "domain", "shifts": "none,invert", "clients": 4, "image-size": 8}
    domains = measure(RunConfig.from_mapping(keys))
    classes = measure(RunConfig.from_mapping({"partition": "classes", "partition-parameter": 1.0, "image-size": 8}))
    assert domains.shift > 0.3
    assert domains.label_skew < 0.05
    assert classes.distance > 0
    assert classes.shift == pytest.approx(0.0, abs=1e-12)
    assert classes.label_skew == 1.0


# The map: the nearest regime, and how far each method is above plain BatchNorm there


@listed(
    ("name", "changes"),
    [
        ("alike", {"label_skew": 0.1}),
        ("one class", {"label_skew": 0.9}),
        ("domains", {"distance": 0.8}),
        ("small batches", {"batch_size": 8}),
        ("few take part", {"participation": 0.02}),
        ("many steps", {"local_steps": 100}),
    ],
)
def test_the_nearest_regime(name: str, changes: dict[str, float]) -> None:
    assert nearest(clients(**changes), MAP).name == name


def test_a_gain_that_may_be_chance_is_called_so() -> None:
    one = regime("r", {"fedavg": [80.0, 81.0], "gn": [70.0, 71.0], "fbn": [84.0, 85.0], "hbn": [81.0, 82.0]})
    one = replace(one, margins={"gn": 5.0, "fbn": 5.0, "hbn": 0.5})
    gains = ["plain BatchNorm", "-10.0 (-15.0 to -5.0)", "+4.0 (-1.0 to +9.0), may be chance", "+1.0 (+0.5 to +1.5), less than 2 points"]
    assert [one.gain(name) for name in ("fedavg", "gn", "fbn", "hbn")] == gains


def test_the_map_survives_its_file_and_the_one_that_is_installed_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text(dump(MAP))
    assert load(file) == MAP
    assert all(len(one.methods) > 1 and "fedavg" in one.methods for one in load())
