"""Clients in numbers: exact ones of clients made by hand, and what they tell apart."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fl_bn.advise.measure import classes_of, distance, label_skew, measure, sample_moments, shuffled_within
from fl_bn.federation.local import Samples
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.former import PAPERS
from tests.experiment.small_data import small_config


@pytest.mark.parametrize(
    ("counts", "skew", "classes"),
    [
        ([[5, 5], [5, 5]], 0.0, 2.0),
        ([[8, 0], [0, 8]], 1.0, 1.0),
        ([[4, 4, 0, 0], [0, 0, 4, 4]], 0.5, 2.0),
        ([[3, 1], [1, 3]], 1 - (2 * math.log(2) - 0.75 * math.log(3)) / math.log(2), 4 / 3**0.75),  # entropy ln 4 - .75 ln 3
        ([[6, 0], [2, 2]], 1 - 0.4 * math.log(2) / -(0.8 * math.log(0.8) + 0.2 * math.log(0.2)), 2**0.4),  # clients weigh by samples
        ([[7], [9]], 0.0, 1.0),
        ([[], []], 0.0, 0.0),
    ],
)
def test_label_counts_by_hand(counts: list[list[int]], skew: float, classes: float) -> None:
    table = np.array(counts, dtype=np.int64).reshape(len(counts), -1)
    assert label_skew(table) == pytest.approx(skew, abs=1e-12)
    assert classes_of(table) == pytest.approx(classes, abs=1e-9)


def test_distance_by_hand() -> None:
    """Two values per sample, one sample per client: the unbiased variance is twice the biased one, 1; the floor is a thousandth of 0.5."""
    means, variances = torch.tensor([[0.0], [1.0], [3.0]]).double(), torch.full((3, 1), 0.5).double()
    owners = np.array([0, 1, 2])
    per_square = 1 / 1.0005
    assert distance(means, variances, 2, owners) == pytest.approx((1 + 4 + 9) / 3 * per_square, rel=1e-12)
    assert distance(means[:1], variances[:1], 2, owners[:1]) == 0.0
    assert distance(means, variances, 2, np.zeros(3)) == 0.0  # one client


def test_distance_of_tables_whose_columns_are_constant_at_a_client() -> None:
    """A sample has one value per column; the floor is a thousandth of the mean of the clients' variances, 2 and 0."""
    means = torch.tensor([[0.0], [2.0], [5.0], [5.0]]).double()
    found = distance(means, torch.zeros(4, 1).double(), 1, np.array([0, 0, 1, 1]))
    one, other = 2.001, 0.001
    assert found == pytest.approx((one / other + other / one) / 2 - 1 + 16 * (1 / one + 1 / other) / 2, rel=1e-12)


def test_a_clients_variance_is_within_and_between_its_samples() -> None:
    """Client 0: values 0, 0, 2, 2 (biased variance 1, unbiased 4/3); client 1: the same, one higher."""
    means, variances = torch.tensor([[0.0], [2.0], [1.0], [3.0]]).double(), torch.zeros(4, 1).double()
    assert distance(means, variances, 2, np.array([0, 0, 1, 1])) == pytest.approx(1 / (4 / 3), rel=1e-12)


def test_moments_of_what_enters_the_first_batch_norm() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    x = torch.randint(0, 256, (5, 1, 2, 2), dtype=torch.uint8)
    means, variances, values = sample_moments(network, Samples(x, torch.zeros(5, dtype=torch.int64)))
    entered = network[0](Samples(x, torch.zeros(5)).batch(np.arange(5), x.float())[0]).double()
    assert values == 4
    torch.testing.assert_close(means, entered.mean((2, 3)))
    torch.testing.assert_close(variances, entered.var((2, 3), correction=0))
    plain = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))  # no BatchNorm: what enters the network
    means, _, values = sample_moments(plain, Samples(x, torch.zeros(5, dtype=torch.int64)))
    assert (tuple(means.shape), values) == ((5, 1), 4)


def test_shuffled_clients_keep_their_label_counts() -> None:
    rng = np.random.default_rng(0)
    owners, labels = rng.integers(0, 3, 60), rng.integers(0, 4, 60)
    shuffled = shuffled_within(owners, labels, rng)
    assert (shuffled != owners).any()
    for client in range(3):
        assert np.bincount(labels[owners == client]).tolist() == np.bincount(labels[shuffled == client]).tolist()


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


def test_the_measurement_is_the_same_every_time() -> None:
    config = RunConfig.from_mapping({"partition": "dirichlet", "partition-parameter": 0.3, "image-size": 8})
    assert measure(config) == measure(config)


def test_sites_are_not_measured_from_afar() -> None:
    config = RunConfig.from_mapping({"dataset": "sites", "classes": 4, "channels": 1, "image-size": 4})
    with pytest.raises(ConfigError, match="the clients' data are at their sites"):
        measure(config)
